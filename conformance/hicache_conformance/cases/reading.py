"""Reading: the right bytes in the right place, or nothing."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.context import NO_LAYERS, CaseContext
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.harness.process_state import records_above_debug
from hicache_conformance.harness.storage_under_test import PageGroup, check_form
from hicache_conformance.model.case import check, covers
from hicache_storage.spec import HiCacheError, PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


ORDERS: Final[Mapping[str, Callable[[int], int]]] = {
    "ascending": lambda page: page,
    "descending": lambda page: -page,
    "every-second": lambda page: page % 2 * 64 + page,
    "at-the-end": lambda page: page if page >= 48 else 64 + page,
}
"""Orders of the host pages of a call, by what they are sorted by."""


def _slice(slots: torch.Tensor) -> torch.Tensor:
    return _behind(slots).flatten()[len(slots) :]


def _column(slots: torch.Tensor) -> torch.Tensor:
    return _behind(slots).T.contiguous()[:, 1]


def _behind(slots: torch.Tensor) -> torch.Tensor:
    import torch

    # The other row are slots of the pool too, so that nothing but the wrong page shows an error.
    return torch.stack([torch.arange(len(slots)), slots])


VIEWS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "slice": _slice,
    "column": _column,
}
"""Tensors that hold the slots of a call in a part of their memory."""


class ReadingCases:
    """GET-1 to GET-6."""

    @covers("GET-1", "SET-1")
    def test_pages_read_back(self, context: CaseContext) -> None:
        """Batches of several sizes, read whole, in reverse, and in part; nothing before a set."""
        sut = context.storage()
        sut.expect_missing(context.keys(8), rule="GET-1", why="was never set")
        for size in (1, 2, 7, 32, 64):
            keys = context.keys(size)
            sut.store(keys)
            sut.expect(keys)
            sut.expect(keys[::-1])
            sut.expect(keys[size // 2 :])

    @covers("GET-1", "GET-3", "GET-2")
    def test_holes(self, context: CaseContext) -> None:
        """Every pattern of stored and missing pages in a batch of 5, and a long one."""
        sut, stored = context.stored(64)
        missing = context.keys(64)
        third = [index % 3 != 1 for index in range(64)]
        for pattern in (*product((True, False), repeat=5), third):
            chain = [(stored if there else missing)[index] for index, there in enumerate(pattern)]
            sut.compare_holed(chain, sut.get(chain), set(stored))

    @covers("GET-3")
    def test_an_answer_stays_what_it_is(self, context: CaseContext) -> None:
        """The answers of a get and a set have their form, and do not change with later calls."""
        # Without the layers, whose counters would fail on a wrong form before the driver's answer
        # arrives here.
        sut, stored = context.stored(3, options=NO_LAYERS)
        chain = [*stored, *context.keys(2)]
        groups = [PageGroup(chain)]
        transfers = sut.transfers(groups, [sut.own_pages(chain)])
        found = sut.call("batch_get_v2", lambda: sut.storage.batch_get_v2(transfers))
        written = sut.call("batch_set_v2", lambda: sut.storage.batch_set_v2(transfers))
        before = [check_form(answer, groups) for answer in (found, written)]
        # Both check the form, as `context.stored` does.
        for keys in (context.keys(2), stored[:1]):
            sut.get(keys)
            sut.set(keys)
        after = [dict(found), dict(written)]
        check(
            after == before,
            "GET-3",
            f"the answers of a get and a set changed with later calls, from {before} to {after}",
        )

    @covers("GET-3")
    def test_no_keys(self, context: CaseContext) -> None:
        """A transfer without keys is answered with an empty list, and no transfer with no pool."""
        sut = context.storage()
        for answer in (sut.set([]), sut.get([])):
            check(answer == [], "GET-3", f"no keys were answered with {answer}")
        # Both check that no pool is answered for.
        sut.set_many([])
        sut.get_many([])

    @covers("GET-1", "SET-1")
    def test_more_pages_than_a_request_holds(self, context: CaseContext) -> None:
        """300 pages in one call, which a driver may have to divide."""
        memory = GuardedPool(pages=320, components=(32,))
        sut, keys = context.stored(300, pools={PoolName.KV: memory})
        sut.expect(keys)
        # Page by page, so that what a set has left out is not blamed on a get.
        sut.expect(keys[-1:])

    @covers("GET-1", "SET-1")
    @pytest.mark.parametrize("order", ORDERS)
    def test_host_pages_in_order(self, context: CaseContext, order: str) -> None:
        """Host pages that adjoin, descend, or lie at the end, as engines have them."""
        sut = context.storage()
        for size in (2, 7, 64):
            ordered, scattered = context.keys(size), context.keys(size)
            sut.store(scattered)
            shuffle = sut.arrange
            sut.arrange = lambda pages: pages.sort(key=ORDERS[order])
            sut.expect(scattered)
            sut.store(ordered)
            # Read into another order than it was set from, so that two errors do not cancel out.
            sut.arrange = shuffle
            sut.expect(ordered)

    @covers("GET-2", "GET-1", "SET-1")
    @pytest.mark.parametrize("view", VIEWS)
    def test_indices_that_are_part_of_a_tensor(self, context: CaseContext, view: str) -> None:
        """Indices that are a slice of a longer tensor, or a column of one."""
        sut, keys = context.stored(6)
        others = context.keys(6)
        sut.view = VIEWS[view]
        sut.expect(keys)
        sut.store(others)
        sut.expect(others)

    @covers("GET-1", "GET-2")
    def test_one_destination_for_two_keys(self, context: CaseContext) -> None:
        """Two keys that are to be read into one page: at most one is there."""
        sut, keys = context.stored(2)
        transfer = PoolTransfer(PoolName.KV, slots_of([3, 3], 2), keys=keys)
        try:
            answer = sut.storage.batch_get_v2([transfer])[PoolName.KV]
        except HiCacheError:
            answer = [False, False]
        check(
            sum(answer) <= 1,
            "GET-1",
            "two keys were read into one host page, and both were answered with True",
        )

    @covers("GET-4")
    @pytest.mark.parametrize(
        "components",
        [(1,), (7, 1), (64, 64), (33, 5, 128, 1, 17, 96, 2)],
        ids=lambda c: f"{len(c)}",
    )
    def test_components(self, context: CaseContext, components: tuple[int, ...]) -> None:
        """Pages of one to seven components of odd lengths arrive with all of them."""
        pool = GuardedPool(pages=16, components=components)
        sut, keys = context.stored(5, pools={PoolName.KV: pool})
        sut.expect_own(keys, rule="GET-4")

    @covers("GET-4", "GET-1")
    def test_large_pages(self, context: CaseContext) -> None:
        """Pages of 3 MiB and a few bytes, in two components."""
        pool = GuardedPool(pages=4, components=((1 << 20) + 3, (2 << 20) + 5))
        sut, keys = context.stored(2, pools={PoolName.KV: pool})
        sut.expect(keys)

    @covers("GET-6")
    def test_missing_pages_are_quiet(self, context: CaseContext) -> None:
        """Misses are counted as misses, and log nothing above debug level."""
        sut = context.storage()
        # The first call may connect, and may say so.
        sut.get(context.keys(1))
        faults = sut.storage.get_stats().faults
        with records_above_debug() as records:
            sut.expect_missing(context.keys(16), rule="GET-1", why="was never set")
        told = [f"{record.levelname}: {record.getMessage()}" for record in records]
        check(not told, "GET-6", f"reading missing pages logged {''.join(told[:1])}")
        check(
            sut.storage.get_stats().faults == faults,
            "GET-6",
            "reading missing pages counted as faults",
        )
