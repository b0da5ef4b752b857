"""Slots: whole pages, first in first out, never twice; and the numbers of their pages."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_storage.pools import SlotAllocator
from hicache_storage.pools.pages import check_pages, page_numbers
from hicache_storage.spec import InvalidPoolError, InvalidTransferError, SlotError


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model that knows who holds which page, and in which order pages became free."""

    @initialize(page_size=st.integers(1, 4), pages=st.integers(1, 6))
    def start(self, page_size: int, pages: int) -> None:
        self.page_size, self.pages = page_size, pages
        self.allocator = SlotAllocator(page_size * pages, page_size)
        self.queue = list(range(pages))
        self.held: list[int] = []

    def slots_of(self, pages: list[int]) -> list[int]:
        return [
            page * self.page_size + offset for page in pages for offset in range(self.page_size)
        ]

    @rule(pages=st.integers(1, 7))
    def alloc(self, pages: int) -> None:
        taken = self.allocator.alloc(pages * self.page_size)
        if pages > len(self.queue):
            assert taken is None
            return
        expected, self.queue = self.queue[:pages], self.queue[pages:]
        assert taken is not None
        assert taken.dtype == torch.int64
        assert taken.tolist() == self.slots_of(expected)
        assert not set(expected) & set(self.held)
        self.held += expected

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        assert self.allocator.free(slots(*self.slots_of(pages))) == len(pages) * self.page_size
        self.held = [page for page in self.held if page not in pages]
        self.queue += pages

    @rule(data=st.data())
    def free_wrongly(self, data: st.DataObject) -> None:
        """Some of it is right, some is not: nothing is freed, and the message names a wrong
        slot."""
        good = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        wrong = self.queue + good
        if not wrong:
            return
        page = data.draw(st.sampled_from(wrong))
        with pytest.raises(SlotError, match=str(page * self.page_size)):
            self.allocator.free(slots(*self.slots_of([*good, page])))

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.available_size() == len(self.queue) * self.page_size
            assert len(self.queue) + len(self.held) == self.pages


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class TestSlotAllocator:
    @pytest.mark.parametrize("count", [0, -4, 3, 5])
    def test_part_of_a_page_cannot_be_taken(self, count: int) -> None:
        with pytest.raises(SlotError, match=f"positive multiple of 4, not {count}"):
            SlotAllocator(8, 4).alloc(count)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ((0, 1, 2, 3, 8, 9, 10, 11), r"given back twice, or never handed out: 8, 9, 10, 11$"),
            ((0, 1, 2, 3, 0, 1, 2, 3), r"given back twice, or never handed out: 0, 1, 2, 3$"),
            ((16, 17, 18, 19), r"out of range \[0, 16\): 16, 17, 18, 19$"),
            ((-4, -3, -2, -1), r"out of range \[0, 16\): -4, -3, -2, -1$"),
            ((-1, 0, 1, 2), r"not -1, 0, 1, 2$"),
            ((0, 1, 2, 3, 4), r"whole pages of 4 consecutive slots, not 0, 1, 2, 3, 4$"),
            ((0, 1, 2), r"not 0, 1, 2$"),
            ((1, 2, 3, 4), r"not 1, 2, 3, 4$"),
            ((3, 2, 1, 0), r"not 3, 2, 1, 0$"),
            ((0, 5, 2, 7, 4, 1, 6, 3), r"not 0, 5, 2, 7, 4, 1, 6, 3$"),
        ],
    )
    def test_wrong_slots_are_named_and_nothing_is_freed(
        self, given: tuple[int, ...], message: str
    ) -> None:
        allocator = SlotAllocator(16, 4)
        allocator.alloc(8)
        with pytest.raises(SlotError, match=message):
            allocator.free(slots(*given))
        assert allocator.available_size() == 8

    def test_long_lists_are_cut_short(self) -> None:
        with pytest.raises(SlotError, match=r"0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(100 in all\)"):
            SlotAllocator(100).free(torch.arange(100))

    def test_the_answer_is_the_callers_own(self) -> None:
        allocator = SlotAllocator(4)
        taken = allocator.alloc(2)
        assert taken is not None
        taken.fill_(3)
        rest = allocator.alloc(2)
        assert rest is not None
        assert rest.tolist() == [2, 3]

    @pytest.mark.parametrize(("size", "page_size"), [(0, 1), (4, 0), (5, 2)])
    def test_bad_sizes_are_refused(self, size: int, page_size: int) -> None:
        with pytest.raises(InvalidPoolError, match="size"):
            SlotAllocator(size, page_size)

    def test_threads_never_share_a_slot(self) -> None:
        allocator = SlotAllocator(64, 2)
        owner = [0] * 64
        clashes: list[int] = []

        def work(me: int) -> None:
            for _ in range(150):
                taken = allocator.alloc(8)
                if taken is None:
                    continue
                numbers = taken.tolist()
                clashes.extend(slot for slot in numbers if owner[slot])
                for slot in numbers:
                    owner[slot] = me
                for slot in numbers:
                    owner[slot] = 0
                allocator.free(taken)

        threads = [threading.Thread(target=work, args=(me,)) for me in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert clashes == []
        assert allocator.available_size() == 64


def test_pages_are_whole_and_in_order() -> None:
    two = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), torch.arange(8).view(2, 4)
    assert page_numbers(two, 4).tolist() == [[2, 0], [0, 1]]
    assert page_numbers([torch.tensor([[4, 5], [2, 3]])], 2).tolist() == [[2, 1]]
    assert page_numbers([torch.tensor([7, 3, 7])], 1).tolist() == [[7, 3, 7]]
    # Not next to each other in memory; and pages of another number than a power of two.
    assert page_numbers([torch.tensor([6, 0, 7, 0, 8, 0])[::2]], 3).tolist() == [[2]]
    assert page_numbers([torch.arange(6, 15)], 3).tolist() == [[2, 3, 4]]
    many = torch.randperm(5000).unsqueeze(1) * 16 + torch.arange(16)
    assert page_numbers([many.view(-1)] * 2, 16)[1].tolist() == (many[:, 0] // 16).tolist()
    wrong = many.clone()
    wrong[4321, 7] += 1
    with pytest.raises(InvalidTransferError, match="whole pages of 16"):
        check_pages(wrong.view(-1), 16)


@pytest.mark.parametrize(
    "wrong", [[0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, 4], [0, 1, 2, 3, 8, 9, 10, 10]]
)
def test_what_is_no_page_is_refused(wrong: list[int]) -> None:
    with pytest.raises(InvalidTransferError, match=r"whole pages of 4 consecutive slots, not"):
        page_numbers([torch.tensor(wrong)], 4)
    with pytest.raises(InvalidTransferError, match=r"int64, got torch\.int32"):
        page_numbers([torch.tensor([0], dtype=torch.int32)], 1)
