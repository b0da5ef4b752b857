"""The messages of the metadata protocol, as `docs/metadata-protocol.md` describes them.

Lists inside a message are columns: entry i of each is about key (or lease) i of the request, so that 128 keys cost a few lists and not
128 objects. Bodies are JSON or, by content type, msgpack; both carry the same messages. Durations are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, field, structs

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

PROTOCOL: Final = "2"
JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
NO_SLOT: Final = -1
"""Stands in a column of slots where a key has none."""

KEY_BYTES: Final = 512
"""UTF-8 bytes that every server takes in a key; `Limits.key_bytes` may be more."""

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Checksum = Annotated[int, Meta(ge=0)]
"""64 bits without sign; xxh3 of the page's bytes."""
Key = Annotated[str, Meta(min_length=1)]
# A bare $ would let a newline through at the end.
Namespace = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$(?!\n)")]
ScopeName = Annotated[str, Meta(pattern=r"^[0-9]{1,9}:[A-Za-z0-9._-]{1,128}$(?!\n)")]
"""`rank:namespace`."""
Slots = Annotated[int, Meta(ge=1, le=2**40)]


class Token(StrEnum):
    """What a bearer token permits; each includes those before it."""

    NONE = "none"
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class Durability(StrEnum):
    """What an acknowledged change survives."""

    NONE = "none"
    PROCESS = "process"
    """Kill -9 of the server."""
    MACHINE = "machine"
    """Loss of power."""


class SlotState(StrEnum):
    """Every slot is in exactly one of these."""

    FREE = "free"
    LEASED = "leased"
    LIVE = "live"
    QUARANTINED = "quarantined"


class Reserved(StrEnum):
    """What `reserve` says about a key."""

    LEASED = "leased"
    """The caller may write the slot until the lease ends."""
    EXISTS = "exists"
    """The key is live; there is nothing to write."""
    BUSY = "busy"
    """Somebody else, or the same batch further up, holds the key's lease."""
    FULL = "full"
    """No slot is free; more may be after a quarantine."""


class Settled(StrEnum):
    """What `commit`, `abort` and `renew` say about a lease."""

    DONE = "done"
    STALE = "stale"
    """There is no such lease any more; nothing has changed."""


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that a client sends. An unknown field is refused, so that nobody relies on an option that a server lacks."""


class Answer(Struct, frozen=True, kw_only=True):
    """A body that a server sends. Clients ignore fields that they do not know."""


class Problem(Answer, frozen=True, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    code: str
    """Stable, for programs: `malformed`, `invalid`, `unknown_scope`, `mismatch`, `too_large`, `unauthorized`, `forbidden`, `quota`, ..."""
    message: str
    """For people."""
    field: str = ""
    """The field that is to blame, such as `scopes[0].keys[3]`; empty where it is not about one."""


class Limits(Answer, frozen=True, kw_only=True):
    """What a server takes in one request."""

    body_bytes: Positive
    keys: Positive
    """In all scopes of a request together."""
    scopes: Positive
    key_bytes: Positive
    lease_seconds: Seconds
    """Of a reservation that asks for no time of its own, and of every reservation of the compatible part."""
    least_lease_seconds: Seconds
    most_lease_seconds: Seconds
    """Longer wishes are cut to this, shorter ones raised to the least."""
    most_pin_seconds: Seconds
    quarantine_seconds: Annotated[float, Meta(ge=0)]
    idempotency_seconds: Seconds
    """How long an idempotency key is remembered."""


class About(Answer, frozen=True, kw_only=True):
    """`GET /v2`: who answers, and what it promises."""

    protocol: str
    server: str
    """Name and version."""
    instance: str
    """Another one after each start of the server."""
    durability: Durability
    limits: Limits


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
    """`POST /v2/initialize`: make scopes, or see that they are what this client takes them for. All or none."""

    scopes: list[ScopeGeometry]


class Initialized(Answer, frozen=True, kw_only=True):
    """Whether each scope is new."""

    created: list[bool]


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


class Found(Answer, frozen=True, kw_only=True):
    """Pages of one scope; a key that is not live has slot -1 and zeros."""

    slots: list[int]
    generations: list[Natural]
    lengths: list[Natural]
    """Bytes; 0 for a page that a client of the compatible part wrote, which says neither length nor checksum."""
    checksums: list[Checksum]


class LookedUp(Answer, frozen=True, kw_only=True):
    """Answer of `lookup`."""

    scopes: list[Found]
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
    """`POST /v2/touch`: count as use, from the last key of each scope to the first, so that a chain's head ends as the latest."""

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


class Fsck(Request, frozen=True, kw_only=True):
    """`POST /v2/fsck`: check every invariant of some scopes, or of all."""

    scopes: list[ScopeName] = field(default_factory=list[str])


class Checked(Answer, frozen=True, kw_only=True):
    """What is wrong, a sentence for each."""

    slots: Natural
    """That were looked at."""
    problems: list[str]


class Drain(Request, frozen=True, kw_only=True):
    """`POST /v2/drain`: give no new leases, while all else goes on."""

    enabled: bool


class Draining(Answer, frozen=True, kw_only=True):
    """Leases that are still out."""

    enabled: bool
    leases: Natural


class ScopeStatus(Answer, frozen=True, kw_only=True):
    """One scope as `GET /v2/scopes` lists it."""

    scope: str
    slots: Natural
    free: Natural
    leased: Natural
    live: Natural
    quarantined: Natural
    slot_bytes: Natural = 0
    geometry: str = ""
    identity: str = ""
    hits: Natural = 0
    """Keys that clients have asked for and that were live, since the server's start; 0 from a server that does not count."""
    misses: Natural = 0
    evicted: Natural = 0
    """Pages that went to make room."""
    tenant: str = ""
    """Whose token has made it; empty for none."""
    expired_leases: Natural = 0
    """Leases that were neither committed nor given back in time."""


class Scopes(Answer, frozen=True, kw_only=True):
    """Answer of `GET /v2/scopes`."""

    scopes: list[ScopeStatus]


class Inspect(Request, frozen=True, kw_only=True):
    """`POST /v2/inspect`: what is known about some slots or keys."""

    scope: ScopeName
    keys: list[Key] = field(default_factory=list[str])
    slots: list[Natural] = field(default_factory=list[int])


class SlotStatus(Answer, frozen=True, kw_only=True):
    """All that is known about a slot."""

    slot: int
    state: SlotState
    generation: Natural
    key: str = ""
    prefix: str = ""
    length: Natural = 0
    checksum: Checksum = 0
    owner: str = ""
    """Of the lease."""
    seconds_left: float = 0.0
    """Of the lease or the quarantine."""
    pins: Natural = 0


class Inspected(Answer, frozen=True, kw_only=True):
    """The slots asked for in their order, then the live or leased slot of each key, or null."""

    slots: list[SlotStatus | None]


class Export(Request, frozen=True, kw_only=True):
    """`POST /v2/export`: what some slots of a scope hold, for copies and backups, which ask piece by piece."""

    scope: ScopeName
    first: Natural = 0
    count: Positive = 2048
    """Slots; at most as many as a request may have keys."""
    rows: bool = True
    """Without, only the digest is told, which says whether anything has changed."""


class Exported(Answer, frozen=True, kw_only=True):
    """The used slots among those asked for: live pages, and others, which rest or are free."""

    used: Natural
    """Nobody has ever used the slots from here on."""
    epoch: Natural
    """Times that the scope was cleared."""
    next_lease: Positive
    """No lease from here on was given."""
    next_pin: Positive
    digest: str
    """32 hexadecimal digits over slots, generations and pages of this piece."""
    tenant: str = ""
    """Whose scope it is."""
    slots: list[Natural] = field(default_factory=list[int])
    """Of live pages; so are the next columns."""
    generations: list[Natural] = field(default_factory=list[int])
    leases: list[Natural] = field(default_factory=list[int])
    """In the order of use: by which each page was written, or a number that grows with use."""
    lengths: list[Natural] = field(default_factory=list[int])
    checksums: list[Checksum] = field(default_factory=list[int])
    keys: list[str] = field(default_factory=list[str])
    prefixes: list[str] = field(default_factory=list[str])
    other_slots: list[Natural] = field(default_factory=list[int])
    other_generations: list[Natural] = field(default_factory=list[int])
    other_seconds: list[float] = field(default_factory=list[float])
    """How long nobody may be given them: until a quarantine or a pin ends, or as long as any lease may last."""


# The compatible part. Unknown fields are ignored here, as SGLang's server ignores them.
class CompatibleInitialize(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/initialize`."""

    num_pages: Slots
    namespace: Namespace = "kv"


class CompatibleKeys(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/exists`, `/{rank}/get_page_indices` and `/{rank}/delete_keys`."""

    keys: list[Key]
    namespace: Namespace = "kv"


class CompatibleReserve(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/reserve_and_allocate_page_indices`: pairs of a key and the key before it in its chain, which may be ""."""

    keys: list[tuple[Key, str]]
    namespace: Namespace = "kv"


class CompatibleConfirm(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/confirm_write`: pairs of a key and its slot, and slots to give back unwritten."""

    written_keys_to_confirm: list[tuple[Key, Natural]] = field(default_factory=list[tuple[str, int]])
    pages_to_release: list[Natural] = field(default_factory=list[int])
    namespace: Namespace = "kv"


class CompatibleClear(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/clear`."""

    namespace: Namespace = "kv"


@dataclass(frozen=True, slots=True)
class Route:
    """One route of the native part."""

    method: str
    path: str
    request: type[Request] | None
    answer: type[Answer] | None
    """None for 204."""
    token: Token
    changes: bool = False
    """Takes an idempotency key."""


ROUTES: Final = {
    route.path: route
    for route in (
        Route("GET", "/v2", None, About, Token.READ),
        Route("POST", "/v2/initialize", Initialize, Initialized, Token.WRITE, changes=True),
        Route("POST", "/v2/lookup", Lookup, LookedUp, Token.READ),
        Route("POST", "/v2/reserve", Reserve, Leases, Token.WRITE, changes=True),
        Route("POST", "/v2/commit", Commit, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/abort", Abort, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/renew", Renew, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/unpin", Unpin, None, Token.READ),
        Route("POST", "/v2/touch", Touch, Marked, Token.READ),
        Route("POST", "/v2/delete", Delete, Marked, Token.WRITE, changes=True),
        Route("POST", "/v2/clear", Clear, Cleared, Token.WRITE, changes=True),
        Route("GET", "/v2/scopes", None, Scopes, Token.READ),
        Route("POST", "/v2/inspect", Inspect, Inspected, Token.READ),
        Route("POST", "/v2/fsck", Fsck, Checked, Token.ADMIN),
        Route("POST", "/v2/drain", Drain, Draining, Token.ADMIN),
        Route("POST", "/v2/export", Export, Exported, Token.ADMIN),
    )
}

COMPATIBLE_ROUTES: Final[dict[str, tuple[type[Struct], Token]]] = {
    "initialize": (CompatibleInitialize, Token.WRITE),
    "exists": (CompatibleKeys, Token.READ),
    "reserve_and_allocate_page_indices": (CompatibleReserve, Token.WRITE),
    "confirm_write": (CompatibleConfirm, Token.WRITE),
    "get_page_indices": (CompatibleKeys, Token.READ),
    "delete_keys": (CompatibleKeys, Token.WRITE),
    "clear": (CompatibleClear, Token.WRITE),
}

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
"""Their keys count as used from the last to the first, so that pieces of them are asked from the last to the first."""


def merged(shares: Sequence[Struct]) -> Any:
    """What is answered for a scope, made of the answers to pieces of a request: columns one after the other, counts added up."""
    fields = {name: [getattr(share, name) for share in shares] for name in shares[0].__struct_fields__}
    return structs.replace(
        shares[0],
        **{
            name: sum(values) if isinstance(values[0], int) else [entry for column in values for entry in column]
            for name, values in fields.items()
        },
    )


def encode(message: object, content_type: str = JSON) -> bytes:
    """A message as a body.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
    """
    if content_type == JSON:
        return msgspec.json.encode(message)
    if content_type == MSGPACK:
        return msgspec.msgpack.encode(message)
    raise ValueError(f"no message travels as {content_type!r}; {JSON} and {MSGPACK} do")


def decode(body: bytes, kind: type[T], content_type: str = JSON) -> T:
    """A body as a message.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
        msgspec.DecodeError: the body is no JSON or msgpack.
        msgspec.ValidationError: it is, and not this message.
    """
    if content_type == JSON:
        return msgspec.json.decode(body, type=kind)
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=kind)
    raise ValueError(f"no message travels as {content_type!r}; {JSON} and {MSGPACK} do")
