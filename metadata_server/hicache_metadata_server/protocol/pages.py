"""Messages for engines: scopes, lookups, leases, commits, deletes.

Lists are columns: entry i of each is about key (or lease) i of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta, Struct, field, structs

from hicache_metadata_server.protocol.elements import (
    Answer,
    Checksum,
    Key,
    ModelName,
    Natural,
    Positive,
    Request,
    Reserved,
    ScopeName,
    Seconds,
    Settled,
    Slots,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class ScopeGeometry(Request, frozen=True, kw_only=True):
    """A scope, and the properties that all of its clients must agree on."""

    scope: ScopeName
    slots: Slots
    slot_bytes: Natural = 0
    geometry: str = ""
    """Layout of a page: opaque, compared as text."""
    identity: str = ""
    """Fingerprint of the identity whose pages these are: opaque, compared as text."""


class Initialize(Request, frozen=True, kw_only=True):
    """`POST /v2/initialize`: create scopes, or check that existing ones match. All or none."""

    scopes: list[ScopeGeometry]
    # Only clients know: the server may have a new store while the slot file is old.
    earlier_lease_seconds: list[Annotated[float, Meta(ge=0)]] = field(default_factory=list[float])
    """Seconds for which writers may still hold leases of an earlier server; 0 for a slot file that
    was never written. A new scope gives no slot until these leases and a quarantine are over,
    counted from the start of the server at the earliest. The column may be left out. It is ignored
    for an existing scope."""


class Initialized(Answer, frozen=True, kw_only=True):
    """Response of `initialize`: True for each new scope."""

    created: list[bool]


class Describe(Request, frozen=True, kw_only=True):
    """`POST /v2/describe`: set the name of a scope's model. The last name stays."""

    scope: ScopeName
    model: ModelName


class LookupScope(Request, frozen=True, kw_only=True):
    """Keys of one scope."""

    scope: ScopeName
    keys: list[Key]


class Lookup(Request, frozen=True, kw_only=True):
    """`POST /v2/lookup`: find the slots of pages."""

    scopes: list[LookupScope]
    pin_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds for which found slots must not be given to another key; 0 for no pin."""
    # Tools look up pages without changing the LRU order.
    touch: bool = True
    """True to mark found pages as used."""


class FoundPages(Answer, frozen=True, kw_only=True):
    """Found pages of one scope; a key that is not live has slot -1 and zeros."""

    slots: list[int]
    generations: list[Natural]
    lengths: list[Natural]
    """Bytes of each page; 0 for SGLang's clients, which send neither length nor checksum."""
    checksums: list[Checksum]


class LookedUp(Answer, frozen=True, kw_only=True):
    """Response of `lookup`."""

    scopes: list[FoundPages]
    # One pin for all scopes of the request, so that one `unpin` releases a whole read.
    pin: Natural = 0
    """Number of the pin on all found slots; 0 for no pin."""
    pin_seconds: Annotated[float, Meta(ge=0)] = 0.0


class ReserveScope(Request, frozen=True, kw_only=True):
    """Keys of one scope that the client is going to write."""

    scope: ScopeName
    keys: list[Key]
    # Not `Key`, because of the empty text at the head; `core.limits` checks the lengths.
    prefixes: list[str] = field(default_factory=list[str])
    """Key before each key in its chain, "" at the head; the column may be left out."""


class Reserve(Request, frozen=True, kw_only=True):
    """`POST /v2/reserve`: lease slots."""

    scopes: list[ReserveScope]
    owner: str = ""
    """Name of the client, for operators; `inspect` shows it."""
    lease_seconds: Seconds | None = None


class Leased(Answer, frozen=True, kw_only=True):
    """Response of `reserve` for one scope; -1 and zeros for keys without slot or lease."""

    states: list[Reserved]
    slots: list[int]
    generations: list[Natural]
    leases: list[Natural]
    """Numbers of leases, which are never reused, not even after a restart."""
    evicted: Natural = 0
    """Pages evicted for these leases; 0 from a server without counts."""


class Leases(Answer, frozen=True, kw_only=True):
    """Response of `reserve`."""

    scopes: list[Leased]
    # The granted length, which limits may have changed: the client renews by it.
    lease_seconds: Seconds


class CommitScope(Request, frozen=True, kw_only=True):
    """Leases of one scope whose slots are written."""

    scope: ScopeName
    leases: list[Positive]
    # A stored length of 0 means that it is not known, so an empty page cannot be committed.
    lengths: list[Positive]
    checksums: list[Checksum]


class Commit(Request, frozen=True, kw_only=True):
    """`POST /v2/commit`: make pages live."""

    scopes: list[CommitScope]


class LeaseScope(Request, frozen=True, kw_only=True):
    """Leases of one scope."""

    scope: ScopeName
    leases: list[Positive]


class Abort(Request, frozen=True, kw_only=True):
    """`POST /v2/abort`: give leases back."""

    scopes: list[LeaseScope]


class Renew(Request, frozen=True, kw_only=True):
    """`POST /v2/renew`: renew leases from now on."""

    scopes: list[LeaseScope]
    lease_seconds: Seconds | None = None


class SettledScope(Answer, frozen=True, kw_only=True):
    """Response of `commit`, `abort` and `renew` for one scope."""

    states: list[Settled]


class SettledLeases(Answer, frozen=True, kw_only=True):
    """Response of `commit`, `abort` and `renew`."""

    scopes: list[SettledScope]


class Unpin(Request, frozen=True, kw_only=True):
    """`POST /v2/unpin`: release pins before their end. Unknown ones are ignored."""

    pins: list[Positive]


class Touch(Request, frozen=True, kw_only=True):
    """`POST /v2/touch`: mark pages as used, from the last key of each scope to the first."""

    # The head of a chain becomes the most recently used page, so tails are evicted first.

    scopes: list[LookupScope]


class DeleteScope(Request, frozen=True, kw_only=True):
    """Keys of one scope."""

    scope: ScopeName
    keys: list[Key]
    # A client deletes a page that it has found damaged; another page may have the key by then.
    generations: list[Natural] = field(default_factory=list[int])
    """Delete a page only if it has this generation; the column may be left out."""


class Delete(Request, frozen=True, kw_only=True):
    """`POST /v2/delete`: delete pages."""

    scopes: list[DeleteScope]


class Flags(Answer, frozen=True, kw_only=True):
    """Response of `touch` and `delete` for one scope."""

    done: list[bool]


class Marked(Answer, frozen=True, kw_only=True):
    """Response of `touch` and `delete`: True for each key that was live."""

    scopes: list[Flags]


class Clear(Request, frozen=True, kw_only=True):
    """`POST /v2/clear`: empty scopes, leases included."""

    scopes: list[ScopeName]


class Cleared(Answer, frozen=True, kw_only=True):
    """Response of `clear`: number of deleted pages of each scope."""

    pages: list[Natural]


# For the server, which cuts long requests to serve others in between, and for clients, which cut
# requests that exceed the limits.
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
