"""Context of one call beside its arguments.

That is `extra_info` of methods without that parameter, and the faults of the call.

Both are context variables. A thread that works for a call runs in a copy of the caller's context,
as the deadline layer's do.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from hicache_storage.spec.transfers import HiCacheStorageExtraInfo

# The value is an object that is changed in place: a worker thread sets variables in its copy of the
# context only, but counts into the caller's scope.
_faults: Final[ContextVar[FaultScope | None]] = ContextVar("hicache_call_faults", default=None)
_info: Final[ContextVar[HiCacheStorageExtraInfo | None]] = ContextVar(
    "hicache_call_info", default=None
)


def current_call_info() -> HiCacheStorageExtraInfo | None:
    """Return deadline and cancellation of the `delete()` or `clear()` in this context.

    None without one.
    """
    return _info.get()


class CallInfoScope:
    """Context manager that passes deadline and cancellation to `delete()` and `clear()`.

    They take no `extra_info`.
    """

    __slots__ = ("_info", "_token")

    def __init__(self, info: HiCacheStorageExtraInfo) -> None:
        self._info = info

    def __enter__(self) -> None:
        self._token: Token[HiCacheStorageExtraInfo | None] = _info.set(self._info)

    def __exit__(self, *_: object) -> None:
        _info.reset(self._token)


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
