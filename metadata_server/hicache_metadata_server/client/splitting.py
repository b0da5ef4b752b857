"""Requests that are longer than a server's limits: chunks of them, and the joined response."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from msgspec import structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Sequence


def chunks_of(request: Any, limits: p.Limits) -> list[tuple[int, Any]]:
    """Cut a request into chunks that are within the limits, each behind the index of its scope."""
    columns, parts = p.COLUMNS[type(request)], request.scopes
    entries = sum(len(getattr(part, columns[0])) for part in parts)
    most = _max_entries(parts, columns, limits)
    if len(parts) <= limits.scopes and entries <= most:
        return [(0, request)]
    return _cut(request, most)


def check_shape(request: Any, response: Any) -> None:
    """Raise MetadataError unless a response has the scopes and columns of its request."""
    first = p.COLUMNS[type(request)][0]
    lengths = [len(getattr(part, first)) for part in request.scopes]
    if len(lengths) != len(response.scopes) or any(
        isinstance(column := getattr(found, name), Sized) and len(column) != length
        for length, found in zip(lengths, response.scopes, strict=True)
        for name in found.__struct_fields__
    ):
        raise MetadataError(
            "the metadata server answers about another number of entries than it was asked about"
        )


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


def _cut(request: Any, max_entries: int) -> list[tuple[int, Any]]:
    """Cut a long request into requests about one scope each, in the order in which to send them.

    Each is behind the index of its scope. A scope without entries gets one, so that the response
    has an entry for it.
    """
    columns, chunks = p.COLUMNS[type(request)], list[tuple[int, Any]]()
    for number, part in enumerate(request.scopes):
        for start in range(0, max(1, len(getattr(part, columns[0]))), max_entries):
            cut = {name: getattr(part, name)[start : start + max_entries] for name in columns}
            chunks.append((number, structs.replace(request, scopes=[structs.replace(part, **cut)])))
    # The keys of a lookup count as used from the last to the first, and so do its chunks.
    return chunks[::-1] if isinstance(request, p.Lookup) else chunks


def joined(done: Sequence[tuple[int, Any, Any]]) -> Any:
    """Join the responses to all chunks into one response."""
    _, first, response = done[0]
    scopes = dict[int, list[Any]]()
    for number, _, one in reversed(done) if isinstance(first, p.Lookup) else done:
        scopes.setdefault(number, []).append(one.scopes[0])
    joined = structs.replace(response, scopes=[_merged(some) for some in scopes.values()])
    if isinstance(joined, p.Leases):
        return structs.replace(joined, lease_seconds=min(one.lease_seconds for *_, one in done))
    return joined


def _merged(responses: Sequence[Any]) -> Any:
    """Merge the responses for one scope: columns are concatenated, counts are added."""
    # By type, not by name: a new column or count needs no change here.
    fields = {
        name: [getattr(response, name) for response in responses]
        for name in responses[0].__struct_fields__
    }
    return structs.replace(
        responses[0],
        **{
            name: sum(values)
            if isinstance(values[0], int)
            else [entry for column in values for entry in column]
            for name, values in fields.items()
        },
    )
