"""Long requests, done piece by piece, so that others are served in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from msgspec import Struct, structs

from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

CHUNK_ENTRIES: Final = 256
"""In a piece: about half a millisecond."""

_FLAT: Final = (p.SglangKeys, p.SglangReserve)


def is_long(request: object) -> bool:
    """Whether a request is better done in pieces."""
    if isinstance(request, _FLAT):
        return len(request.keys) > CHUNK_ENTRIES
    if isinstance(request, p.Lookup) and request.pin_seconds > 0:
        return False
    columns = p.COLUMNS.get(type(request)) if isinstance(request, Struct) else None
    if not columns:
        return False
    parts: list[Struct] = getattr(request, "scopes")  # noqa: B009 - which of the types it is does not matter here
    return sum(len(getattr(part, columns[0])) for part in parts) > CHUNK_ENTRIES


class Piece(NamedTuple):
    """A part of a long request that is a request itself."""

    scope: int
    """The number of its scope in the request."""
    start: int
    """Its first entry there."""
    request: Any


def chunks_of(request: Any) -> list[Piece]:
    """The pieces of a long request in the order in which they are to be done; a scope without
    entries has one of none."""
    pieces = list(_cut(request))
    return pieces[::-1] if isinstance(request, (*p.FROM_THE_END, p.SglangKeys)) else pieces


def joined(pieces: list[Piece], answers: list[Any]) -> Any:
    """One answer, made of those to the pieces."""
    places = sorted(range(len(pieces)), key=lambda place: pieces[place][:2])
    if isinstance(pieces[0].request, _FLAT):
        return _joined_dicts([answers[place] for place in places])
    return _joined([(pieces[place].scope, answers[place]) for place in places])


def batched(entries: Sequence[T], most: int = CHUNK_ENTRIES) -> Iterator[Sequence[T]]:
    """Neighbours, so many at a time."""
    for start in range(0, len(entries), most):
        yield entries[start : start + most]


def _cut(request: Any) -> Iterator[Piece]:
    if isinstance(request, _FLAT):
        for start in range(0, len(request.keys), CHUNK_ENTRIES):
            yield Piece(
                0, start, structs.replace(request, keys=request.keys[start : start + CHUNK_ENTRIES])
            )
        return
    columns = p.COLUMNS[type(request)]
    for number, part in enumerate(request.scopes):
        for start in range(0, max(1, len(getattr(part, columns[0]))), CHUNK_ENTRIES):
            cut = {name: getattr(part, name)[start : start + CHUNK_ENTRIES] for name in columns}
            yield Piece(
                number, start, structs.replace(request, scopes=[structs.replace(part, **cut)])
            )


def _joined(answers: list[tuple[int, Any]]) -> Any:
    """One answer whose columns are those of the pieces, one after the other."""
    parts = dict[int, list[Any]]()
    for number, answer in answers:
        parts.setdefault(number, []).append(answer.scopes[0])
    scopes = [p.merged(some) for some in parts.values()]
    return structs.replace(answers[0][1], scopes=scopes)


def _joined_dicts(answers: list[dict[str, list[Any]] | None]) -> dict[str, list[Any]] | None:
    found = [answer for answer in answers if answer is not None]
    if not found:
        return None
    return {name: [entry for answer in found for entry in answer[name]] for name in found[0]}
