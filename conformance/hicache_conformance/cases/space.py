"""Out of space: what does not fit is refused or pushes out other pages.

Room that becomes free is used again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.small_store import (
    BATCH,
    capacity_of,
    fill_store,
    open_small_store,
    readable,
)
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.harness.storage_under_test import PageGroup, StorageUnderTest
from hicache_conformance.model.case import Inconclusive, check, covers
from hicache_conformance.model.rules import Level
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.fixtures.context import CaseContext

PAGES: Final = 12
MAX_BYTES: Final = 256 << 20


class SpaceCases:
    """SET-5."""

    @covers("SET-5", "GET-1", levels=Level.FAULTS, needs=["capacity_option"])
    def test_batches_larger_than_the_store(self, context: CaseContext) -> None:
        """Batches of three times the capacity, and smaller ones after them."""
        sut = open_small_store(context, PAGES)
        for turn in range(5 * context.profile.store_fills):
            keys = context.keys(3 * PAGES)
            answered = _set_counted(sut, keys)
            there = readable(sut, keys, rule="GET-1")
            _check_refused(keys, answered, there, lasting=not sut.storage.capabilities.evicts)
            check(
                turn or any(there),
                "SET-5",
                f"{len(keys)} pages were set in an empty store of {PAGES}, and none was stored",
            )
            if _free(sut, keys):
                batches = f"{turn + 1} batches of {len(keys)} pages"
                _check_usable(context, sut, f"after {batches}, more than it holds")

    @covers("SET-5", levels=Level.FAULTS, needs=["capacity_option"])
    def test_pages_longer_than_the_store(self, context: CaseContext) -> None:
        """Pages longer than the whole capacity, and others after them."""
        sut = open_small_store(context, PAGES)
        length = 2 * capacity_of(PAGES)
        small = list[str]()
        wide = context.with_pool(sut, "draft", GuardedPool(pages=2, components=(length,)))
        for turn in range(2 * context.profile.store_fills):
            keys = context.keys(2, "long")
            answered = _set_counted(wide, keys, "draft")
            check(
                sut.storage.capabilities.evicts or not any(answered),
                "SET-5",
                f"a page of {length} bytes was accepted; the capacity is {capacity_of(PAGES)}",
            )
            longer = ", longer than the store,"
            wide.check_right(keys, wide.get(keys, "draft"), "draft", when=longer)
            if _free(sut, small):
                calls = f"{turn + 1} calls with pages of {length} bytes"
                small = _check_usable(context, sut, f"after {calls}, more than it holds")

    @covers("SET-5", levels=Level.FAULTS, needs=["capacity_option"])
    def test_nothing_leaks_while_the_store_is_full(self, context: CaseContext) -> None:
        """After much writing into a full store it holds as many pages as at first."""
        sut = open_small_store(context, PAGES)
        evicts = sut.storage.capabilities.evicts
        stored = fill_store(context, sut, 3 * PAGES, batch=1)
        first = readable(sut, stored, rule="GET-1").count(True)
        for turn in range(3 * context.profile.store_fills):
            # Batches that do not fit at once, and the same keys twice, are where places get lost.
            keys = context.keys(PAGES - 2)
            sut.set_many([PageGroup(keys), PageGroup(keys[: PAGES // 2])])
            stored += fill_store(context, sut, PAGES, batch=BATCH)
            there = readable(sut, stored[-3 * PAGES :] if evicts else stored, rule="GET-1")
            later = there.count(True)
            check(
                later >= first - (BATCH if evicts else 0),
                "SET-5",
                f"a full store held {first} pages at first, and {later} after {turn + 1} "
                f"rounds of writing",
            )

    @covers("SET-5", levels=Level.FAULTS, needs=["capacity_option", "deletes"])
    def test_deleted_room_is_used_again(self, context: CaseContext) -> None:
        """Deleted pages make room for as many."""
        _check_reuse(context, lambda sut, keys: sut.delete(keys), "deleted")

    @covers("SET-5", levels=Level.FAULTS, needs=["capacity_option", "clears"])
    def test_cleared_room_is_used_again(self, context: CaseContext) -> None:
        """Cleared pages make room for as many."""
        _check_reuse(context, lambda sut, _: sut.call("clear", sut.storage.clear), "cleared")

    @covers("SET-5", levels=Level.FAULTS, needs=["max_page_bytes"])
    def test_pages_longer_than_the_driver_takes(self, context: CaseContext) -> None:
        """A page above max_page_bytes is refused, and one of just that length is stored."""
        limit = context.capabilities.max_page_bytes
        assert limit is not None
        if limit > MAX_BYTES:
            raise Inconclusive(f"max_page_bytes is {limit}, more than this suite has memory for")
        pools = {
            PoolName.KV: GuardedPool(pages=2, components=(limit,), exact=True),
            "draft": GuardedPool(pages=2, components=(limit + 1,), exact=True),
        }
        sut, max_keys, keys = context.storage(pools=pools), context.keys(1), context.keys(2)
        sut.store(max_keys)
        check(
            not any(_set_counted(sut, keys, "draft")),
            "SET-5",
            f"a page of {limit + 1} bytes was accepted, and max_page_bytes is {limit}",
        )
        sut.expect_missing(keys, "draft", rule="SET-5", why="was refused because it is too long")
        sut.expect(max_keys)


def _set_counted(sut: StorageUnderTest, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
    """Set pages, and check that the refused ones are counted."""
    before = sut.stats(pool).pages_refused
    answered = sut.set(keys, pool)
    counted = sut.stats(pool).pages_refused - before
    check(
        counted == answered.count(False),
        "OB-1",
        f"{answered.count(False)} of {len(keys)} pages were refused, and pages_refused grew by "
        f"{counted}",
    )
    return answered


def _check_refused(
    keys: Sequence[str], answered: Sequence[bool], there: Sequence[bool], *, lasting: bool
) -> None:
    """Check that acknowledged pages are there, unless evicted, and refused ones are not."""
    for index, (key, said, found) in enumerate(zip(keys, answered, there, strict=True)):
        page = (
            f"page {index} key {short(key)} of a batch that does not fit was answered with {said}"
        )
        check(not found or said, "SET-5", f"{page}, and a get delivers it")
        check(not lasting or not said or found, "SET-5", f"{page}, and a get misses it")


def _free(sut: StorageUnderTest, stored: Sequence[str]) -> bool:
    """Make room where the driver does not do that by itself.

    Whether it does, or could be made to.
    """
    declared = sut.storage.capabilities
    if not declared.evicts and declared.clears:
        sut.call("clear", sut.storage.clear)
    elif not declared.evicts and declared.deletes:
        sut.delete(stored)
    return declared.evicts or declared.clears or declared.deletes


def _check_usable(context: CaseContext, sut: StorageUnderTest, when: str) -> list[str]:
    """Store a small batch; its keys."""
    keys = context.keys(BATCH)
    check(
        any(sut.set(keys)),
        "SET-5",
        f"{when}, the store takes no page of a batch of {len(keys)} any more",
    )
    check(
        any(readable(sut, keys, rule="GET-1")),
        "SET-5",
        f"{when}, a batch of {len(keys)} pages was answered with True, and none of it is there",
    )
    return keys


def _check_reuse(
    context: CaseContext, free: Callable[[StorageUnderTest, list[str]], object], what: str
) -> None:
    """Fill a store, free all of it, and fill half of it again, many times over."""
    sut = open_small_store(context, PAGES)
    stored = fill_store(context, sut, 2 * PAGES)
    for turn in range(3 * context.profile.store_fills):
        free(sut, stored)
        half = context.keys(PAGES // 2)
        refused = sut.set(half).count(False)
        missing = readable(sut, half, rule="GET-1").count(False)
        check(
            not refused and not missing,
            "SET-5",
            f"everything was {what} in a store of {PAGES} pages, for time {turn + 1}; "
            f"of {len(half)} pages set then {refused} were refused and {missing} cannot be read",
        )
        stored = half + fill_store(context, sut, PAGES)
