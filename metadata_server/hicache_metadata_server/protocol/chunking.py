"""What a request that is cut into pieces needs: which columns are cut, and how the answers become
one."""

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
"""Columns of the scopes in requests that can be cut; the first says how many entries there are."""

FROM_THE_END: Final = (Lookup, Touch)
"""Their keys count as used from the last to the first, so that pieces of them are asked from the
last to the first."""


def merged(shares: Sequence[Struct]) -> Any:
    """What is answered for a scope, made of the answers to pieces of a request: columns one after
    the other, counts added up."""
    fields = {
        name: [getattr(share, name) for share in shares] for name in shares[0].__struct_fields__
    }
    return structs.replace(
        shares[0],
        **{
            name: sum(values)
            if isinstance(values[0], int)
            else [entry for column in values for entry in column]
            for name, values in fields.items()
        },
    )
