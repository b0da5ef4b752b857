"""Slots of a host pool that copies in flight keep from being handed out (rule ST-3)."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from hicache_storage.spec import SlotError
from hicache_storage.transfer.pages import page_numbers

if TYPE_CHECKING:
    import torch

    from hicache_storage.pools import HostPoolBase, SlotAllocator

ASK_AT: Final = 64
"""Number of recorded uses from which on finished ones are dropped.

Also without a shortage of slots.
"""


class Completion(Protocol):
    """Something that ends: an event, or whatever else uses a page."""

    def query(self) -> bool:
        """Return True if the event has been reached; does not block."""
        ...


class _Use(NamedTuple):
    pages: torch.Tensor
    until: Completion


class HostSlots:
    """Allocator in front of a host pool's `alloc` and `free`, to be used where copies use the pool.

    A page that is freed while a copy reads or writes it goes back to the pool when that copy is
    done. Thread-safe.
    """

    def __init__(self, pool: HostPoolBase | SlotAllocator) -> None:
        import torch

        self._pool = pool
        self._page_size = pool.page_size
        self._lock = threading.Lock()
        self._uses = dict[object, deque[_Use]]()
        """Uses in the order in which they began, by what orders their ends."""
        self._ask_at = ASK_AT
        pages = pool.size // pool.page_size
        self._users = torch.zeros(pages, dtype=torch.int64)
        """By page, how many of the uses hold it."""
        self._one = torch.ones(1, dtype=torch.int64)
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
        pages = self._pages(indices)
        slots = indices.reshape(-1, self._page_size).to("cpu")
        with self._lock:
            # The pool cannot notice it: for the pool a parked page is still in use.
            self._refuse("given back twice", pages[self._parked[pages]])
            busy = self._users[pages] > 0
            if not bool(busy.all()):
                self._pool.free(slots[~busy].reshape(-1))
            self._parked[pages[busy]] = True
        return indices.numel()

    def hold(self, indices: torch.Tensor, until: Completion) -> None:
        """Keep whole pages from being handed out until something has ended.

        Several may hold a page.
        """
        self.hold_pages(self._pages(indices), until, object())

    def hold_pages(self, pages: torch.Tensor, until: Completion, behind: object) -> None:
        """Do the same for pages of the pool, given by their numbers.

        Args:
            pages: int64 on the CPU; kept.
            until: ends the use.
            behind: the stream or anything else that lets uses end in the order of these calls: only
                the first one that has not ended is asked.
        """
        with self._lock:
            # Not `+= 1`, which counts a page once that occurs twice in `pages`.
            self._users.index_add_(0, pages, self._one.expand(pages.numel()))
            self._uses.setdefault(behind, deque()).append(_Use(pages, until))
            if sum(map(len, self._uses.values())) >= self._ask_at:
                # The next allocation reports a failed stream.
                with contextlib.suppress(Exception):
                    self._release()
                # Doubled while copies run: otherwise each further one would ask CUDA about all of
                # them.
                self._ask_at = max(ASK_AT, 2 * sum(map(len, self._uses.values())))

    def available_size(self) -> int:
        """Number of slots that can be taken now."""
        with self._lock:
            self._release()
            return self._pool.available_size()

    def _pages(self, indices: torch.Tensor) -> torch.Tensor:
        pages = page_numbers([indices], self._page_size)[0]
        self._refuse("out of range", pages[(pages < 0) | (pages >= len(self._users))])
        return pages

    def _refuse(self, why: str, pages: torch.Tensor) -> None:
        if pages.numel():
            slots = cast("list[int]", (pages * self._page_size).tolist())
            raise SlotError(f"slots {why}: {slots}")

    def _release(self) -> None:
        """Forget the copies that are done, and give back what waited for them."""
        import torch

        # All are asked before anything changes: a failed stream raises.
        ended = [
            (behind, use)
            for behind, uses in self._uses.items()
            for use in takewhile(lambda use: use.until.query(), uses)
        ]
        if not ended:
            return
        for behind, _ in ended:
            self._uses[behind].popleft()
            if not self._uses[behind]:
                del self._uses[behind]
        pages = torch.cat([use.pages for _, use in ended])
        self._users.index_add_(0, pages, self._one.expand(pages.numel()), alpha=-1)
        idle = pages[(self._users[pages] == 0) & self._parked[pages]]
        if idle.numel():
            self._parked[idle] = False
            # A load may hold a page twice, which goes back once.
            once = idle.sort().values
            once = once[once.diff(prepend=once.new_full((1,), -1)) != 0]
            slots = once.unsqueeze(1) * self._page_size + once.new_tensor(range(self._page_size))
            self._pool.free(slots.view(-1))
