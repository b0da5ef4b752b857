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

ASK_AT: Final = 64
"""Number of recorded uses from which on finished ones are dropped.

Also without a shortage of slots.
"""


class Completion(Protocol):
    """Something that ends: an event, or whatever else uses a page."""

    def query(self) -> bool:
        """Return True if the event has been reached; does not block."""
        ...


class SlotPool(Protocol):
    """Protocol of slot allocators: any host pool."""

    @property
    def page_size(self) -> int: ...

    @property
    def size(self) -> int:
        """Slots in the pool."""
        ...

    def alloc(self, count: int) -> torch.Tensor | None: ...

    def free(self, indices: torch.Tensor) -> int: ...

    def available_size(self) -> int: ...


class _Use(NamedTuple):
    pages: torch.Tensor
    until: Completion


class HostSlots:
    """Allocator in front of a host pool's `alloc` and `free`, to be used where copies use the pool.

    A page that is freed while a copy reads or writes it goes back to the pool when that copy is
    done. Thread-safe.
    """

    def __init__(self, pool: SlotPool) -> None:
        import torch

        self._pool = pool
        self._page_size = pool.page_size
        self._lock = threading.Lock()
        self._uses: dict[str | None, deque[_Use]] = {None: deque()}
        """Uses in the order in which they began, by the stream that orders their ends.

        None where they end in any order.
        """
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
        pages = self._pages(indices)
        slots = indices.reshape(-1, self._page_size).to("cpu")
        with self._lock:
            # The pool cannot notice it: for the pool a parked page is still in use.
            twice = pages[self._parked[pages]]
            if twice.numel():
                raise SlotError(
                    "slots given back twice: "
                    f"{cast('list[int]', (twice * self._page_size).tolist())}"
                )
            busy = self._users[pages] > 0
            if not bool(busy.all()):
                self._pool.free(slots[~busy].reshape(-1))
            self._parked[pages[busy]] = True
        return indices.numel()

    def hold(self, indices: torch.Tensor, until: Completion, *, behind: str | None = None) -> None:
        """Keep pages from being handed out until something has ended.

        Several copies may hold a page.

        Args:
            indices: whole pages.
            until: what it is that ends.
            behind: name of a stream or whatever else lets things end in the order in which they are
                told here: of those only the first one that has not ended is asked. None where there
                is no such order.
        """
        self.hold_pages(self._pages(indices), until, behind)

    def hold_pages(self, pages: torch.Tensor, until: Completion, behind: str | None) -> None:
        """Do the same for pages of the pool, given by their numbers: int64 on the CPU."""
        # A copy: the numbers of pages of one slot are the caller's own indices.
        pages = pages.clone()
        with self._lock:
            # Not `+= 1`, which counts a page once that occurs twice in `pages`.
            self._users.index_add_(0, pages, pages.new_ones(len(pages)))
            self._uses.setdefault(behind, deque()).append(_Use(pages, until))
            if sum(map(len, self._uses.values())) >= self._ask_at:
                # The next allocation reports a failed stream.
                with contextlib.suppress(Exception):
                    self._release()
                # Doubled while copies run: otherwise each further one would ask CUDA about all of
                # them.
                self._ask_at = max(ASK_AT, 2 * sum(map(len, self._uses.values())))

    def idle(self) -> bool:
        """Return whether nothing in flight uses a page.

        Raises:
            StreamFailedError: a copy has failed.
        """
        with self._lock:
            self._release()
            return not any(self._uses.values())

    def available_size(self) -> int:
        """Number of slots that can be taken now."""
        with self._lock:
            self._release()
            return self._pool.available_size()

    def _pages(self, indices: torch.Tensor) -> torch.Tensor:
        pages = page_numbers(indices, self._page_size)
        outside = pages[(pages < 0) | (pages >= len(self._users))]
        if outside.numel():
            raise SlotError(
                f"slots out of range: {cast('list[int]', (outside * self._page_size).tolist())}"
            )
        return pages

    def _release(self) -> None:
        """Forget the copies that are done, and give back what waited for them."""
        # All are asked before anything changes: a failed stream raises.
        ended = [use for use in self._uses[None] if use.until.query()]
        in_order = {
            behind: list(takewhile(lambda use: use.until.query(), uses))
            for behind, uses in self._uses.items()
            if behind is not None
        }
        over = set(map(id, ended))
        self._uses[None] = deque(use for use in self._uses[None] if id(use) not in over)
        for behind, first in in_order.items():
            for _ in first:
                self._uses[behind].popleft()
        for use in (*ended, *(use for first in in_order.values() for use in first)):
            self._users.index_add_(0, use.pages, -use.pages.new_ones(len(use.pages)))
            idle = use.pages[(self._users[use.pages] == 0) & self._parked[use.pages]]
            if idle.numel():
                self._give_back(idle)

    def _give_back(self, pages: torch.Tensor) -> None:
        # A load may hold a page twice, which goes back once.
        once = pages.sort().values
        once = once[once.diff(prepend=once.new_full((1,), -1)) != 0]
        self._parked[once] = False
        self._pool.free(
            (once.unsqueeze(1) * self._page_size + once.new_tensor(range(self._page_size))).view(-1)
        )
