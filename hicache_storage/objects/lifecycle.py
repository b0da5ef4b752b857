"""Lifecycle of a storage: opened lazily, used by many threads, forked, closed once.

Rules LC-1, LC-2 and LC-5.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from hicache_storage.spec import StorageClosedError, StorageForkedError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

OPEN_RETRY_SECONDS = 1.0
"""Time until a failed connect is retried, so that an unreachable store does not delay each call."""


class ForkAware:
    """State that threads share, with a lock.

    A fork may happen while a thread holds the lock, and that thread is not in the child.
    """

    def __init__(self) -> None:
        self.begin_in_child()
        _aware.add(self)

    def begin_in_child(self) -> None:
        """Make the lock; runs first in a forked child, which keeps the rest of the state.

        Overridden where there are more locks, or calls in flight to be forgotten.
        """
        self._lock = threading.Lock()


# Weak references: a storage that is dropped without being closed is not kept for the next fork.
_aware: Final[WeakSet[ForkAware]] = WeakSet()


def _begin() -> None:
    for state in list(_aware):
        state.begin_in_child()


# One hook for all objects, since Python has no way to unregister one.
os.register_at_fork(after_in_child=_begin)


class Lifecycle(ForkAware):
    """State of a storage: connects before the first call, closes after the last.

    Each call is made `with lifecycle.lock(), lifecycle`: a lock for each thread, which `close` waits
    for. An interrupt, as by Ctrl-C, releases a lock; a count would stay wrong.
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
        # Held while the driver connects or disconnects, which may take seconds: a call that begins
        # or ends does not wait for it.
        self._connecting = threading.Lock()
        super().__init__()

    def begin_in_child(self) -> None:
        """Start with new locks and without calls.

        A connection, also a partial one, stays the parent's.
        """
        super().begin_in_child()
        self._forked = self._forked or self.connected or self._connecting.locked()
        self.connected = False
        self._connecting = threading.Lock()
        self._thread = threading.local()
        # Weak references: the lock of a thread that has ended is not kept. Guarded by `_lock`.
        self._locks: WeakSet[threading.RLock] = WeakSet()

    def lock(self) -> threading.RLock:
        """Return the lock of this thread, which is held during its calls."""
        lock: threading.RLock | None = getattr(self._thread, "lock", None)
        if lock is None:
            lock = self._thread.lock = threading.RLock()
            with self._lock:
                self._locks.add(lock)
        return lock

    def refuse_unusable(self) -> None:
        """Refuse a call that is about to begin, while its lock is held.

        Raises:
            StorageClosedError: `close` has begun.
            StorageForkedError: the parent process has connected.
        """
        if self.closed:
            raise StorageClosedError(f"{self._name}: the storage is closed")
        if self._forked:
            raise StorageForkedError(
                f"{self._name}: opened before a fork; create a storage of its own in the child "
                "process"
            )

    __enter__ = refuse_unusable

    def __exit__(self, *_: object) -> None:
        """End a call: its lock is released next."""

    def ensure_connected(self, *, insist: bool = False) -> None:
        """Connect, unless connected; called within a call.

        Args:
            insist: retry also immediately after a failure.

        Raises:
            StorageUnavailableError: the driver could not connect, now or less than a second ago.
        """
        with self._connecting:
            # Another thread may have connected while this one waited for the lock, or closed, if
            # this call hangs.
            if self.connected:
                return
            self.refuse_unusable()
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

    def close(self, timeout_seconds: float) -> None:
        """Refuse new calls, wait for those in flight, then disconnect. Idempotent.

        Later callers wait for the first.
        """
        # First: a call whose lock is not waited for here finds it.
        self.closed = True
        with self._lock:
            locks = list(self._locks)
        until = time.monotonic() + timeout_seconds
        for lock in locks:
            # With a time limit: a call that hangs in the store must not make `close` hang (rule
            # LC-2).
            if lock.acquire(timeout=max(0.0, until - time.monotonic())):
                lock.release()
        with self._connecting:
            connected = self.connected
            self.connected = False
            if connected:
                self._disconnect()
