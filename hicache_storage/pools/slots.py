"""Slot allocator of a host pool."""

from __future__ import annotations

import threading

import torch

from hicache_storage.pools.shapes import check_size
from hicache_storage.spec import SlotError

NAMED_SLOTS = 8
"""How many slots an error message names."""


class SlotAllocator:
    """Hands out a host pool's slots in whole pages, the longest free ones first.

    A slot in use is never handed out.

    Thread-safe. A call that raises changes nothing.

    Args:
        size: number of slots, a multiple of `page_size`; all of them can be handed out.
        page_size: slots per page.

    Raises:
        InvalidPoolError: the arguments do not fit each other.
    """

    def __init__(self, size: int, page_size: int = 1) -> None:
        check_size(size, page_size)
        self.size = size
        self.page_size = page_size
        self.page_num = size // page_size
        self._offsets = torch.arange(page_size)
        self._lock = threading.Lock()
        self._queue: torch.Tensor
        self._head: int
        self._free: int
        self._in_use: torch.Tensor
        self._reset()

    def alloc(self, count: int) -> torch.Tensor | None:
        """Take `count` slots: int64 on the CPU, in pages of consecutive slots.

        None if fewer are free.

        Raises:
            SlotError: `count` is not a positive multiple of the page size.
        """
        pages, rest = divmod(count, self.page_size)
        if rest or pages < 1:
            raise SlotError(
                f"slots come in pages: ask for a positive multiple of {self.page_size}, not {count}"
            )
        with self._lock:
            if pages > self._free:
                return None
            taken = self._queue[self._places(self._head, pages)]
            self._head = (self._head + pages) % self.page_num
            self._free -= pages
            self._in_use[taken] = True
        return self._slots_of(taken)

    def free(self, indices: torch.Tensor) -> int:
        """Give back slots in whole pages, each of consecutive slots; returns their number.

        Raises:
            SlotError: a slot is out of range, was not handed out, is given back twice, or comes
                without its page.
        """
        pages = self._whole_pages(indices)
        # Vector arithmetic: a free of a long prefix may have 100,000 slots.
        ordered = pages.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        with self._lock:
            # Before any change: a double free would hand one page to two owners. SGLang's pool of
            # states does not check it.
            idle = pages[~self._in_use[pages]]
            if idle.numel() or twice.numel():
                wrong = self._slots_of(idle if idle.numel() else twice)
                raise SlotError(f"slots given back twice, or never handed out: {_named(wrong)}")
            self._in_use[pages] = False
            self._queue[self._places(self._head + self._free, pages.numel())] = pages
            self._free += pages.numel()
        return indices.numel()

    def available_size(self) -> int:
        """Number of slots that are free."""
        # Without the lock: the number may be out of date as soon as it is returned.
        return self._free * self.page_size

    def clear(self) -> None:
        """Free all slots, also those in use."""
        with self._lock:
            self._reset()

    def _reset(self) -> None:
        # A ring of free pages: `_free` of them from `_head` on, in the order in which they are
        # handed out.
        self._queue = torch.arange(self.page_num)
        self._head = 0
        self._free = self.page_num
        self._in_use = torch.zeros(self.page_num, dtype=torch.bool)

    def _places(self, start: int, count: int) -> torch.Tensor:
        return (torch.arange(count) + start) % self.page_num

    def _slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        return (pages.unsqueeze(1) * self.page_size + self._offsets).view(-1)

    def _whole_pages(self, indices: torch.Tensor) -> torch.Tensor:
        if indices.dtype != torch.int64:
            raise SlotError(f"slots must be an int64 tensor, got {indices.dtype}")
        slots = indices.to("cpu").reshape(-1)
        outside = slots[(slots < 0) | (slots >= self.size)]
        if outside.numel():
            raise SlotError(f"slots out of range [0, {self.size}): {_named(outside)}")
        pages = slots[:: self.page_size] // self.page_size
        if not torch.equal(self._slots_of(pages), slots):
            stray = _named(_without_page(slots, self.page_size))
            raise SlotError(
                f"slots must be given back in whole pages of {self.page_size} consecutive ones, "
                f"not {stray}"
            )
        return pages


def _without_page(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slots whose page is not there as a whole.

    Where all are, those that do not stand in order.
    """
    pages = slots // page_size
    partial = slots[torch.bincount(pages)[pages] % page_size != 0]
    if partial.numel():
        return partial
    rows = slots.view(-1, page_size)
    ordered = rows[:, :1] // page_size * page_size + torch.arange(page_size)
    return rows[(rows != ordered).any(dim=1)].view(-1)


def _named(slots: torch.Tensor) -> str:
    text = ", ".join(str(int(slot)) for slot in slots[:NAMED_SLOTS])
    return text if slots.numel() <= NAMED_SLOTS else f"{text}, ... ({slots.numel()} in all)"
