"""What travels with one call beside its arguments: its limits where it takes no `extra_info`, and the faults that it meets.

Both are context variables. A thread that works for a call runs in a copy of the caller's context, as the deadline layer's do.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache_storage.spec.transfers import HiCacheStorageExtraInfo

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
