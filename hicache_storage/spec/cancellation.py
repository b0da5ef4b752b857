"""Cancellation of a call that misses its deadline (rules GET-9 and SET-8)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType


class CancellationToken:
    """A cancellation token of one call, cancelled when the deadline has passed without an answer.

    Thread-safe. After `cancel()` has returned, the caller's memory is the caller's again: the
    storage neither writes to it nor publishes bytes read from it.
    """

    __slots__ = ("_cancelled", "_changed", "_shields")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shields = 0
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """True once `cancel()` has been called: the caller's memory may have been reused."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the call, and wait until every shielded block that runs has ended."""
        with self._changed:
            # Before the wait: a block that enters from now on finds itself inactive and ends at
            # once, so that the wait is for writes alone.
            self._cancelled = True
            self._changed.wait_for(lambda: not self._shields)

    def shield(self) -> AbstractContextManager[bool]:
        """Make `cancel()` wait for a block that writes to the caller's memory.

        The block's value is False if the call is cancelled already; the block then leaves the
        memory alone. It must not do anything that may hang, or `cancel()` would hang with it.
        """
        # The token is its own context manager: reads enter a shield for each page, and an object
        # for each would cost more than the lock.
        return self

    def __enter__(self) -> bool:
        with self._changed:
            # Counted also if the call is cancelled: `__exit__` cannot tell such a block from an
            # active one.
            self._shields += 1
            return not self._cancelled

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._shields -= 1
            if not self._shields:
                self._changed.notify_all()
