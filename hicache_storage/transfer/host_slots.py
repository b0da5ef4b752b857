"""Pages that copies in flight use: fences for streams, and host slots that are not handed out."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from hicache_storage.pools.pages import named, page_slots
from hicache_storage.pools.slots import whole_pages
from hicache_storage.spec import SlotError
from hicache_storage.transfer.copies import HOST

if TYPE_CHECKING:
    from collections.abc import Collection

    from hicache_storage.pools import SlotAllocator
    from hicache_storage.pools.pages import Numbers
    from hicache_storage.transfer.streams import Completion, Event, Stream

KEPT_EVENTS: Final = 256
"""Events that are kept; a page whose copy is older waits for the oldest of them."""
ASK_AT: Final = 64
"""Number of uses from which on ended ones are dropped, also without a shortage of slots."""


class PageFences:
    """For each page the last copy of one stream that uses it. Not thread-safe.

    Copies of one stream end in the order in which they were noted, so the last of some pages stands
    for all of them, and the stream's own copies need no fence. Pages are given by their numbers,
    in a row for each of two pools, or one for the first; no call depends on how many they are but
    for a few vector operations.

    Args:
        pages: as many as the larger pool has.
    """

    def __init__(self, pages: int) -> None:
        self.last = np.zeros((2, pages), np.int64)
        """Of each page the number of its copy, counted from 1 on."""
        self._events = deque["Event"](maxlen=KEPT_EVENTS)
        self._count = 0
        self._ended = 0
        """Number of the last copy that is known to have ended."""

    def note(self, pages: Numbers, until: Event) -> None:
        """Note a copy that uses some pages until an event."""
        # The former number may be overwritten: that copy is on the same stream and ends before.
        self._events.append(until)
        self._count += 1
        for last, row in zip(self.last, pages, strict=True):
            last[row] = self._count

    def wait(self, stream: Stream, pages: Numbers) -> None:
        """Let another stream wait for the copies that use some pages."""
        if self._ended == self._count:
            return
        # `max` costs three times as much on few pages.
        used: list[Numbers] = [last.take(row) for last, row in zip(self.last, pages, strict=False)]
        number = max(int(each[each.argmax()]) for each in used)
        if number:
            stream.wait_event(self._event(number))

    def ask(self) -> None:
        """Look which copies have ended, up to the first that has not.

        Raises:
            StreamFailedError: a copy failed.
        """
        while self._ended < self._count and self._event(self._ended + 1).query():
            self._ended = max(self._ended, self._count - len(self._events)) + 1

    def in_use(self, pages: torch.Tensor) -> torch.Tensor:
        """By page of the host, whether a copy uses it that is not known to have ended."""
        return torch.from_numpy(self.last[HOST][pages.numpy()] > self._ended)

    def _event(self, number: int) -> Event:
        return self._events[max(number - self._count - 1, -len(self._events))]


class HostSlots:
    """Allocator in front of a host pool's `alloc` and `free`, to be used where copies use the pool.

    A page that is freed while a copy reads or writes it goes back to the pool when that copy is
    done. Thread-safe.

    Args:
        pool: has the slots.
        fences: of the copies.
    """

    def __init__(self, pool: SlotAllocator, fences: Collection[PageFences] = ()) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self.fences = fences
        self._lock = threading.Lock()
        self._uses: list[tuple[torch.Tensor, Completion]] = []
        """Pages, and what uses them."""
        self._ask_at = ASK_AT
        pages = pool.size // pool.page_size
        self._users = torch.zeros(pages, dtype=torch.int64)
        """By page, how many of the uses hold it."""
        self._parked = torch.zeros(pages, dtype=torch.bool)
        """By page, whether it was freed and is still in use."""

    def alloc(self, count: int) -> torch.Tensor | None:
        """Take `count` slots, as the pool does; None if fewer are free and not in use by a copy."""
        with self._lock:
            slots = self._pool.alloc(count)
            if slots is None:
                # Asking the copies costs a call of CUDA or more, so only where it may help.
                self._release()
                slots = self._pool.alloc(count)
            return slots

    def free(self, indices: torch.Tensor) -> int:
        """Give back whole pages; returns the number of slots.

        Raises:
            SlotError: as the pool does; also for a page that was freed and waits for its copy.
        """
        pages = whole_pages(indices, self._page_size, len(self._users))
        with self._lock:
            # The pool cannot notice it: for the pool a parked page is still in use.
            twice = page_slots(pages[self._parked[pages]], self._page_size)
            if twice.numel():
                raise SlotError(f"slots given back twice: {named(twice)}")
            busy = self._in_use(pages)
            self._pool.free(page_slots(pages[~busy], self._page_size))
            self._parked[pages[busy]] = True
        return indices.numel()

    def hold(self, indices: torch.Tensor, until: Completion) -> None:
        """Keep whole pages from being handed out until something has ended.

        Several may hold a page.

        Raises:
            SlotError: the indices are not whole pages of the pool.
        """
        pages = whole_pages(indices, self._page_size, len(self._users))
        self.keep(pages)
        with self._lock:
            self._uses.append((pages, until))
            if len(self._uses) >= self._ask_at:
                # The next allocation reports a failed stream.
                with contextlib.suppress(Exception):
                    self._release()
                # Doubled while they last: otherwise each further one would ask about all of them.
                self._ask_at = max(ASK_AT, 2 * len(self._uses))

    def keep(self, pages: torch.Tensor) -> None:
        """Never hand out some pages again, given by their numbers."""
        with self._lock:
            self._count(pages, 1)

    def available_size(self) -> int:
        """Number of slots that can be taken now."""
        with self._lock:
            self._release()
            return self._pool.available_size()

    def _count(self, pages: torch.Tensor, change: int) -> None:
        # Not `+= change`, which counts a page once that occurs twice in `pages`.
        self._users.index_add_(0, pages, torch.full_like(pages, change))

    def _in_use(self, pages: torch.Tensor) -> torch.Tensor:
        busy = self._users[pages] > 0
        for fences in self.fences:
            busy |= fences.in_use(pages)
        return busy

    def _release(self) -> None:
        """Forget the uses that are over, and give back what waited for them."""
        parked = self._parked.nonzero().view(-1)
        # All are asked before anything changes: a failed stream raises.
        over = [until.query() for _, until in self._uses]
        for fences in self.fences if parked.numel() else ():
            fences.ask()
        for (pages, _), is_over in zip(self._uses, over, strict=True):
            if is_over:
                self._count(pages, -1)
        self._uses = [use for use, is_over in zip(self._uses, over, strict=True) if not is_over]
        idle = parked[~self._in_use(parked)]
        self._parked[idle] = False
        self._pool.free(page_slots(idle, self._page_size))
