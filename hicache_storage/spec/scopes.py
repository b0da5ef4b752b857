"""What travels with one call beside its arguments: its limits where it takes no `extra_info`, and the faults that it meets.

Both are context variables. A thread that works for a call runs in a copy of the caller's context, as the deadline layer's do.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from hicache_storage.spec.transfers import HiCacheStorageExtraInfo

_faults: Final[ContextVar[FaultScope | None]] = ContextVar("hicache_call_faults", default=None)
_info: Final[ContextVar[HiCacheStorageExtraInfo | None]] = ContextVar("hicache_call_info", default=None)


def current_call_info() -> HiCacheStorageExtraInfo | None:
    """The deadline and the caller of a `delete()` or `clear()` that is running in this context; None without limits."""
    return _info.get()


class CallInfoScope:
    """`with CallInfoScope(info):` a `delete()` or `clear()` within has these limits; they take no `extra_info` themselves."""

    __slots__ = ("_info", "_token")

    def __init__(self, info: HiCacheStorageExtraInfo) -> None:
        self._info = info

    def __enter__(self) -> None:
        self._token: Token[HiCacheStorageExtraInfo | None] = _info.set(self._info)

    def __exit__(self, *_: object) -> None:
        _info.reset(self._token)


class FaultScope:
    """`with FaultScope() as faults:` counts the faults that the calls within tell of, and those of no other thread's calls."""

    __slots__ = ("_token", "count", "store_asked")

    def __init__(self) -> None:
        self.count = 0
        self.store_asked = True
        """`False` once a call was answered from memory, which shows nothing about the store."""

    def __enter__(self) -> Self:
        self._token: Token[FaultScope | None] = _faults.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _faults.reset(self._token)


def note_fault() -> None:
    """Tell the call that runs in this context that the store has failed it; what opens a circuit breaker."""
    scope = _faults.get()
    if scope is not None:
        scope.count += 1


def note_answer_from_memory() -> None:
    """Record that the call in this context was answered without the store: a circuit breaker learns nothing from it."""
    scope = _faults.get()
    if scope is not None:
        scope.store_asked = False
