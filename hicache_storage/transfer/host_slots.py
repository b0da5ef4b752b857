"""Slots of a host pool that copies in flight keep from being handed out (rule ST-3)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from hicache_storage.spec import SlotError
from hicache_storage.transfer.pages import first_slots

if TYPE_CHECKING:
    import torch


class Completion(Protocol):
    """Something that ends: an event, or whatever else uses a page."""

    def query(self) -> bool:
        """Whether it has; does not block."""
        ...


class SlotPool(Protocol):
    """What hands out slots: any host pool."""

    @property
    def page_size(self) -> int: ...

    def alloc(self, count: int) -> torch.Tensor | None: ...

    def free(self, indices: torch.Tensor) -> int: ...

    def available_size(self) -> int: ...


class HostSlots:
    """Stands before a host pool's `alloc` and `free`; whoever uses copies allocates here and not there.

    A page that is freed while a copy reads or writes it goes back to the pool when that copy is done. Thread-safe.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self._lock = threading.Lock()
        self._copies: dict[int, list[Completion]] = {}
        """By first slot of a page."""
        self._parked: dict[int, torch.Tensor] = {}
        """Slots of the pages that were freed and are still in use by a copy."""

    def alloc(self, count: int) -> torch.Tensor | None:
        """Take `count` slots, as the pool does; None if fewer are free and not in use by a copy."""
        with self._lock:
            self._release()
            return self._pool.alloc(count)

    def free(self, indices: torch.Tensor) -> int:
        """Give back whole pages; returns the number of slots.

        Raises:
            SlotError: as the pool does; also for a page that was freed and waits for its copy.
        """
        starts = first_slots(indices, self._page_size)
        with self._lock:
            twice = [start for start in starts if start in self._parked]
            if twice:
                raise SlotError(f"slots given back twice: {twice}")
            self._release()
            pages = indices.view(-1, self._page_size)
            busy = [start in self._copies for start in starts]
            free = [page for page, in_use in zip(pages, busy, strict=True) if not in_use]
            for page in free:
                self._pool.free(page)
            self._parked.update((start, page.clone()) for start, page, in_use in zip(starts, pages, busy, strict=True) if in_use)
        return indices.numel()

    def hold(self, indices: torch.Tensor, until: Completion) -> None:
        """Keep pages from being handed out until something has ended; several copies may hold a page."""
        with self._lock:
            for start in first_slots(indices, self._page_size):
                self._copies.setdefault(start, []).append(until)

    def available_size(self) -> int:
        """Number of slots that can be taken now."""
        with self._lock:
            self._release()
            return self._pool.available_size()

    def _release(self) -> None:
        """Forget the copies that are done, and give back what waited for them."""
        for start, events in list(self._copies.items()):
            left = [event for event in events if not event.query()]
            if left:
                self._copies[start] = left
                continue
            del self._copies[start]
            parked = self._parked.pop(start, None)
            if parked is not None:
                self._pool.free(parked)
