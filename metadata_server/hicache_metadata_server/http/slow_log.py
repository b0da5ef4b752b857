"""The slowest calls of the last hour."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from hicache_metadata_server.protocol import MSGPACK
from hicache_metadata_server.protocol.history import SlowCall

if TYPE_CHECKING:
    from collections.abc import Iterable

KEPT: Final = 20
"""Of each minute, and of all."""
MINUTES: Final = 60
SPAN_SECONDS: Final = 60.0 * MINUTES
NAME_CHARACTERS: Final = 138
"""Of a scope's name, which is as long as one may be: the body of a refused request may have any
text there, and is kept for an hour."""


class _Share(msgspec.Struct):
    scope: str = ""
    keys: list[msgspec.Raw] = []
    leases: list[msgspec.Raw] = []


class _Columns(msgspec.Struct):
    """Every list of entries that a request may have."""

    scope: str = ""
    scopes: list[_Share | str] = []
    keys: list[msgspec.Raw] = []
    slots: list[msgspec.Raw] = []
    pins: list[msgspec.Raw] = []
    written_keys_to_confirm: list[msgspec.Raw] = []
    pages_to_release: list[msgspec.Raw] = []


class Named(NamedTuple):
    """What a request names."""

    entries: int = 0
    scopes: int = 0
    scope: str = ""


class Slowest:
    """A bounded heap for each minute.

    Whoever answers a call asks `floor` whether it is slow enough, which most are not, and only then
    calls `add`.
    """

    def __init__(self) -> None:
        self.floor = 0.0
        """Seconds; no shorter call is among the slowest of this minute."""
        self._heap: list[tuple[float, int, SlowCall]] = []
        self._earlier = deque[list[tuple[float, int, SlowCall]]](maxlen=MINUTES)
        self._number = 0
        self._minute = 0.0

    def turn(self, now: float) -> None:
        """See that another minute begins, if it does; called from time to time."""
        minute = now // 60.0
        if minute == self._minute:
            return
        if self._heap:
            self._earlier.append(self._heap)
        self._heap, self.floor, self._minute = [], 0.0, minute

    def add(self, call: SlowCall) -> None:
        """Keep it, in the place of a faster one where there are many."""
        self._number += 1
        # The number, so that calls are not compared.
        entry = (call.seconds, -self._number, call)
        if len(self._heap) < KEPT:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)
        if len(self._heap) == KEPT:
            self.floor = self._heap[0][0]

    def told(self, now: float) -> list[SlowCall]:
        """The slowest of the last hour, slowest first."""
        entries = [
            entry
            for heap in (*self._earlier, self._heap)
            for entry in heap
            if entry[2].time > now - SPAN_SECONDS
        ]
        return [call for _, _, call in heapq.nlargest(KEPT, entries)]


def named(body: bytes, content_type: str) -> Named:
    """What a request of any route names: nothing, if it cannot be read."""
    try:
        read = _DECODERS[content_type == MSGPACK].decode(body) if body else _Columns()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Named()
    shares = [share for share in read.scopes if isinstance(share, _Share)]
    columns: Iterable[list[Any]] = (
        read.keys,
        read.slots,
        read.pins,
        read.written_keys_to_confirm,
        read.pages_to_release,
        *(column for share in shares for column in (share.keys, share.leases)),
    )
    names = [share.scope if isinstance(share, _Share) else share for share in read.scopes] or [
        read.scope
    ] * bool(read.scope)
    return Named(sum(map(len, columns)), len(names), names[0][:NAME_CHARACTERS] if names else "")


_DECODERS: Final[tuple[msgspec.json.Decoder[_Columns], msgspec.msgpack.Decoder[_Columns]]] = (
    msgspec.json.Decoder(_Columns),
    msgspec.msgpack.Decoder(_Columns),
)
