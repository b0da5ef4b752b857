"""Corrupt objects: never delivered, missing once detected, repaired by the next set."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.fault_calls import PATIENCE_SECONDS
from hicache_conformance.harness.concurrency import Pending
from hicache_conformance.harness.corruption import ObjectCorruption
from hicache_conformance.harness.log_records import records_above_debug
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.harness.storage_under_test import PageGroup, check_each
from hicache_conformance.injectors.driver_methods import DriverMethodInjector
from hicache_conformance.model.case import covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Inconclusive, Violation, check
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.pools import PoolMemory
    from hicache_conformance.harness.storage_under_test import StorageUnderTest

ALL_DAMAGES = pytest.mark.parametrize(
    "damage", list(ObjectCorruption), ids=lambda damage: damage.replace(" ", "-")
)
WRONG_LENGTHS = (ObjectCorruption.SHORT, ObjectCorruption.LONG)
BY_CHECKSUM = (ObjectCorruption.FLIPPED_BIT, *WRONG_LENGTHS)
"""Damages that only the checksum tells for certain: a store of fixed places keeps a wrong length as
wrong bytes."""
REPAIR_SECONDS: Final = 1.0


class CorruptObjectCases:
    """GET-5, GET-7, EX-9 and the repairing half of SET-3."""

    @covers("GET-5", "GET-1", corrupts=True)
    @ALL_DAMAGES
    def test_damaged_pages_are_not_delivered(
        self, context: CaseContext, damage: ObjectCorruption
    ) -> None:
        """An object of the wrong length, owner, key or checksum is answered with False."""
        sut, key = context.storage(), context.keys(1)[0]
        _plant(context, sut, key, damage)
        _check_undelivered(sut, key, sut.get([key])[0], damage)

    @covers("GET-5", "GET-1", levels=[Level.POOLS], corrupts=True)
    def test_damaged_pages_of_a_side_pool(self, context: CaseContext) -> None:
        """Pages of every pool are verified."""
        pools: dict[str, PoolMemory] = {
            PoolName.KV: GuardedPool(),
            PoolName.INDEXER: GuardedPool(components=(40,)),
        }
        sut, key = context.storage(pools=pools), context.keys(1)[0]
        for pool in pools:
            _plant(context, sut, key, ObjectCorruption.FLIPPED_BIT, pool)
        for pool, found in sut.get_many([PageGroup([key], pool) for pool in pools]).items():
            _check_undelivered(sut, key, found[0], pool=pool)

    @covers("GET-5", "GET-1", corrupts=True)
    @pytest.mark.parametrize("place", [0, 3, 6])
    def test_each_page_of_a_batch_is_verified(self, context: CaseContext, place: int) -> None:
        """A damaged page at the beginning, in the middle and at the end of a batch."""
        sut, keys = context.storage(), context.keys(7)
        sut.store(keys[:place] + keys[place + 1 :])
        _plant(context, sut, keys[place], ObjectCorruption.FLIPPED_BIT)
        _check_undelivered(sut, keys[place], sut.get(keys)[place])

    @covers("GET-3", "SET-6", corrupts=True)
    def test_damage_in_the_middle_of_a_batch(self, context: CaseContext) -> None:
        """The pages around a damaged one are delivered, and a set over all of them stores all."""
        sut, keys = context.storage(), context.keys(7)
        # Planted in the middle: answers that shift by one behind a damaged page are then seen on
        # both sides of it.
        sut.store(keys[:3] + keys[4:])
        _plant(context, sut, keys[3], ObjectCorruption.FLIPPED_BIT)
        found = sut.get(keys)
        _check_undelivered(sut, keys[3], found[3])
        sut.compare(keys[:3] + keys[4:], found[:3] + found[4:], rule="GET-3")
        for index, (key, ok) in enumerate(zip(keys, sut.set(keys), strict=True)):
            rule = "SET-3" if index == 3 else "SET-6"
            check_each([key], [ok], rule, "was refused in a batch around a damaged page 3")
        sut.expect(keys, rule="SET-6")

    @covers("GET-7", corrupts=True)
    def test_damage_is_counted_and_told_once(self, context: CaseContext) -> None:
        """Two reads of a damaged page: one line in the log, one page counted as damaged."""
        sut, key, sound = context.storage(), context.keys(1)[0], context.keys(2)
        # A driver may have something to say about its first reads that has nothing to do with
        # damage.
        sut.store(sound)
        sut.expect(sound)
        _plant(context, sut, key, ObjectCorruption.FLIPPED_BIT)
        before = sut.stats().pages_damaged
        with records_above_debug() as records:
            # Counted between the two reads, because the second one must neither count nor log.
            sut.get([key])
            counted = sut.stats().pages_damaged - before
            sut.get([key])
        check(
            counted == 1,
            "GET-7",
            f"a get found page 0 key {short(key)} damaged, and counted {counted} damaged pages",
        )
        if len(records) != 1:
            told = [record.getMessage() for record in records]
            raise Violation(
                "GET-7",
                f"page 0 key {short(key)} is damaged; two reads of it logged {len(records)} lines: "
                f"{told}",
            )

    @covers("GET-7", corrupts=True)
    def test_each_damaged_page_is_counted(self, context: CaseContext) -> None:
        """A get of two damaged pages and a sound one counts two."""
        sut, keys = context.storage(), context.keys(3)
        sut.store(keys[1:2])
        for key in (keys[0], keys[2]):
            _plant(context, sut, key, ObjectCorruption.FLIPPED_BIT)
        before = sut.stats().pages_damaged
        sut.get(keys)
        counted = sut.stats().pages_damaged - before
        check(
            counted == 2,
            "GET-7",
            f"a get of 2 damaged pages and a sound one counted {counted} damaged pages",
        )

    @covers("GET-7", "EX-9", corrupts=True)
    @ALL_DAMAGES
    def test_a_page_found_damaged_stops_existing(
        self, context: CaseContext, damage: ObjectCorruption
    ) -> None:
        """A page that a read has found damaged is a miss for exists and every later read."""
        sut, key = context.storage(), context.keys(1)[0]
        _plant(context, sut, key, damage)
        # Found before it is read: a driver that remembers its lookups has to forget this one.
        sut.has(key)
        sut.get([key])
        # Another interface has no such call.
        native = context.interface_profile.is_native
        check(
            not sut.has(key) and (not native or not sut.present([key])[0]),
            "EX-9",
            f"a read found page 0 key {short(key)} damaged ({damage}), and it goes on existing",
        )
        # Asked again: a driver that only drops the page from its index may find it anew in the
        # store.
        check(
            sut.get([key])[0] is None,
            "GET-7",
            f"page 0 key {short(key)} was found damaged ({damage}), and a later get delivers it",
        )

    @covers("SET-3", "GET-7", corrupts=True)
    @ALL_DAMAGES
    def test_a_set_repairs_what_a_read_found(
        self, context: CaseContext, damage: ObjectCorruption
    ) -> None:
        """After a read has found a page damaged, a set of its key stores it."""
        sut, key = context.storage(), context.keys(1)[0]
        _plant(context, sut, key, damage)
        sut.get([key])
        _repair(sut, key, damage)

    @covers("SET-3", "GET-7", needs=["sharing>=process"], corrupts=True)
    def test_a_repair_by_another_storage(self, context: CaseContext) -> None:
        """A page that two storages have found damaged is there for both when one has set it."""
        one = context.storage()
        two, key = context.storage(replace(one.identity)), context.keys(1)[0]
        _plant(context, one, key, ObjectCorruption.FLIPPED_BIT)
        for sut in (one, two):
            sut.get([key])
        _repair(two, key, ObjectCorruption.FLIPPED_BIT)
        check(
            one.get([key])[0] is not None,
            "SET-3",
            f"page 0 key {short(key)} was found damaged and repaired by another storage, and a "
            f"get answers False",
        )
        one.expect([key], rule="SET-3")
        one.expect_existing([key], rule="SET-3")

    @covers("SET-1", "SET-3", needs=["sharing>=process"], corrupts=True)
    @pytest.mark.parametrize("step", ["discard", "remove"])
    def test_a_repair_before_damage_is_removed(self, context: CaseContext, step: str) -> None:
        """A storage has found damage and is about to remove it; another repairs the page first."""
        one, stopped = context.storage(), DriverMethodInjector()
        two, key = context.storage(replace(one.identity)), context.keys(1)[0]
        _plant(context, one, key, ObjectCorruption.FLIPPED_BIT)
        stopped.attach(one.storage)
        stopped.inject(FaultPlan("objects", (Fault(kind=FaultKind.HANG, operations=(step,)),)))
        reading = Pending(partial(one.get, [key]))
        while not (stopped.injected_count() or reading.comes_back(0.01)):
            pass
        repairing = Pending(lambda: two.get([key]) + two.set([key]))
        # A driver that lets nobody in meanwhile repairs afterwards.
        repairing.comes_back(REPAIR_SECONDS)
        stopped.heal()
        for call in (reading, repairing):
            check(call.comes_back(PATIENCE_SECONDS), "FT-3", "two reads of a damaged page hang")
        check(
            (repaired := repairing.answer()) == [None, True],
            "SET-3",
            f"a get and a set of a damaged page answered {repaired}",
        )
        for reader in (two, context.storage(replace(one.identity))):
            reader.expect([key])


def _plant(
    context: CaseContext,
    sut: StorageUnderTest,
    key: str,
    damage: ObjectCorruption,
    pool: str = PoolName.KV,
) -> None:
    if damage in BY_CHECKSUM and context.interface_profile.is_native:
        context.require_checksums(sut)
    held = context.corrupt_page(sut, key, damage, pool)
    # A store of fixed places cannot hold another length; then there is nothing, and nothing is what
    # a get must find.
    if not held and damage not in WRONG_LENGTHS:
        raise Inconclusive(
            f"the driver could not be made to hold a page with {damage}; override corrupt()"
        )


def _check_undelivered(
    sut: StorageUnderTest,
    key: str,
    content: bytes | None,
    damage: ObjectCorruption = ObjectCorruption.FLIPPED_BIT,
    pool: str = PoolName.KV,
) -> None:
    check(
        content is None,
        "GET-5",
        f"page key {short(key)} of pool {pool!r} is damaged ({damage}), and a get delivers it: "
        f"{sut.explain(key, content, pool)}",
    )


def _repair(sut: StorageUnderTest, key: str, damage: ObjectCorruption) -> None:
    check(
        sut.set([key]) == [True],
        "SET-3",
        f"page 0 key {short(key)} is damaged ({damage}), and a set of it answers False",
    )
    sut.expect([key], rule="SET-3")
    check(
        sut.has(key),
        "SET-3",
        f"page 0 key {short(key)} was damaged ({damage}) and repaired, and exists does not see it",
    )
