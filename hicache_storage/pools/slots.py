"""Slot allocator of a host pool."""

from __future__ import annotations

import threading

import torch

from hicache_storage.pools.access import check_size
from hicache_storage.pools.pages import check_pages, named, page_slots
from hicache_storage.spec import InvalidTransferError, SlotError


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
        self._lock = threading.Lock()
        # A ring of free pages: `_free` of them from `_head` on, in the order in which they are
        # handed out.
        self._queue = torch.arange(self.page_num)
        self._head = 0
        self._free = self.page_num
        self._in_use = torch.zeros(self.page_num, dtype=torch.bool)

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
        return page_slots(taken, self.page_size)

    def free(self, indices: torch.Tensor) -> int:
        """Give back slots in whole pages, each of consecutive slots; returns their number.

        Raises:
            SlotError: a slot is out of range, was not handed out, is given back twice, or comes
                without its page.
        """
        pages = whole_pages(indices, self.page_size, self.page_num)
        # Vector arithmetic: a free of a long prefix may have 100,000 slots.
        ordered = pages.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        with self._lock:
            # Before any change: a double free would hand one page to two owners. SGLang's pool of
            # states does not check it.
            idle = pages[~self._in_use[pages]]
            if idle.numel() or twice.numel():
                wrong = page_slots(idle if idle.numel() else twice, self.page_size)
                raise SlotError(f"slots given back twice, or never handed out: {named(wrong)}")
            self._in_use[pages] = False
            self._queue[self._places(self._head + self._free, pages.numel())] = pages
            self._free += pages.numel()
        return indices.numel()

    def available_size(self) -> int:
        """Number of slots that are free."""
        # Without the lock: the number may be out of date as soon as it is returned.
        return self._free * self.page_size

    def _places(self, start: int, count: int) -> torch.Tensor:
        return (torch.arange(count) + start) % self.page_num


def whole_pages(indices: torch.Tensor, page_size: int, page_num: int) -> torch.Tensor:
    """The number of each page in slots of a pool, after a look at every slot.

    Raises:
        SlotError: they are not whole pages of the pool.
    """
    try:
        pages = check_pages(indices, page_size)
    except InvalidTransferError as error:
        raise SlotError(str(error)) from None
    outside = pages[(pages < 0) | (pages >= page_num)]
    if outside.numel():
        slots = named(page_slots(outside, page_size))
        raise SlotError(f"slots out of range [0, {page_num * page_size}): {slots}")
    return pages
