"""Reading: the right bytes in the right place, or nothing."""

from __future__ import annotations

import logging
from itertools import product
from typing import TYPE_CHECKING

import pytest

from hicache_conformance.harness.log_records import records_above_debug
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.harness.storage_under_test import Share
from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_storage.spec import HiCacheError, PoolName, PoolTransfer

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject


class ReadingCases:
    """GET-1 to GET-6."""

    @covers("GET-1", "SET-1")
    def test_pages_read_back(self, lab: Lab) -> None:
        """Batches of several sizes, read whole, in reverse, and in part."""
        subject = lab.storage()
        for size in (1, 2, 7, 32, 64):
            keys = lab.keys(size)
            subject.store(keys)
            subject.expect(keys)
            subject.expect(keys[::-1])
            subject.expect(keys[size // 2 :])

    @covers("GET-1")
    def test_nothing_is_there_before_a_set(self, lab: Lab) -> None:
        """A store that holds nothing delivers nothing."""
        lab.storage().expect_missing(lab.keys(8), rule="GET-1", why="was never set")

    @covers("GET-1", "GET-3")
    def test_holes(self, lab: Lab) -> None:
        """Every pattern of stored and missing pages in a batch of 5, and one long batch with every third page missing."""
        subject = lab.storage()
        stored, missing = lab.keys(64), lab.keys(64)
        subject.store(stored)
        for pattern in product((True, False), repeat=5):
            _read_with_holes(subject, stored, missing, pattern)
        _read_with_holes(subject, stored, missing, [index % 3 != 1 for index in range(64)])

    @covers("GET-3")
    def test_a_key_that_stands_twice(self, lab: Lab) -> None:
        """Each place of a repeated key is answered, and delivered, by itself."""
        subject, (first, second), missing = lab.storage(), lab.keys(2), lab.keys(1)[0]
        subject.store([first, second])
        chain = [first, missing, second, first, first, missing]
        found = subject.get(chain)
        for index in (1, 5):
            if found[index] is not None:
                raise Violation("GET-1", f"page {index} key {short(missing)} was never set, and a get delivers it")
        present = [index for index in range(len(chain)) if index not in (1, 5)]
        subject.compare([chain[index] for index in present], [found[index] for index in present], rule="GET-3")

    @covers("GET-3")
    def test_transfers_of_one_pool(self, lab: Lab) -> None:
        """Several transfers of a pool in one call answer in one list, one after the other."""
        subject, missing = lab.storage(), lab.keys(1)
        parts = [lab.keys(3), lab.keys(1), lab.keys(4)]
        subject.store_many([Share(part) for part in parts])
        found = subject.get_many([Share(parts[0]), Share(missing), Share([]), Share(parts[1]), Share(parts[2])])[PoolName.KV]
        if found[3] is not None:
            raise Violation("GET-3", f"the second transfer's key {short(missing[0])} was never set, and its place says True")
        subject.compare([*parts[0], *parts[1], *parts[2]], found[:3] + found[4:], rule="GET-3")

    @covers("GET-3")
    def test_no_keys(self, lab: Lab) -> None:
        """A transfer without keys is answered with an empty list."""
        subject = lab.storage()
        for answer in (subject.set([]), subject.get([])):
            if answer != []:
                raise Violation("GET-3", f"no keys were answered with {answer}")

    @covers("GET-2")
    def test_neighbours_of_a_destination(self, lab: Lab) -> None:
        """Single pages, runs and scattered pages: nothing else in the pool changes, nor do the bytes around it."""
        subject, missing = lab.storage(), lab.keys(8)
        stored = lab.keys(32)
        subject.store(stored)
        for _ in range(20):
            chain = lab.random.sample(stored + missing, lab.random.randint(1, 12))
            # `get` itself checks every page that is no destination.
            subject.get(chain)

    @covers("GET-1", "GET-2")
    def test_one_destination_for_two_keys(self, lab: Lab) -> None:
        """Two keys that are to be read into one page: refused, or at most one of them is said to be there."""
        subject, keys = lab.storage(), lab.keys(2)
        subject.store(keys)
        transfer = PoolTransfer(PoolName.KV, slots_of([3, 3], 2), keys=keys)
        try:
            answer = subject.storage.batch_get_v2([transfer])[PoolName.KV]
        except HiCacheError:
            answer = [False, False]
        if sum(answer) > 1:
            raise Violation("GET-1", "two keys were read into one host page, and both were answered with True")

    @covers("GET-4")
    @pytest.mark.parametrize("components", [(1,), (7, 1), (64, 64), (33, 5, 128, 1, 17, 96, 2)], ids=lambda c: f"{len(c)}")
    def test_components(self, lab: Lab, components: tuple[int, ...]) -> None:
        """Pages of one to seven components of odd lengths arrive with all of them."""
        subject, keys = lab.storage(pools={PoolName.KV: GuardedPool(pages=16, components=components)}), lab.keys(5)
        subject.store(keys)
        subject.expect_own(keys, rule="GET-4")

    @covers("GET-4", "GET-1")
    def test_large_pages(self, lab: Lab) -> None:
        """Pages of 3 MiB and a few bytes, in two components."""
        pool = GuardedPool(pages=4, components=((1 << 20) + 3, (2 << 20) + 5))
        subject, keys = lab.storage(pools={PoolName.KV: pool}), lab.keys(2)
        subject.store(keys)
        subject.expect(keys)

    @covers("GET-6")
    def test_missing_pages_are_quiet(self, lab: Lab) -> None:
        """Misses are counted as misses, and log nothing above debug level."""
        subject = lab.storage()
        # The first call may connect, and may say so.
        subject.get(lab.keys(1))
        faults = subject.storage.get_stats().faults
        with records_above_debug() as records:
            subject.expect_missing(lab.keys(16), rule="GET-1", why="was never set")
        if records:
            raise Violation(
                "GET-6", f"reading missing pages logged {logging.getLevelName(records[0].levelno)}: {records[0].getMessage()}"
            )
        if subject.storage.get_stats().faults != faults:
            raise Violation("GET-6", "reading missing pages counted as faults")


def _read_with_holes(subject: Subject, stored: list[str], missing: list[str], pattern: tuple[bool, ...] | list[bool]) -> None:
    chain = [stored[index] if there else missing[index] for index, there in enumerate(pattern)]
    found = subject.get(chain)
    for index, (there, content) in enumerate(zip(pattern, found, strict=True)):
        if not there and content is not None:
            held = subject.explain(chain[index], content)
            raise Violation("GET-1", f"page {index} key {short(chain[index])} was never set, and a get delivers it: {held}")
    present = [index for index, there in enumerate(pattern) if there]
    subject.compare([chain[index] for index in present], [found[index] for index in present], rule="GET-3")
