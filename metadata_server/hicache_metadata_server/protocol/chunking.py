"""Columns of requests that can be cut into chunks, and merging of the responses.

The server cuts long requests to serve others in between, and clients cut requests that exceed the
server's limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, structs

from hicache_metadata_server.protocol.pages import (
    Abort,
    Commit,
    Delete,
    Lookup,
    Renew,
    Reserve,
    Touch,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS: Final[dict[type[Struct], tuple[str, ...]]] = {
    Lookup: ("keys",),
    Touch: ("keys",),
    Reserve: ("keys", "prefixes"),
    Commit: ("leases", "lengths", "checksums"),
    Abort: ("leases",),
    Renew: ("leases",),
    Delete: ("keys", "generations"),
}
"""Columns of the scopes in requests that can be cut; the first has one value for each entry."""

FROM_THE_END: Final = (Lookup, Touch)
"""Requests whose keys count as used from the last to the first, and so do their chunks."""


def merged(responses: Sequence[Struct]) -> Any:
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
