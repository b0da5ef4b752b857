"""Reading: the right bytes in the right place, or nothing. Writing: the meaning of True."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.context import NO_LAYERS, CaseContext
from hicache_conformance.harness.pools import GuardedPool, canary, short, slots_of
from hicache_conformance.harness.process_state import records_above_debug
from hicache_conformance.harness.storage_under_test import (
    PageGroup,
    StorageUnderTest,
    check_each,
    check_form,
)
from hicache_conformance.model.case import check, covers
from hicache_storage.spec import HiCacheError, PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from hicache_conformance.fixtures.context import CaseContext


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


CONTENTS: Final[Mapping[str, bytes]] = {
    "a page of zeros": b"\0",
    "a page of ones": b"\xff",
    "a page that ends with zeros": b"page" + bytes(92),
    "a page that begins with zeros": bytes(92) + b"page",
    "a page of the envelope's mark": b"HCP2" + struct.pack("<HHQ", 1, 0, 256),
    "a page of line ends": b"\r\n\n\x1a",
    "a page of NaNs": b"\x01\x7f\x81\x7f\x01\xfc\xa0\x7f",
}
"""Pages by their words; each is filled with its bytes, the last ones at its end."""


class WritingCases:
    """SET-1, SET-3, SET-6 and SET-7."""

    @covers("SET-1", needs=["deletes"])
    def test_deleted_pages_are_gone(self, context: CaseContext) -> None:
        """delete() of pages that were read, of a missing one and of none; set anew."""
        sut, keys = context.stored(6)
        missing = context.keys(1)
        sut.expect_existing(keys, rule="SET-1")
        # No keys are none, and not all.
        sut.delete([])
        sut.expect(keys)
        removed = sut.delete([keys[1], missing[0], keys[4]])
        check(
            removed == [True, False, True],
            "SET-1",
            f"deleting a stored, a missing and a stored page answered {removed}",
        )
        sut.expect_missing([keys[1], keys[4]], rule="SET-1", why="was deleted")
        sut.expect([keys[0], keys[2], keys[3], keys[5]])
        sut.store([keys[1]], generation=1)
        sut.expect([keys[1]], generation=1)

    @covers("SET-1", needs=["deletes", "sharing>=process"])
    def test_pages_that_another_storage_deletes(self, context: CaseContext) -> None:
        """Pages that two storages have read, deleted by one, and set by the other."""
        one, keys = context.stored(4)
        two = context.storage(replace(one.identity))
        for sut in (one, two):
            sut.expect_existing(keys, rule="SET-1")
            sut.expect(keys)
        check(
            two.delete(keys) == [True] * 4,
            "SET-1",
            "deleting 4 pages of another storage did not remove them all",
        )
        for sut in (two, one):
            sut.expect_missing(keys, rule="SET-1", why="was deleted by another storage")
        one.store(keys, generation=1)
        for sut in (one, two):
            sut.expect(keys, generation=1)

    @covers("SET-1", needs=["deletes", "durability>=reopen"])
    def test_deleted_pages_stay_gone(self, context: CaseContext) -> None:
        """A storage that is opened when all others are closed finds no page that was deleted."""
        one, keys = context.stored(4)
        one.delete(keys[:2])
        one.call("close", one.storage.close)
        two = context.storage(replace(one.identity))
        two.expect_missing(keys[:2], rule="SET-1", why="was deleted before the store was reopened")
        two.expect(keys[2:])

    @covers("SET-1", needs=["deletes"])
    def test_equal_pages_under_two_keys(self, context: CaseContext) -> None:
        """Two keys whose pages have the same bytes: one is deleted, and the other stays."""
        sut, keys = context.storage(), context.keys(2)
        content = b"the same bytes under two keys".ljust(sut.memories[PoolName.KV].page_bytes)
        for key in keys:
            store_content(sut, key, content, "a page that equals another one")
        sut.delete(keys[:1])
        expect_content(sut, keys[1], content, "a page whose equal was deleted")
        sut.expect_missing(keys[:1], rule="SET-1", why="was deleted")

    @covers("SET-1", "GET-1")
    def test_pages_of_any_bytes(self, context: CaseContext) -> None:
        """Pages of zeros, and pages with bytes of file formats in them."""
        sut, keys = context.storage(), context.keys(len(CONTENTS))
        length = sut.memories[PoolName.KV].page_bytes
        for key, (words, cell) in zip(keys, CONTENTS.items(), strict=True):
            store_content(sut, key, _content(cell, length), words)
        for key, (words, cell) in zip(keys, CONTENTS.items(), strict=True):
            expect_content(sut, key, _content(cell, length), words)

    @covers("GET-2")
    def test_a_set_changes_no_host_page(self, context: CaseContext) -> None:
        """Neither a set nor an exists changes a page of the host pool."""
        sut, keys = context.storage(), context.keys(5)
        memory, pages = sut.memories[PoolName.KV], [7, 8, 30, 2, 63]
        for page in range(memory.pages):
            memory.write(page, canary(page, memory.page_bytes))
        transfers = sut.transfers([PageGroup(keys)], [pages])
        for name, ask in (
            ("batch_set_v2", lambda: sut.storage.batch_set_v2(transfers)),
            ("batch_exists_v2", lambda: sut.storage.batch_exists_v2(keys)),
        ):
            sut.call(name, ask)
            for page in range(memory.pages):
                check(
                    memory.read(page) == canary(page, memory.page_bytes),
                    "GET-2",
                    f"{name} with host pages {pages} changed host page {page}",
                )

    @covers("SET-3", "SET-1", needs=["sharing>=process"])
    def test_pages_of_another_storage_are_not_rewritten(self, context: CaseContext) -> None:
        """A storage does not rewrite pages that another one of equal identity has set."""
        one, keys = context.stored(4)
        two = context.storage(replace(one.identity))
        two.store(keys, generation=1)
        for sut in (one, two):
            _check_not_rewritten(sut, keys)

    @covers("SET-3", "SET-1")
    def test_existing_pages_are_not_rewritten(self, context: CaseContext) -> None:
        """A second set of a key answers True, and the first bytes stay."""
        sut, keys = context.storage(), context.keys(6)
        sut.store(keys[:3])
        # By itself, which some drivers write in another way.
        sut.store(keys[:1], generation=1)
        again = sut.set(keys, generation=1)
        check_each(keys[:3], again[:3], "SET-3", "exists, and a set of it answers False")
        check_each(keys[3:], again[3:], "SET-6", "is new, and a set of it answers False")
        _check_not_rewritten(sut, keys[:3])
        sut.expect(keys[3:], generation=1)

    @covers("SET-3")
    def test_a_key_that_stands_twice_in_a_set(self, context: CaseContext) -> None:
        """A key repeated in one set, in one transfer and in two."""
        sut, keys = context.storage(), context.keys(3)
        chain = [keys[0], keys[1], keys[0], keys[2], keys[0]]
        sut.store(chain)
        sut.expect(keys, rule="SET-3")
        more = context.keys(2)
        sut.store_many([PageGroup(more), PageGroup(more[::-1], generation=1)])
        for index, (key, content) in enumerate(zip(more, sut.get(more), strict=True)):
            held = "is not there" if content is None else sut.explain(key, content)
            whole = content is not None and sut.generation_of(key, content) in (0, 1)
            check(whole, "GET-1", f"page {index} key {short(key)}, set twice in one call, {held}")

    @covers("SET-6")
    def test_each_page_is_answered_by_itself(self, context: CaseContext) -> None:
        """Batches of existing pages, repeated keys and new pages."""
        sut, stored = context.stored(8)
        for _ in range(10):
            new = context.keys(6)
            chain = context.random.sample(stored, 4) + new + context.random.sample(new, 2)
            context.random.shuffle(chain)
            refused = "of a batch of existing, repeated and new pages was refused"
            check_each(chain, sut.set(chain), "SET-6", refused)
            sut.expect(chain, rule="SET-6")

    @covers("SET-7", "SET-1", "GET-1")
    def test_host_pages_are_reused_at_once(self, context: CaseContext) -> None:
        """The source pages of each set are overwritten, and are the next one's."""
        sut, batches = context.storage(), [context.keys(60) for _ in range(8)]
        for keys in batches:
            # 60 of 64 pages: every batch reuses the pages of the one before.
            sut.store(keys)
        for keys in batches:
            found = sut.get(keys)
            sut.check_right(keys, found, rule="SET-7")
            sut.compare(keys, found)
            sut.expect_existing(keys, rule="SET-1")


def _check_not_rewritten(sut: StorageUnderTest, keys: Sequence[str]) -> None:
    """Read pages that were set twice.

    Raises:
        Violation: SET-3, one of them holds the bytes of the second set.
    """
    found = sut.get(keys)
    for index, (key, content) in enumerate(zip(keys, found, strict=True)):
        check(
            content is None or sut.generation_of(key, content) != 1,
            "SET-3",
            f"page {index} key {short(key)} of pool 'kv' existed, and a set wrote it anew",
        )
    sut.compare(keys, found)


def _content(cell: bytes, length: int) -> bytes:
    return (cell * (length // len(cell) + 1))[-length:]


def store_content(sut: StorageUnderTest, key: str, content: bytes, words: str) -> None:
    """Store a page of these bytes.

    Raises:
        Violation: SET-1, it was refused.
    """
    pages = sut.own_pages([key])
    sut.memories[PoolName.KV].write(pages[0], content)
    transfers = sut.transfers([PageGroup([key])], [pages])
    answer = sut.call("batch_set_v2", lambda: sut.storage.batch_set_v2(transfers))
    check(answer == {PoolName.KV: [True]}, "SET-1", f"{words} was refused: {answer}")


def expect_content(
    sut: StorageUnderTest, key: str, content: bytes, words: str, rule: str = "SET-1"
) -> None:
    """Read a page that was stored, and compare its bytes.

    Raises:
        Violation: `rule` for a page that is gone, GET-1 for other bytes.
    """
    found = sut.get([key])[0]
    check(found is not None, rule, f"{words} was stored (True), and a get answers False")
    wrong = sum(a != b for a, b in zip(found or b"", content, strict=True))
    check(not wrong, "GET-1", f"{words} came back with {wrong} of {len(content)} bytes changed")
