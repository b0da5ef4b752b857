"""Long requests, cut into chunks between which the server answers other requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from msgspec import Struct, structs

from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

CHUNK_ENTRIES: Final = 256
"""Entries of a chunk, which takes about half a millisecond."""
LONG_BODY: Final = 64 * CHUNK_ENTRIES
"""Bytes of a body, of as many keys as a chunk has; a longer one is long. It is decoded while no
other long one is, and done in chunks."""

_FLAT: Final = (p.SglangKeys, p.SglangReserve)


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
    if not isinstance(request, (*_FLAT, *p.COLUMNS)):
        return False
    return request_size(request).entries > CHUNK_ENTRIES


class Chunk(NamedTuple):
    """A part of a long request that is a request itself."""

    scope: int
    """Index of its scope in the request."""
    start: int
    """Index of its first entry in that scope."""
    request: Any


def chunks_of(request: Any) -> list[Chunk]:
    """Cut a long request into chunks, in the order in which to do them.

    A scope without entries gets one empty chunk, so that the response has an entry for it.
    """
    chunks = list(_cut(request))
    return chunks[::-1] if isinstance(request, (*p.FROM_THE_END, p.SglangKeys)) else chunks


def join_responses(chunks: list[Chunk], answers: list[Any]) -> Any:
    """Join the responses to all chunks into one response."""
    # Chunks may have been done from the last to the first; entries are in the order of the request.
    places = sorted(range(len(chunks)), key=lambda place: chunks[place][:2])
    if isinstance(chunks[0].request, _FLAT):
        return _join_dicts([answers[place] for place in places])
    return _join_columns([(chunks[place].scope, answers[place]) for place in places])


def batched(entries: Sequence[T], max_length: int = CHUNK_ENTRIES) -> Iterator[Sequence[T]]:
    """Yield consecutive entries, up to `max_length` at a time."""
    for start in range(0, len(entries), max_length):
        yield entries[start : start + max_length]


def _cut(request: Any) -> Iterator[Chunk]:
    if isinstance(request, _FLAT):
        for start in range(0, len(request.keys), CHUNK_ENTRIES):
            yield Chunk(
                0, start, structs.replace(request, keys=request.keys[start : start + CHUNK_ENTRIES])
            )
        return
    columns = p.COLUMNS[type(request)]
    for number, part in enumerate(request.scopes):
        for start in range(0, max(1, len(getattr(part, columns[0]))), CHUNK_ENTRIES):
            cut = {name: getattr(part, name)[start : start + CHUNK_ENTRIES] for name in columns}
            yield Chunk(
                number, start, structs.replace(request, scopes=[structs.replace(part, **cut)])
            )


def _join_columns(answers: list[tuple[int, Any]]) -> Any:
    """Concatenate the columns of several responses, scope by scope."""
    parts = dict[int, list[Any]]()
    for number, answer in answers:
        parts.setdefault(number, []).append(answer.scopes[0])
    scopes = [p.merged(some) for some in parts.values()]
    return structs.replace(answers[0][1], scopes=scopes)


def _join_dicts(answers: list[dict[str, list[Any]] | None]) -> dict[str, list[Any]] | None:
    found = [answer for answer in answers if answer is not None]
    if not found:
        return None
    return {name: [entry for answer in found for entry in answer[name]] for name in found[0]}
