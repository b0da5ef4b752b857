"""Splitting of requests that exceed a server's limits, and merging of the responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SubRequest = tuple[list[int], Any]
"""Indices of the scopes that a subrequest is about, and the subrequest."""


def split_request(request: Any, limits: p.Limits) -> list[SubRequest]:
    """Split a request into subrequests within the limits, in the order in which to send them."""
    columns = p.COLUMNS[type(request)]
    parts: Sequence[Any] = request.scopes
    max_entries = _max_entries(parts, columns, limits)
    entries = sum(len(getattr(part, columns[0])) for part in parts)
    if len(parts) <= limits.scopes and entries <= max_entries:
        return [(list(range(len(parts))), request)]
    found, indices, room = list[SubRequest](), list[int](), 0
    scopes = list[Any]()
    for index, part in _split_parts(parts, columns, max_entries):
        length = len(getattr(part, columns[0]))
        if scopes and (length > room or len(scopes) == limits.scopes):
            found.append((indices, structs.replace(request, scopes=scopes)))
            indices, scopes = [], []
        if not scopes:
            room = max_entries
        indices.append(index)
        scopes.append(part)
        room -= length
    found.append((indices, structs.replace(request, scopes=scopes)))
    # From the last to the first, as keys count as used: the head of a chain is used last.
    return found[::-1] if isinstance(request, p.FROM_THE_END) else found


def merge_responses(request: Any, done: Sequence[tuple[list[int], Any]]) -> list[Any]:
    """Merge the scopes of all responses, as if one request had been sent."""
    columns: list[list[Any]] = [[] for _ in request.scopes]
    for indices, response in reversed(done) if isinstance(request, p.FROM_THE_END) else done:
        for index, scope in zip(indices, response.scopes, strict=True):
            columns[index].append(scope)
    return [some[0] if len(some) == 1 else p.merged(some) for some in columns]


def _max_entries(parts: Sequence[Any], columns: tuple[str, ...], limits: p.Limits) -> int:
    longest = 20
    for name in columns:
        for part in parts:
            column = getattr(part, name)
            if column and isinstance(column[0], str):
                # UTF-8 takes four bytes a character at most.
                longest = max(longest, 4 * max(map(len, column)))
    # An estimate from above: names of scopes and fields take less than 1 KiB for each scope.
    room = limits.body_bytes - 1024 * min(len(parts), limits.scopes)
    return max(1, min(limits.keys, room // (len(columns) * (longest + 8))))


def _split_parts(
    parts: Sequence[Any], columns: tuple[str, ...], max_entries: int
) -> Iterator[tuple[int, Any]]:
    for index, part in enumerate(parts):
        length = len(getattr(part, columns[0]))
        if length <= max_entries:
            yield index, part
            continue
        for start in range(0, length, max_entries):
            end = start + max_entries
            yield (
                index,
                structs.replace(part, **{name: getattr(part, name)[start:end] for name in columns}),
            )
