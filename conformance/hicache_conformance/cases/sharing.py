"""Visibility of pages between processes that have the store open at the same time."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.harness.corruption import ObjectCorruption
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool, PoolShape
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Inconclusive, check
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.processes.worker import WorkerProcess

SHARED: Final = [Level.SHARED]
ALSO_SHARED: Final = [Level.CORE, Level.SHARED]
BETWEEN_PROCESSES: Final = ("sharing>=processes",)
SHAPES: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=32),
    PoolName.MAMBA: PoolShape(pages=32, page_size=1, components=(80, 24)),
}


class SharingCases:
    """ID-2 between processes; SET-1, SET-3, LC-4, GET-7 and EX-9 as a second process sees them."""

    @covers("ID-2", levels=SHARED, needs=BETWEEN_PROCESSES)
    def test_processes_share_pages(self, context: CaseContext) -> None:
        """Pages set by one process are found by others.

        Whether they were opened before the set or after it, and also if they had asked before.
        """
        group = ProcessGroup(context, SHAPES)
        # Interpreters of their own: what differs between two of them must not be part of a name.
        writer, early = group.worker("writer", fresh=True), group.worker("early")
        keys, later = group.new_keys(8), group.new_keys(8)
        for pool in SHAPES:
            early.get(keys, pool)
        early.exists(keys)
        values = {pool: group.store(writer, keys, "SET-1", pool) for pool in SHAPES}
        late = group.worker("late")
        for reader in (writer, early, late):
            for pool, value in values.items():
                group.expect(reader, keys, value, "ID-2", pool)
            group.expect_existing(reader, keys, "ID-2")
        value = group.store(early, later, "SET-1")
        for reader in (early, writer, late):
            group.expect(reader, later, value, "ID-2")
        own = context.storage(
            group.identity,
            pools={pool: GuardedPool(**asdict(shape)) for pool, shape in SHAPES.items()},
        )
        for pool, value in values.items():
            own.expect(keys, pool, generation=value, rule="ID-2")

    @covers("ID-2", levels=SHARED, needs=(*BETWEEN_PROCESSES, "durability>=reopen"))
    def test_pages_outlive_their_process(self, context: CaseContext) -> None:
        """A process sets pages and ends; one that starts afterwards finds them."""
        group = ProcessGroup(context)
        writer, keys = group.worker("writer"), group.new_keys(8)
        value = group.store(writer, keys, "SET-1")
        writer.close()
        heir = group.worker("heir")
        group.expect(heir, keys, value, "ID-2")
        group.expect_existing(heir, keys, "ID-2")

    @covers("SET-3", levels=ALSO_SHARED, needs=BETWEEN_PROCESSES)
    def test_what_another_process_set_is_not_rewritten(self, context: CaseContext) -> None:
        """A set of what another process has stored answers True, and the first bytes stay."""
        group = ProcessGroup(context)
        one, two, keys = group.worker("one"), group.worker("two"), group.new_keys(8)
        two.exists(keys)
        value = group.store(one, keys, "SET-1")
        group.store(two, keys, "SET-3")
        for reader in (one, two):
            group.expect(reader, keys, value, "SET-1")
        group.judge("SET-3")

    @covers("SET-1", levels=ALSO_SHARED, needs=(*BETWEEN_PROCESSES, "deletes"))
    def test_what_another_process_deleted(self, context: CaseContext) -> None:
        """Pages that another process deletes are gone at once.

        Processes that had known them can set them anew.
        """
        _remove_and_set_anew(context, lambda worker, keys: worker.delete(keys), "SET-1")

    @covers(
        "LC-4",
        "SET-1",
        levels=[Level.CORE, Level.IDENTITY, Level.SHARED],
        needs=(*BETWEEN_PROCESSES, "clears"),
    )
    def test_what_another_process_cleared(self, context: CaseContext) -> None:
        """Pages that another process clears are gone at once.

        Processes that had known them can set them anew.
        """
        _remove_and_set_anew(context, lambda worker, keys: worker.clear(), "LC-4")

    @covers("GET-7", "EX-9", "SET-3", levels=ALSO_SHARED, needs=BETWEEN_PROCESSES, corrupts=True)
    def test_damage_found_by_one_and_repaired_by_another(self, context: CaseContext) -> None:
        """One process finds a page damaged, one sets it anew: both read it then."""
        group = ProcessGroup(context)
        one, two, own = group.worker("one"), group.worker("two"), context.storage(group.identity)
        context.require_checksums(own)
        for finders, mender in (((one,), one), ((one,), two), ((one, two), two)):
            keys = group.new_keys(3)
            for key in keys:
                if not context.corrupt_page(own, key, ObjectCorruption.FLIPPED_BIT):
                    raise Inconclusive(
                        "the driver could not be made to hold a damaged page; override corrupt()"
                    )
            for finder in finders:
                _expect_missing(group, finder, keys)
            value = group.store(mender, keys, "SET-3")
            for reader in (mender, one, two):
                group.expect(reader, keys, value, "SET-3")
                group.expect_existing(reader, keys, "EX-9")


def _remove_and_set_anew(
    context: CaseContext, remove: Callable[[WorkerProcess, list[str]], object], rule: str
) -> None:
    group = ProcessGroup(context)
    one, two, keys = group.worker("one"), group.worker("two"), group.new_keys(6)
    # Both have set, read and looked for the pages, so that whatever can be remembered of them is.
    for worker in (one, two):
        group.store(worker, keys, "SET-1")
        worker.get(keys)
        worker.exists(keys)
    remove(one, keys)
    for worker in (two, one):
        worker.exists(keys)
        worker.get(keys)
    # What was delivered until now is judged first: a page that is still there is not set anew.
    group.judge(rule)
    value = group.store(two, keys[:3], "SET-1")
    others = group.store(one, keys[3:], "SET-1")
    for worker in (one, two):
        group.expect(worker, keys[:3], value, "SET-1")
        group.expect(worker, keys[3:], others, "SET-1")
    group.judge(rule)


def _expect_missing(group: ProcessGroup, worker: WorkerProcess, keys: list[str]) -> None:
    for index, (key, found) in enumerate(zip(keys, worker.get(keys), strict=True)):
        check(
            found is None,
            "GET-5",
            f"page {index} key {short(key)} is damaged, and is delivered to process {worker.name}",
        )
    check(
        not worker.exists(keys),
        "EX-9",
        f"process {worker.name} has found {len(keys)} pages damaged, and says that they exist",
    )
