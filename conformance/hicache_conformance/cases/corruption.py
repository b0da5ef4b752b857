"""Corruption: never delivered, missing once detected, repaired by the next set."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.fault_calls import (
    PATIENCE_SECONDS,
    UNGUARDED,
    check_hits,
    serving_storage,
)
from hicache_conformance.harness.concurrency import Pending
from hicache_conformance.harness.corruption import (
    WRONG_LENGTHS,
    FileCorruption,
    ObjectCorruption,
    corrupt_files,
)
from hicache_conformance.harness.pools import Page, kv_and_state, short
from hicache_conformance.harness.process_state import records_above_debug
from hicache_conformance.harness.storage_under_test import PageGroup, StorageUnderTest, check_each
from hicache_conformance.injectors.disk import DiskInjector
from hicache_conformance.injectors.driver_methods import DriverMethodInjector
from hicache_conformance.model.case import Inconclusive, check, covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level, declares
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.injectors.injector import FaultInjector

ALL_DAMAGES = pytest.mark.parametrize(
    "damage", list(ObjectCorruption), ids=[each.replace(" ", "-") for each in ObjectCorruption]
)
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

    @covers("GET-5", "GET-1", levels=Level.POOLS, corrupts=True)
    def test_damaged_pages_of_a_side_pool(self, context: CaseContext) -> None:
        """Pages of every pool are verified."""
        sut, key = context.storage(pools=kv_and_state()), context.keys(1)[0]
        for pool in sut.memories:
            _plant(context, sut, key, ObjectCorruption.FLIPPED_BIT, pool)
        for pool, found in sut.get_many([PageGroup([key], pool) for pool in sut.memories]).items():
            _check_undelivered(sut, key, found[0], pool=pool)

    @covers("GET-5", "GET-3", "SET-6", "GET-1", corrupts=True)
    @pytest.mark.parametrize("place", [0, 3, 6])
    def test_each_page_of_a_batch_is_verified(self, context: CaseContext, place: int) -> None:
        """A damaged page at the beginning, middle and end of a batch, read and set."""
        sut, keys = context.storage(), context.keys(7)
        sound = keys[:place] + keys[place + 1 :]
        sut.store(sound)
        _plant(context, sut, keys[place], ObjectCorruption.FLIPPED_BIT)
        found = sut.get(keys)
        _check_undelivered(sut, keys[place], found[place])
        sut.compare(sound, found[:place] + found[place + 1 :], rule="GET-3")
        for index, (key, ok) in enumerate(zip(keys, sut.set(keys), strict=True)):
            rule = "SET-3" if index == place else "SET-6"
            check_each([key], [ok], rule, f"was refused in a batch around a damaged page {place}")
        sut.expect(keys, rule="SET-6")

    @covers("GET-7", corrupts=True)
    def test_damage_is_counted_and_told_once(self, context: CaseContext) -> None:
        """Of two damaged pages and a sound one, the first read counts and tells two, the second none."""
        sut, sound = context.stored(1)
        # A driver may have something to say about its first reads that has nothing to do with
        # damage.
        sut.expect(sound)
        damaged = context.keys(2)
        for key in damaged:
            _plant(context, sut, key, ObjectCorruption.FLIPPED_BIT)
        before = sut.stats().pages_damaged
        with records_above_debug() as records:
            for told in (2, 0):
                sut.get([damaged[0], *sound, damaged[1]])
                counted = sut.stats().pages_damaged - before
                lines = [record.getMessage() for record in records]
                records.clear()
                check(
                    counted == 2,
                    "GET-7",
                    f"gets of 2 damaged pages and a sound one counted {counted} damaged pages",
                )
                # Both may be told in one line.
                check(
                    bool(lines) == bool(told) and len(lines) <= told,
                    "GET-7",
                    f"{told} damaged pages were read for the first time, and {len(lines)} lines "
                    f"were logged: {lines}",
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
        refused = f"is damaged ({damage}), and a set of it answers False"
        check_each([key], sut.set([key]), "SET-3", refused)
        sut.expect([key], rule="SET-3")
        unseen = f"was damaged ({damage}) and repaired, and exists does not see it"
        check_each([key], [sut.has(key)], "SET-3", unseen)

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
    context.corrupt_page(sut, key, damage, pool)


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


PAGES: Final = 6


class BitRotCases:
    """GET-7, EX-9, SET-3 and FT-6 for damage that is done below the driver, not through it."""

    # What others spoil on its way is a named fault, and what a driver stored of it a corrupt object.
    @covers(
        *("GET-7", "EX-9", "SET-3", "FT-6", "FT-1", "GET-1"),
        levels=Level.FAULTS,
        needs=["the injector disk"],
    )
    @pytest.mark.parametrize(
        "decay", list(FileCorruption), ids=[each.replace(" ", "-") for each in FileCorruption]
    )
    def test_stored_bytes_rot(
        self, context: CaseContext, injector: FaultInjector, decay: FileCorruption
    ) -> None:
        """Stored pages rot below the driver; they are looked up, read twice and set."""
        sut, keys = serving_storage(context, injector, pages=PAGES)
        context.require_checksums(sut)
        sut = _damaged(context, injector, sut, keys, decay)
        # Two reads: the first may find the damage, and the second shows whether it was remembered.
        # Exists comes before both, since it need not read the bytes (EX-9) but may not raise.
        before = sut.stats().pages_damaged
        sut.exists(keys)
        check_hits(sut, keys, sut.get(keys), f"{injector.name}: {decay}")
        found = sut.get(keys)
        check_hits(sut, keys, found, f"{injector.name}: {decay}")
        # Only a flipped byte is told from a page that is gone: a cut file may read as an ordinary
        # miss.
        sees = decay is FileCorruption.FLIPPED and None in found
        check(
            not sees or sut.stats().pages_damaged > before,
            "GET-7",
            f"stored bytes were changed below the driver, a get answers {found.count(None)} misses "
            f"and counts none as damaged",
        )
        gone = [page is not None or not sut.has(key) for key, page in zip(keys, found, strict=True)]
        check_each(keys, gone, "EX-9", f"is not delivered ({decay}), and it goes on existing")
        lost = f"was lost ({decay} below the driver), and a set of it answers False"
        check_each(keys, sut.set(keys), "SET-3", lost)
        sut.expect(keys, rule="SET-3")


def _damaged(
    context: CaseContext,
    injector: FaultInjector,
    sut: StorageUnderTest,
    keys: list[str],
    decay: FileCorruption,
) -> StorageUnderTest:
    """The storage, or another one of its identity, over pages that have rotted."""
    memory, chance = sut.memories[PoolName.KV], context.chance("rot")
    contents = [
        context.patterns.render(Page(sut.identity, PoolName.KV, key), memory.page_bytes)
        for key in keys
    ]
    assert isinstance(injector, DiskInjector)
    reopens = declares(context.capabilities, "durability>=reopen")
    # Closed before the files change, because a driver may keep them mapped or in memory and would
    # go on answering from there.
    if reopens:
        sut.call("close", sut.storage.close)
    if not corrupt_files(injector.backing, contents, decay, chance):
        raise Inconclusive(
            "no file of the store contains the bytes of a page as they are, so that none can be "
            "damaged for certain"
        )
    if reopens:
        sut = context.storage(sut.identity, options=UNGUARDED)
    return sut
