"""Out of space: what does not fit is refused or pushes out other pages, and room that becomes free is used again."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.small_store import BATCH, capacity_of, crowded, held, press
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.harness.storage_under_test import Share
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Untestable, Violation
from hicache_storage.layers import innermost
from hicache_storage.objects import ObjectStorage, WriteBatch
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject
    from hicache_storage.objects import Call

FAULTS: Final = (Level.FAULTS,)
PAGES: Final = 12


class SpaceCases:
    """SET-5."""

    @covers("SET-5", "GET-1", levels=FAULTS, needs=["capacity_option"])
    def test_batches_larger_than_the_store(self, lab: Lab) -> None:
        """A batch of three times the capacity, many times over: its first pages are stored, and smaller batches go on to be."""
        subject = crowded(lab, PAGES)
        for turn in range(5 * lab.profile.crowds):
            keys = lab.keys(3 * PAGES)
            answered = _set_counted(subject, keys)
            there = held(subject, keys, rule="GET-1")
            _check_refused(keys, answered, there, lasting=not subject.storage.capabilities.evicts)
            if not turn and not any(there):
                raise Violation("SET-5", f"{len(keys)} pages were set in an empty store of {PAGES}, and none was stored")
            if _free(subject, keys):
                _check_usable(lab, subject, f"after {turn + 1} batches of {len(keys)} pages, more than it holds")

    @covers("SET-5", levels=FAULTS, needs=["capacity_option"])
    def test_pages_longer_than_the_store(self, lab: Lab) -> None:
        """A page that is longer than the whole capacity is refused, or evicted at once; others are stored as before."""
        subject = crowded(lab, PAGES)
        length = 2 * capacity_of(PAGES)
        small = list[str]()
        wide = lab.with_pool(subject, "draft", GuardedPool(pages=2, components=(length,)))
        for turn in range(2 * lab.profile.crowds):
            keys = lab.keys(2, "long")
            answered = _set_counted(wide, keys, "draft")
            if not subject.storage.capabilities.evicts and any(answered):
                raise Violation("SET-5", f"a page of {length} bytes was accepted; the capacity is {capacity_of(PAGES)}")
            for key, content in zip(keys, wide.get(keys, "draft"), strict=True):
                wrong = wide.explain(key, content, "draft") if content is not None else ""
                if wrong:
                    raise Violation("GET-1", f"page key {short(key)}, longer than the store, {wrong}")
            if _free(subject, small):
                small = _check_usable(lab, subject, f"after {turn + 1} calls with pages of {length} bytes, more than it holds")

    @covers("SET-5", levels=FAULTS, needs=["capacity_option"])
    def test_nothing_leaks_while_the_store_is_full(self, lab: Lab) -> None:
        """After much writing into a full store it holds as many pages as at first."""
        subject = crowded(lab, PAGES)
        evicts = subject.storage.capabilities.evicts
        stored = press(lab, subject, 3 * PAGES, batch=1)
        first = held(subject, stored, rule="GET-1").count(True)
        for turn in range(3 * lab.profile.crowds):
            # Batches that do not fit at once, and the same keys twice, are where places get lost.
            keys = lab.keys(PAGES - 2)
            subject.set_many([Share(keys), Share(keys[: PAGES // 2])])
            stored += press(lab, subject, PAGES, batch=BATCH)
            later = held(subject, stored[-3 * PAGES :] if evicts else stored, rule="GET-1").count(True)
            if later < first - BATCH if evicts else later < first:
                raise Violation(
                    "SET-5", f"a full store held {first} pages at first, and {later} after {turn + 1} rounds of writing"
                )

    @covers("SET-5", levels=FAULTS, needs=["capacity_option", "deletes"])
    def test_deleted_room_is_used_again(self, lab: Lab) -> None:
        """What was deleted makes room for as much."""
        _check_reuse(lab, lambda subject, keys: subject.call("delete", lambda: subject.storage.delete(keys)), "deleted")

    @covers("SET-5", levels=FAULTS, needs=["capacity_option", "clears"])
    def test_cleared_room_is_used_again(self, lab: Lab) -> None:
        """What was cleared makes room for as much."""
        _check_reuse(lab, lambda subject, _: subject.call("clear", subject.storage.clear), "cleared")

    @covers("SET-5", levels=FAULTS, needs=["max_page_bytes"])
    def test_pages_longer_than_the_driver_takes(self, lab: Lab) -> None:
        """A page above max_page_bytes is refused, and one of just that length is stored."""
        limit = lab.capabilities.max_page_bytes
        assert limit is not None
        if limit > MOST_BYTES:
            raise Untestable(f"max_page_bytes is {limit}, more than this suite has memory for")
        pools = {PoolName.KV: GuardedPool(pages=2, components=(limit,)), "draft": GuardedPool(pages=2, components=(limit + 1,))}
        subject, longest, keys = lab.storage(pools=pools), lab.keys(1), lab.keys(2)
        subject.store(longest)
        if any(_set_counted(subject, keys, "draft")):
            raise Violation("SET-5", f"a page of {limit + 1} bytes was accepted, and max_page_bytes is {limit}")
        subject.expect_missing(keys, "draft", rule="SET-5", why="was refused because it is too long")
        subject.expect(longest)

    @covers("SET-5", "SET-6", "OB-1", levels=FAULTS, needs=["steps"])
    @pytest.mark.parametrize("room", [0, 1, 3], ids=lambda room: f"room-for-{room}")
    def test_a_store_that_says_it_is_full(self, lab: Lab, room: int) -> None:
        """A store below that takes no more pages: False for these, True for the rest, and everything again when there is room."""
        subject, before, keys = lab.storage(), lab.keys(3), lab.keys(6)
        subject.store(before)
        with _full(subject, room):
            answered = _set_counted(subject, keys)
            there = held(subject, keys, rule="GET-1")
        _check_refused(keys, answered, there, lasting=True)
        if answered.count(True) != room:
            raise Violation(
                "SET-5", f"{len(keys)} pages were set where {room} fit; {answered.count(True)} were answered with True"
            )
        subject.expect(before)
        subject.store(keys)
        subject.expect(keys)


MOST_BYTES: Final = 256 << 20


@contextmanager
def _full(subject: Subject, room: int) -> Generator[None]:
    """Let the store below take so many more pages and no more; without room it fails with ENOSPC."""
    driver = innermost(subject.storage)
    if not isinstance(driver, ObjectStorage):
        raise Untestable(
            "the driver is no ObjectStorage, so that its store cannot be made to say that it is full; a capacity_option would tell as much"
        )
    write = driver.write_objects

    def write_some(batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        left, written = room, list[list[bool]]()
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for batch in batches:
            some, left = batch.writes[:left], left - len(batch.writes[:left])
            done = write([WriteBatch(batch.namespace, some)], call)[0] if some else []
            written.append([*done, *[False] * (len(batch.writes) - len(some))])
        return written

    driver.write_objects = write_some  # type: ignore[method-assign]
    try:
        yield
    finally:
        del driver.write_objects  # the class's own is found again


def _set_counted(subject: Subject, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
    """Set pages, and check that the refused ones are counted."""
    before = subject.stats(pool).pages_refused
    answered = subject.set(keys, pool)
    counted = subject.stats(pool).pages_refused - before
    if counted != answered.count(False):
        raise Violation("OB-1", f"{answered.count(False)} of {len(keys)} pages were refused, and pages_refused grew by {counted}")
    return answered


def _check_refused(keys: Sequence[str], answered: Sequence[bool], there: Sequence[bool], *, lasting: bool) -> None:
    """What was answered with True is there, unless it may have been evicted; what was refused is not."""
    for index, (key, said, found) in enumerate(zip(keys, answered, there, strict=True)):
        page = f"page {index} key {short(key)} of a batch that does not fit was answered with {said}"
        if found and not said:
            raise Violation("SET-5", f"{page}, and a get delivers it")
        if lasting and said and not found:
            raise Violation("SET-5", f"{page}, and a get misses it")


def _free(subject: Subject, stored: Sequence[str]) -> bool:
    """Make room where the driver does not do that by itself; whether it does, or could be made to."""
    declared = subject.storage.capabilities
    if not declared.evicts and declared.clears:
        subject.call("clear", subject.storage.clear)
    elif not declared.evicts and declared.deletes:
        subject.call("delete", lambda: subject.storage.delete(stored))
    return declared.evicts or declared.clears or declared.deletes


def _check_usable(lab: Lab, subject: Subject, when: str) -> list[str]:
    """Store a small batch; its keys."""
    keys = lab.keys(BATCH)
    if not any(subject.set(keys)):
        raise Violation("SET-5", f"{when}, the store takes no page of a batch of {len(keys)} any more")
    if not any(held(subject, keys, rule="GET-1")):
        raise Violation("SET-5", f"{when}, a batch of {len(keys)} pages was answered with True, and none of it is there")
    return keys


def _check_reuse(lab: Lab, free: Callable[[Subject, list[str]], object], what: str) -> None:
    """Fill a store, free all of it, and fill half of it again, many times over."""
    subject = crowded(lab, PAGES)
    stored = press(lab, subject, 2 * PAGES)
    for turn in range(3 * lab.profile.crowds):
        free(subject, stored)
        half = lab.keys(PAGES // 2)
        refused = subject.set(half).count(False)
        missing = held(subject, half, rule="GET-1").count(False)
        if refused or missing:
            raise Violation(
                "SET-5", f"everything was {what} in a store of {PAGES} pages, for time {turn + 1}; "
                f"of {len(half)} pages set then {refused} were refused and {missing} cannot be read",
            )  # fmt: skip
        stored = half + press(lab, subject, PAGES)
