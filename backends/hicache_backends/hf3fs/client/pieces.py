"""Requests cut to what a server takes at a time, and their answers put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Piece = tuple[list[int], Any]
"""Numbers of the scopes that a piece of a request is about, and the piece."""


def pieces(request: Any, limits: p.Limits) -> list[Piece]:
    """A request as some that are within the limits, in the order in which they are to be sent."""
    columns = p.COLUMNS[type(request)]
    parts: Sequence[Any] = request.scopes
    most = _most_entries(parts, columns, limits)
    if len(parts) <= limits.scopes and sum(len(getattr(part, columns[0])) for part in parts) <= most:
        return [(list(range(len(parts))), request)]
    found, numbers, room = list[Piece](), list[int](), 0
    scopes = list[Any]()
    for number, part in _parts(parts, columns, most):
        length = len(getattr(part, columns[0]))
        if scopes and (length > room or len(scopes) == limits.scopes):
            found.append((numbers, structs.replace(request, scopes=scopes)))
            numbers, scopes = [], []
        if not scopes:
            room = most
        numbers.append(number)
        scopes.append(part)
        room -= length
    found.append((numbers, structs.replace(request, scopes=scopes)))
    return found[::-1] if isinstance(request, p.FROM_THE_END) else found


def joined(request: Any, done: Sequence[tuple[list[int], Any]]) -> list[Any]:
    """The answers' scopes, as if one request had been sent: columns of the pieces one after the other."""
    shares: list[list[Any]] = [[] for _ in request.scopes]
    for numbers, answer in reversed(done) if isinstance(request, p.FROM_THE_END) else done:
        for number, share in zip(numbers, answer.scopes, strict=True):
            shares[number].append(share)
    return [some[0] if len(some) == 1 else p.merged(some) for some in shares]


def _most_entries(parts: Sequence[Any], columns: tuple[str, ...], limits: p.Limits) -> int:
    longest = 20
    for name in columns:
        for part in parts:
            column = getattr(part, name)
            if column and isinstance(column[0], str):
                # UTF-8 takes four bytes a character at most.
                longest = max(longest, 4 * max(map(len, column)))
    return max(1, min(limits.keys, (limits.body_bytes - 1024 * min(len(parts), limits.scopes)) // (len(columns) * (longest + 8))))


def _parts(parts: Sequence[Any], columns: tuple[str, ...], most: int) -> Iterator[tuple[int, Any]]:
    for number, part in enumerate(parts):
        length = len(getattr(part, columns[0]))
        if length <= most:
            yield number, part
            continue
        for start in range(0, length, most):
            yield number, structs.replace(part, **{name: getattr(part, name)[start : start + most] for name in columns})
