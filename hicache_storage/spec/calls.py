"""Context of one call beside its transfers: deadline, cancellation, request id, and its faults.

The faults of a call, and the `extra_info` of methods without that parameter, are context variables.
A thread that works for a call runs in a copy of the caller's context, as the deadline layer's do.
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeVar

from hicache_storage.spec.arguments import as_deadline, check_list
from hicache_storage.spec.errors import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class HiCacheStorageExtraInfo:
    """Optional information of a call: prefix keys, deadline, request id, cancellation.

    Raises:
        InvalidTransferError: a field is not of its type; the keys in `prefix_keys` are checked by
            the call.
    """

    prefix_keys: Sequence[str] | None = None
    """Keys that precede the call's keys in the chain, from the start of the sequence."""
    deadline_seconds: float | None = None
    """Time the call may take from now, or from when its `AskedScope` was made, in seconds.

    None, or more than the storage's own deadline, leaves it to that.

    At 0 and below the deadline has passed already: the call is a miss at once, and nothing is
    written or published.
    """
    request_id: str | None = None
    """For logs; at most 64 characters of it.

    None takes that of the context (`RequestScope`), or draws one.
    """
    cancellation: CancellationToken | None = None
    """Token that is cancelled before the call has ended; None where no caller does.

    The deadline layer cancels it, or another caller.
    """

    def __post_init__(self) -> None:
        if self.deadline_seconds is not None:
            # A lock waits for nothing but a float or an int that it can hold.
            object.__setattr__(self, "deadline_seconds", as_deadline(self.deadline_seconds))
        if self.prefix_keys is not None:
            check_list(self.prefix_keys, "prefix_keys")
        request_id: object = self.request_id
        if not (request_id is None or isinstance(request_id, str)):
            raise InvalidTransferError(f"request_id must be a text or None, got {request_id!r:.80}")
        token: object = self.cancellation
        if not (token is None or isinstance(token, CancellationToken)):
            raise InvalidTransferError(
                f"cancellation must be a CancellationToken or None, got {token!r:.80}"
            )


def check_info(extra_info: object) -> None:
    """Check the argument `extra_info` of a call.

    Raises:
        InvalidTransferError: it is something else.
    """
    if not (extra_info is None or isinstance(extra_info, HiCacheStorageExtraInfo)):
        raise InvalidTransferError(
            f"extra_info must be a HiCacheStorageExtraInfo or None, got {extra_info!r:.80}"
        )


class CancellationToken:
    """A cancellation token of one call, cancelled when the deadline has passed without an answer.

    Thread-safe. After `cancel()` has returned, the caller's memory is the caller's again: the
    storage neither writes to it nor publishes bytes read from it.
    """

    __slots__ = ("_changed", "_shields", "cancelled")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shields = 0
        self.cancelled = False
        """True once `cancel()` has been called: the caller's memory may have been reused."""

    def cancel(self) -> None:
        """Cancel the call, and wait until every shielded block that runs has ended."""
        with self._changed:
            # Before the wait: a block that enters from now on finds itself inactive and ends at
            # once, so that the wait is for writes alone.
            self.cancelled = True
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
            return not self.cancelled

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


# The value is an object that is changed in place: a worker thread sets variables in its copy of the
# context only, but counts into the caller's scope.
_faults: Final[ContextVar[FaultScope | None]] = ContextVar("hicache_call_faults", default=None)
_info: Final[ContextVar[HiCacheStorageExtraInfo | None]] = ContextVar(
    "hicache_call_info", default=None
)
_asked: Final[ContextVar[float | None]] = ContextVar("hicache_call_asked", default=None)
from_memory: Final[ContextVar[bool]] = ContextVar("hicache_call_from_memory", default=False)
"""Set for a lookup or a get in which nothing may hang.

It is answered so, or raises `MayHangError`; the destination pages of a get may hold anything then.
The deadline layer asks so first, in the caller's own thread, where the storage
`answers_from_memory`.
"""


def current_call_info() -> HiCacheStorageExtraInfo | None:
    """Return deadline and cancellation of the `delete()` or `clear()` in this context.

    None without one.
    """
    return _info.get()


def with_call_info(info: HiCacheStorageExtraInfo | None, call: Callable[[], AnswerT]) -> AnswerT:
    """Pass deadline and cancellation to `delete()` or `clear()`, which take no `extra_info`.

    Without any, the call has what its context has.
    """
    if info is None:
        return call()
    token = _info.set(info)
    try:
        return call()
    finally:
        _info.reset(token)


def seconds_since_asked() -> float:
    """Return how long ago the engine asked for the calls in this context; 0 without a scope."""
    asked = _asked.get()
    return 0.0 if asked is None else time.monotonic() - asked


class AskedScope:
    """Context manager for calls whose deadlines began when it was made, and not when they are made.

    For bridges that queue calls: made when the engine asks, entered by the thread that calls.
    """

    __slots__ = ("_at", "_token")

    def __init__(self) -> None:
        self._at = time.monotonic()

    def __enter__(self) -> None:
        self._token: Token[float | None] = _asked.set(self._at)

    def __exit__(self, *_: object) -> None:
        _asked.reset(self._token)


class FaultScope:
    """Context manager that counts the faults of the calls within.

    Not those of other threads.
    """

    __slots__ = ("_token", "count", "store_asked")

    def __init__(self) -> None:
        self.count = 0
        self.store_asked = True
        """`False` after a call that was answered from memory, without the store."""

    def __enter__(self) -> Self:
        self._token: Token[FaultScope | None] = _faults.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _faults.reset(self._token)


def note_fault() -> None:
    """Report a fault of the store to the call in this context.

    Consecutive ones open a circuit breaker.
    """
    scope = _faults.get()
    if scope is not None:
        # Without a lock: the breaker only compares the count with 0, so a lost increment is
        # harmless.
        scope.count += 1


def note_answer_from_memory() -> None:
    """Record that the call in this context was answered without the store.

    That is no evidence for a circuit breaker.
    """
    scope = _faults.get()
    if scope is not None:
        scope.store_asked = False
