"""Lifecycle of a storage: opened lazily, used by many threads, forked, closed once.

Rules LC-1, LC-2 and LC-5.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol, Self
from weakref import WeakSet

from hicache_storage.spec import StorageClosedError, StorageForkedError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

OPEN_RETRY_SECONDS = 1.0
"""Time until a failed connect is retried, so that an unreachable store does not delay each call."""


class ForkAware(Protocol):
    """State that threads share.

    A fork may happen while a thread holds its lock, and that thread is not in the child.
    """

    def begin_in_child(self) -> None:
        """Replace locks, and forget calls in flight. Runs first in a forked child."""
        ...


# Weak references: a storage that is dropped without being closed is not kept for the next fork.
_aware: Final[WeakSet[ForkAware]] = WeakSet()


def begin_in_children(state: ForkAware) -> None:
    """Call `state.begin_in_child()` in each process that is forked from now on.

    It is called as long as `state` is referenced.
    """
    _aware.add(state)


def _begin() -> None:
    for state in list(_aware):
        state.begin_in_child()


# One hook for all objects, since Python has no way to unregister one.
os.register_at_fork(after_in_child=_begin)


class Lifecycle:
    """State of a storage: connects before the first call, closes after the last.

    Counts the calls in flight.

    One lock guards all state and is never held while the driver connects or closes; `_connecting`
    is taken outside it.
    """

    def __init__(
        self, name: str, connect: Callable[[], None], disconnect: Callable[[], None]
    ) -> None:
        self._name = name
        self._connect = connect
        self._disconnect = disconnect
        self.closed = False
        """True once `close` has begun."""
        self.connected = False
        """True if `ensure_connected` returns without connecting."""
        self._forked = False
        """True in a child whose parent was connected, or connecting, at the fork."""
        self._retry_at = 0.0
        self._begin()
        begin_in_children(self)

    def _begin(self) -> None:
        # `_lock` guards `closed` and `_calls`. `_connecting` is held while the driver connects or
        # disconnects, which may take seconds: a call that begins or ends does not wait for it.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._connecting = threading.Lock()
        self._calls = 0

    def begin_in_child(self) -> None:
        """Start with new locks and without calls.

        A connection, also a partial one, stays the parent's.
        """
        self._forked = self._forked or self.connected or self._connecting.locked()
        self.connected = False
        self._begin()

    def __enter__(self) -> Self:
        """Begin a call.

        Raises:
            StorageClosedError: `close` has begun.
            StorageForkedError: the parent process has connected.
        """
        with self._lock:
            self._refuse_unusable()
            self._calls += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._calls -= 1
            # Only `close` waits.
            if self.closed and not self._calls:
                self._idle.notify_all()

    def ensure_connected(self, *, insist: bool = False) -> None:
        """Connect, unless connected; called within a call.

        Args:
            insist: retry also immediately after a failure.

        Raises:
            StorageUnavailableError: the driver could not connect, now or less than a second ago.
        """
        with self._connecting:
            # Another thread may have connected while this one waited for the lock.
            if self.connected:
                return
            if not insist and time.monotonic() < self._retry_at:
                raise StorageUnavailableError(
                    f"{self._name}: not connected; the last attempt has just failed"
                )
            try:
                self._connect()
            except BaseException:
                self._retry_at = time.monotonic() + OPEN_RETRY_SECONDS
                raise
            self.connected = True

    def close(self, timeout_seconds: float | None) -> None:
        """Refuse new calls, wait for those in flight, then disconnect. Idempotent.

        Later callers wait for the first.
        """
        with self._idle:
            first = not self.closed
            self.closed = True
            # With a time limit: a call that hangs in the store must not make `close` hang (rule
            # LC-2).
            self._idle.wait_for(lambda: not self._calls, timeout_seconds)
        with self._connecting:
            if first and self.connected:
                self._disconnect()
            self.connected = False

    def _refuse_unusable(self) -> None:
        if self.closed:
            raise StorageClosedError(f"{self._name}: the storage is closed")
        if self._forked:
            raise StorageForkedError(
                f"{self._name}: opened before a fork; create a storage of its own in the child "
                "process"
            )
