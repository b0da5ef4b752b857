"""What engines ask: scopes made, pages looked up, written, used and given up.

Lists are columns: entry i of each is about key (or lease) i of the request.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

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


class ScopeGeometry(Request, frozen=True, kw_only=True):
    """A scope, and what all its clients must agree on."""

    scope: ScopeName
    slots: Slots
    slot_bytes: Natural = 0
    geometry: str = ""
    """Layout of a page: opaque, compared as text."""
    identity: str = ""
    """Fingerprint of the identity whose pages these are: opaque, compared as text."""


class Initialize(Request, frozen=True, kw_only=True):
    """`POST /v2/initialize`: make scopes, or see that they are what this client takes them for. All
    or none."""

    scopes: list[ScopeGeometry]
    earlier_lease_seconds: list[Annotated[float, Meta(ge=0)]] = field(default_factory=list[float])
    """How long writers may still hold leases of each scope that a server has given which this one
    knows nothing of; 0 for a file that nobody has written yet. A scope that is made with it gives
    no slot before they and a quarantine are over, counted from the start of the server at the
    earliest. The whole column may be left out; of a scope that is there, it says nothing."""


class Initialized(Answer, frozen=True, kw_only=True):
    """Whether each scope is new."""

    created: list[bool]


class Describe(Request, frozen=True, kw_only=True):
    """`POST /v2/describe`: name the model whose pages a scope holds. The last name stays."""

    scope: ScopeName
    model: ModelName


class LookupScope(Request, frozen=True, kw_only=True):
    """Keys of one scope."""

    scope: ScopeName
    keys: list[Key]


class Lookup(Request, frozen=True, kw_only=True):
    """`POST /v2/lookup`: where pages are."""

    scopes: list[LookupScope]
    pin_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """How long the slots that are found must not be given to another key; 0 for no pin."""
    touch: bool = True
    """Whether being found counts as use."""


class FoundPages(Answer, frozen=True, kw_only=True):
    """Pages of one scope; a key that is not live has slot -1 and zeros."""

    slots: list[int]
    generations: list[Natural]
    lengths: list[Natural]
    """Bytes; 0 for a page that a client of the compatible part wrote, which says neither length nor
    checksum."""
    checksums: list[Checksum]


class LookedUp(Answer, frozen=True, kw_only=True):
    """Answer of `lookup`."""

    scopes: list[FoundPages]
    pin: Natural = 0
    """Name of the pin on everything found here; 0 where nothing is pinned."""
    pin_seconds: Annotated[float, Meta(ge=0)] = 0.0


class ReserveScope(Request, frozen=True, kw_only=True):
    """Keys of one scope that the client wants to write."""

    scope: ScopeName
    keys: list[Key]
    prefixes: list[str] = field(default_factory=list[str])
    """The key before each in its chain, "" at the head of one; the whole column may be left out."""


class Reserve(Request, frozen=True, kw_only=True):
    """`POST /v2/reserve`: lease slots."""

    scopes: list[ReserveScope]
    owner: str = ""
    """Who asks, for people that look at `inspect`."""
    lease_seconds: Seconds | None = None


class Leased(Answer, frozen=True, kw_only=True):
    """One scope's share; -1 and zeros where the state does not come with a slot or a lease."""

    states: list[Reserved]
    slots: list[int]
    generations: list[Natural]
    leases: list[Natural]
    """Never given twice, also not after a restart."""
    evicted: Natural = 0
    """Live pages that went to make room for these; 0 from a server that does not say."""


class Leases(Answer, frozen=True, kw_only=True):
    """Answer of `reserve`."""

    scopes: list[Leased]
    lease_seconds: Seconds


class CommitScope(Request, frozen=True, kw_only=True):
    """Leases of one scope whose slots are written."""

    scope: ScopeName
    leases: list[Positive]
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
    """`POST /v2/renew`: let leases last from now on."""

    scopes: list[LeaseScope]
    lease_seconds: Seconds | None = None


class SettledScope(Answer, frozen=True, kw_only=True):
    """One scope's share."""

    states: list[Settled]


class SettledLeases(Answer, frozen=True, kw_only=True):
    """Answer of `commit`, `abort` and `renew`."""

    scopes: list[SettledScope]


class Unpin(Request, frozen=True, kw_only=True):
    """`POST /v2/unpin`: let pins go before their time. Unknown ones are nobody's loss."""

    pins: list[Positive]


class Touch(Request, frozen=True, kw_only=True):
    """`POST /v2/touch`: count as use, from the last key of each scope to the first, so that a
    chain's head ends as the latest."""

    scopes: list[LookupScope]


class DeleteScope(Request, frozen=True, kw_only=True):
    """Keys of one scope."""

    scope: ScopeName
    keys: list[Key]
    generations: list[Natural] = field(default_factory=list[int])
    """Delete key i only while its page is of this generation; the whole column may be left out."""


class Delete(Request, frozen=True, kw_only=True):
    """`POST /v2/delete`: make pages go."""

    scopes: list[DeleteScope]


class Flags(Answer, frozen=True, kw_only=True):
    """One scope's share."""

    done: list[bool]


class Marked(Answer, frozen=True, kw_only=True):
    """Answer of `touch` and `delete`: which keys were there."""

    scopes: list[Flags]


class Clear(Request, frozen=True, kw_only=True):
    """`POST /v2/clear`: empty scopes, leases included."""

    scopes: list[ScopeName]


class Cleared(Answer, frozen=True, kw_only=True):
    """Pages that went, for each scope."""

    pages: list[Natural]
