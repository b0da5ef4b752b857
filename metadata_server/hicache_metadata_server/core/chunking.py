"""Size of requests: long ones are done in chunks, between which the server answers others."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

from msgspec import Struct, structs

from hicache_metadata_server import protocol as p

CHUNK_ENTRIES: Final = 256
"""Entries of a chunk, which takes about half a millisecond."""
LONG_BODY: Final = 64 * CHUNK_ENTRIES
"""Bytes of a body, of as many keys as a chunk has; a longer one is long. It is decoded while no
other long one is, and done in chunks."""


class RequestSize(NamedTuple):
    """Size of a request."""

    entries: int = 0
    """Keys, leases, slots and pins, in all scopes."""
    scopes: int = 0
    scope: str = ""
    """The first scope; empty for requests of SGLang's protocol."""


def request_size(request: object) -> RequestSize:
    """Count entries and scopes of a request; all are zero for None."""
    if not isinstance(request, Struct):
        return RequestSize()
    parts: list[Any] | None = getattr(request, "scopes", None)
    if parts is None:
        columns = [
            cast("list[object]", value)
            for value in structs.astuple(request)
            if isinstance(value, list)
        ]
        scope: str = getattr(request, "scope", "")
        return RequestSize(sum(map(len, columns)), bool(scope), scope)
    # All columns of a part have the same length, so that the first one is enough.
    first = p.COLUMNS.get(type(request), ("",))[0]
    entries = sum(len(getattr(part, first)) for part in parts) if first else 0
    names = [part if isinstance(part, str) else part.scope for part in parts]
    return RequestSize(entries, len(names), names[0] if names else "")


def can_be_cut(request: object) -> bool:
    """True if a request has more entries than a chunk, and may be done in several."""
    # A pinning lookup is done at once: one pin covers all of its slots, and what an earlier chunk
    # found could be evicted before the last chunk.
    if isinstance(request, p.Lookup) and request.pin_seconds > 0:
        return False
    if not isinstance(request, (p.SglangKeys, p.SglangReserve, *p.COLUMNS)):
        return False
    return request_size(request).entries > CHUNK_ENTRIES
