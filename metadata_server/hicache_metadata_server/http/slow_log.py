"""Slow log: the slowest requests of the last hour."""

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
"""Calls kept of each minute, and returned of the whole hour."""
MINUTES: Final = 60
SPAN_SECONDS: Final = 60.0 * MINUTES
NAME_CHARACTERS: Final = 138
"""The longest name that a scope may have. The body of a refused request may contain any text there,
which would stay in memory for an hour."""


class _AnyPart(msgspec.Struct):
    scope: str = ""
    keys: list[msgspec.Raw] = []
    leases: list[msgspec.Raw] = []


# `Raw` counts the entries of a list without decoding them.
class _AnyRequest(msgspec.Struct):
    """Every field of all requests that holds entries or scopes."""

    scope: str = ""
    scopes: list[_AnyPart | str] = []
    keys: list[msgspec.Raw] = []
    slots: list[msgspec.Raw] = []
    pins: list[msgspec.Raw] = []
    written_keys_to_confirm: list[msgspec.Raw] = []
    pages_to_release: list[msgspec.Raw] = []


class RequestSize(NamedTuple):
    """Size of a request."""

    entries: int = 0
    scopes: int = 0
    scope: str = ""
    """Name of its first scope, cut to `NAME_CHARACTERS`."""


class SlowLog:
    """The slowest calls of each minute, in a bounded heap each.

    Compare with `floor` before calling `add`: most calls are faster.
    """

    def __init__(self) -> None:
        self.floor = 0.0
        """Seconds; faster calls are not among the slowest of this minute."""
        self._heap: list[tuple[float, int, SlowCall]] = []
        # A heap for each minute, not one for the hour: entries expire by age, and a heap finds only
        # its fastest entry.
        self._earlier = deque[list[tuple[float, int, SlowCall]]](maxlen=MINUTES)
        self._number = 0
        self._minute = 0.0

    def rotate(self, now: float) -> None:
        """Start a new heap if a new minute has begun; called once a second."""
        minute = now // 60.0
        if minute == self._minute:
            return
        if self._heap:
            self._earlier.append(self._heap)
        self._heap = []
        self.floor = 0.0
        self._minute = minute

    def add(self, call: SlowCall) -> None:
        """Add a call; replaces the fastest one once the minute has `KEPT`."""
        self._number += 1
        # The number breaks ties: calls themselves cannot be compared.
        entry = (call.seconds, -self._number, call)
        if len(self._heap) < KEPT:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)
        if len(self._heap) == KEPT:
            self.floor = self._heap[0][0]

    def calls(self, now: float) -> list[SlowCall]:
        """The slowest calls of the last hour, slowest first."""
        entries = [
            entry
            for heap in (*self._earlier, self._heap)
            for entry in heap
            if entry[2].time > now - SPAN_SECONDS
        ]
        return [call for _, _, call in heapq.nlargest(KEPT, entries)]


def request_size(body: bytes, content_type: str) -> RequestSize:
    """Count entries and scopes in the body of any route.

    All are zero if it cannot be decoded.

    From the body and not from the decoded request: slow calls are few, and the others should not
    keep their message until they are answered.
    """
    try:
        read = _DECODERS[content_type == MSGPACK].decode(body) if body else _AnyRequest()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return RequestSize()
    parts = [part for part in read.scopes if isinstance(part, _AnyPart)]
    columns: Iterable[list[Any]] = (
        read.keys,
        read.slots,
        read.pins,
        read.written_keys_to_confirm,
        read.pages_to_release,
        *(column for part in parts for column in (part.keys, part.leases)),
    )
    names = [part.scope if isinstance(part, _AnyPart) else part for part in read.scopes]
    if not names and read.scope:
        names = [read.scope]
    first = names[0][:NAME_CHARACTERS] if names else ""
    return RequestSize(sum(map(len, columns)), len(names), first)


_DECODERS: Final[tuple[msgspec.json.Decoder[_AnyRequest], msgspec.msgpack.Decoder[_AnyRequest]]] = (
    msgspec.json.Decoder(_AnyRequest),
    msgspec.msgpack.Decoder(_AnyRequest),
)
