"""Messages of the metadata protocol; docs/metadata-protocol.md describes them.

Lists inside a message are columns: entry i of each is about key (or lease) i of the request, so
that 128 keys cost a few lists and not 128 objects. Bodies are JSON or, by content type, msgpack;
both carry the same messages. Durations are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, field

NO_SLOT: Final = -1
"""Value in a column of slots for a key without a slot."""
MAX_SPARE_SHARE: Final = 2
"""A full scope keeps at most one of this many slots free or in quarantine."""

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Length = Annotated[int, Meta(ge=1, le=2**63 - 1)]
"""Bytes of a page."""
Seconds = Annotated[float, Meta(gt=0)]
# No upper bound here: bounds of msgspec are signed 64-bit integers. `core.limits` checks it.
Checksum = Annotated[int, Meta(ge=0)]
"""Unsigned 64 bits; xxh3 of the page's bytes."""
# Only the minimum: the limit of bytes is the server's own, and is not one of characters.
Key = Annotated[str, Meta(min_length=1)]
# A bare $ also matches before a newline at the end, and names are part of log lines.
Namespace = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$(?!\n)")]
ScopeName = Annotated[str, Meta(pattern=r"^[0-9]{1,9}:[A-Za-z0-9._-]{1,128}$(?!\n)")]
"""`rank:namespace`."""
ModelName = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]{1,512}$(?!\n)"
    ),
]
"""One line without control characters, and without those of Unicode that are invisible or turn text
around: logs, terminals and labels of metrics show it."""
# The bound keeps slot numbers and byte offsets far below 2**63.
Slots = Annotated[int, Meta(ge=1, le=2**40)]
T = TypeVar("T")

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"


class Token(StrEnum):
    """Rights of a bearer token; each includes those before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class StoreDurability(StrEnum):
    """Events that an acknowledged change survives."""

    NONE = "none"
    PROCESS = "process"
    """`kill -9` of the server."""
    MACHINE = "machine"
    """Loss of power, too."""


class SlotState(StrEnum):
    """State of a slot."""

    FREE = "free"
    LEASED = "leased"
    LIVE = "live"
    QUARANTINED = "quarantined"


class Reserved(StrEnum):
    """Result of `reserve` for a key."""

    LEASED = "leased"
    """The caller may write the slot until the lease ends."""
    EXISTS = "exists"
    """The key is live; there is nothing to write."""
    BUSY = "busy"
    """Another client, or an earlier entry of the same batch, holds the key's lease."""
    FULL = "full"
    """No slot is free; a quarantine may end soon."""


class RemovedBecause(StrEnum):
    """Reason of the removal of a live page."""

    EVICTED = "evicted"
    DELETED = "deleted"
    CLEARED = "cleared"
    DAMAGED = "damaged"
    """Deleted by its generation, as a client deletes a page that it has found damaged."""


class Settled(StrEnum):
    """Result of `commit`, `abort` and `renew` for a lease."""

    DONE = "done"
    STALE = "stale"
    """The lease is not held any more; nothing has changed."""


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a request."""

    # Unknown fields are refused, so that no client relies on an option that the server lacks.


class Answer(Struct, frozen=True, kw_only=True):
    """Body of a response."""

    # Unknown fields are ignored: a newer server may send more.


def encode(message: object, content_type: str = JSON) -> bytes:
    """Encode a message.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
    """
    if content_type == JSON:
        return msgspec.json.encode(message)
    if content_type == MSGPACK:
        return msgspec.msgpack.encode(message)
    raise ValueError(f"unknown content type {content_type!r}; use {JSON} or {MSGPACK}")


def decode(body: bytes, kind: type[T], content_type: str = JSON) -> T:
    """Decode a message.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
        msgspec.DecodeError: the body is not JSON, or not msgpack.
        msgspec.ValidationError: the body is another message.
    """
    if content_type == JSON:
        return msgspec.json.decode(body, type=kind)
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=kind)
    # Never guessed: some bodies are valid in both, with different contents.
    raise ValueError(f"unknown content type {content_type!r}; use {JSON} or {MSGPACK}")


# Scopes, lookups, leases, commits, deletes: for engines.


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
    """Name of the client, for operators; `inspect` shows it, and `removals` for evicted pages."""
    lease_seconds: Seconds | None = None


class Leased(Answer, frozen=True, kw_only=True):
    """Response of `reserve` for one scope; -1 and zeros for keys without slot or lease."""

    states: list[Reserved]
    slots: list[int]
    generations: list[Natural]
    leases: list[Natural]
    """Numbers of leases, which are never reused, not even after a restart."""
    evicted: Natural = 0
    """Pages evicted for these leases."""


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
    lengths: list[Length]
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
    owner: str = ""
    """Name of the client; `removals` shows it."""


class Flags(Answer, frozen=True, kw_only=True):
    """Response of `touch` and `delete` for one scope."""

    done: list[bool]


class Marked(Answer, frozen=True, kw_only=True):
    """Response of `touch` and `delete`: True for each key that was live."""

    scopes: list[Flags]


class Clear(Request, frozen=True, kw_only=True):
    """`POST /v2/clear`: empty scopes, leases included."""

    scopes: list[ScopeName]
    owner: str = ""
    """Name of the client; `removals` shows it."""


class Cleared(Answer, frozen=True, kw_only=True):
    """Response of `clear`: number of deleted pages of each scope."""

    pages: list[Natural]


class RemovalCursor(Request, frozen=True, kw_only=True):
    """A scope, and what of its removals is known."""

    scope: ScopeName
    # Opaque, so that servers may count as they like.
    cursor: Annotated[str, Meta(max_length=128)] | None = None
    """Of the last answer; null to begin with the next removal. An unknown one, such as "", is
    lost, and begins with the oldest removal that is kept."""


class CollectRemovals(Request, frozen=True, kw_only=True):
    """`POST /v2/removals`: list the pages that were removed."""

    scopes: list[RemovalCursor]


class RemovedPages(Answer, frozen=True, kw_only=True):
    """Removals of one scope, in their order."""

    keys: list[str]
    reasons: list[RemovedBecause]
    times: list[float]
    """Seconds since 1970."""
    by: list[str]
    """Owner in the request that has removed the page, or needed its slot; may be empty."""
    cursor: str
    """For the next request."""
    lost: bool = False
    """Removals may be missing before these: the server was restarted, the scope has another owner
    or was made anew, or more were removed than are kept."""
    more: bool = False
    """Further removals are known; the limit of keys has left them out."""


class CollectedRemovals(Answer, frozen=True, kw_only=True):
    """Response of `removals`."""

    scopes: list[RemovedPages]


COLUMNS: Final[dict[type[Struct], tuple[str, ...]]] = {
    Lookup: ("keys",),
    Touch: ("keys",),
    Reserve: ("keys", "prefixes"),
    Commit: ("leases", "lengths", "checksums"),
    Abort: ("leases",),
    Renew: ("leases",),
    Delete: ("keys", "generations"),
}
"""Columns of the scopes in requests; the first has one value for each entry."""

# Limits, errors, status, checks, drains, exports: about the server and for operators.

PROTOCOL: Final = "2"


class Fsck(Request, frozen=True, kw_only=True):
    """`POST /v2/fsck`: check every invariant of some scopes, or of all."""

    scopes: list[ScopeName] = field(default_factory=list[str])


class FsckReport(Answer, frozen=True, kw_only=True):
    """Response of `fsck`: violated invariants, one sentence each."""

    slots: Natural
    """Number of checked slots."""
    problems: list[str]


class Drain(Request, frozen=True, kw_only=True):
    """`POST /v2/drain`: give no new leases; all other requests are served."""

    enabled: bool


class Draining(Answer, frozen=True, kw_only=True):
    """Response of `drain`."""

    enabled: bool
    leases: Natural
    """Leases that are still held."""


class ScopeStatus(Answer, frozen=True, kw_only=True):
    """One scope in the response of `GET /v2/scopes`."""

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
    """Requested keys that were live, since the server's start."""
    misses: Natural = 0
    evicted: Natural = 0
    """Pages evicted since the server's start."""
    tenant: str = ""
    """Tenant of the token that created it; empty for none."""
    expired_leases: Natural = 0
    """Leases that were neither committed nor given back in time."""
    model: str = ""
    """Name given by `describe`; empty for none."""
    owner: str = ""
    """Address of the server that owns it; empty for none, and where servers share no store."""
    log_bytes: Natural = 0
    """Length of its log, which a takeover replays; 0 where servers share no store."""
    closed_seconds: float = 0.0
    """Seconds for which no slot is given, because writers may hold leases that the server does not
    know; 0 if slots are given."""


class ServerState(StrEnum):
    """State of one of several servers on one store."""

    SERVING = "serving"
    DRAINING = "draining"
    SILENT = "silent"
    """No heartbeat for its lease: others take its scopes."""


class ServerStatus(Answer, frozen=True, kw_only=True):
    """One server in the response of `GET /v2/scopes`, where several share a store."""

    url: str
    state: ServerState
    scopes: Natural
    """Number of listed scopes that it owns."""
    log_bytes: Natural
    """Length of their logs."""


class Scopes(Answer, frozen=True, kw_only=True):
    """Response of `GET /v2/scopes`."""

    scopes: list[ScopeStatus]
    servers: list[ServerStatus] = field(default_factory=list[ServerStatus])
    """Servers of this store; empty where servers share no store."""


class Drop(Request, frozen=True, kw_only=True):
    """`POST /v2/drop`: remove scopes all of whose slots are free, all or none."""

    scopes: list[ScopeName]


class Dropped(Answer, frozen=True, kw_only=True):
    """Response of `drop`: slots of each removed scope."""

    slots: list[Natural]


class Inspect(Request, frozen=True, kw_only=True):
    """`POST /v2/inspect`: get the state of slots, and of the slots of keys."""

    scope: ScopeName
    keys: list[Key] = field(default_factory=list[str])
    slots: list[Natural] = field(default_factory=list[int])


class SlotStatus(Answer, frozen=True, kw_only=True):
    """State of a slot."""

    slot: int
    state: SlotState
    generation: Natural
    key: str = ""
    prefix: str = ""
    length: Natural = 0
    checksum: Checksum = 0
    owner: str = ""
    """Owner of the lease."""
    seconds_left: float = 0.0
    """Seconds until the lease or the quarantine ends."""


class Inspected(Answer, frozen=True, kw_only=True):
    """Requested slots in their order, then the live or leased slot of each key, or null."""

    slots: list[SlotStatus | None]


class Problem(Answer, frozen=True, kw_only=True):
    """Body of every response with a status of 400 or more."""

    code: str
    """Stable code for programs: `malformed`, `invalid`, `unknown_scope`, `mismatch`, `too_large`,
    `unauthorized`, `forbidden`, `quota`, ..."""
    message: str
    """Text for people."""
    field: str = ""
    """Field with the error, such as `scopes[0].keys[3]`; empty if it is not about a field."""


class Limits(Answer, frozen=True, kw_only=True):
    """Limits of one request, and times of the server."""

    body_bytes: Positive
    keys: Positive
    """Keys in all scopes of a request together."""
    scopes: Positive
    key_bytes: Positive
    lease_seconds: Seconds
    """Length of a lease without a wanted length, and of every lease by SGLang's protocol."""
    # The names on the wire are older than the attributes.
    min_lease_seconds: Seconds = field(name="least_lease_seconds")
    max_lease_seconds: Seconds = field(name="most_lease_seconds")
    """Longer wanted times are reduced to this, shorter ones raised to the minimum."""
    quarantine_seconds: Annotated[float, Meta(ge=0)]
    idempotency_seconds: Seconds
    """Seconds for which an idempotency key is remembered."""

    def sustained(self, size: float) -> float:
        """Pages or bytes a second that a full scope of `size` can store for long."""
        quarantine = self.quarantine_seconds
        return size / MAX_SPARE_SHARE / quarantine if quarantine else math.inf


class About(Answer, frozen=True, kw_only=True):
    """Response of `GET /v2`: identity, durability and limits of the server."""

    protocol: str
    server: str
    """Name and version."""
    # A client that sees another instance knows that the server was restarted.
    instance: str
    """Random text that changes with each start of the server."""
    durability: StoreDurability
    limits: Limits


# `GET /v2/history`: time series of a server and its slowest calls. Optional.

HISTORY: Final = "/v2/history"


# Columns of numbers: an hour of samples as objects would be several times as long.
class Series(Answer, frozen=True, kw_only=True):
    """Samples as columns, oldest first. Counts are of the sample's own span."""

    step_seconds: float
    """Approximate seconds between samples."""
    times: list[float]
    """End of each sample, in seconds since 1970."""
    spans: list[float]
    """Seconds of each sample; longer than the step if the server was delayed."""
    requests: list[Natural]
    """Answered requests."""
    refused: list[Natural]
    """Of these, with a status of 400 to 499."""
    failed: list[Natural]
    """Of these, with a status of 500 or more."""
    median_seconds: list[float | None]
    """Time from the last byte of a request to its response, estimated from the buckets of
    `/metrics`; null without requests."""
    p99_seconds: list[float | None]
    hits: list[Natural]
    """Requested keys that were live, in all scopes."""
    misses: list[Natural]
    evicted: list[Natural]
    """Evicted pages."""
    live: list[Natural]
    """Slots of all scopes, at the end of the sample."""
    leased: list[Natural]
    quarantined: list[Natural]
    free: list[Natural]


class SlowCall(Answer, frozen=True, kw_only=True):
    """One of the slowest calls."""

    time: float
    """Time of the response, in seconds since 1970."""
    route: str
    """Route as in `/metrics`."""
    status: int
    seconds: float
    entries: Natural
    """Keys, leases or slots in the request, in all scopes."""
    scopes: Natural
    """Scopes in the request."""
    scope: str = ""
    """The first scope; empty for calls of SGLang's protocol."""
    request_id: str = ""
    """The client's `X-Request-Id`; empty if it sent none."""


class History(Answer, frozen=True, kw_only=True):
    """Response of `GET /v2/history`."""

    instance: str
    """Instance as in `About`; the history begins with its start."""
    started: float
    """Start of the instance, in seconds since 1970."""
    now: float
    seconds: Series
    minutes: Series
    slowest: list[SlowCall]
    """Slowest first."""
    slowest_seconds: float
    """Period of the slowest calls, in seconds."""


# Routes.

IDEMPOTENCY_HEADER: Final = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class Route:
    """One route."""

    method: str
    path: str
    request: type[Struct] | None
    answer: type[Answer] | None
    """None for a response 204, and for SGLang's protocol."""
    token: Token
    changes: bool = False
    """True if the route takes an idempotency key."""


# Lookups and touches take no key: doing them twice does no harm. Neither do describe, drop
# and drain, which end in the same state.
ROUTES: Final = {
    route.path: route
    for route in (
        Route("GET", "/v2", None, About, Token.READ),
        Route("POST", "/v2/initialize", Initialize, Initialized, Token.WRITE, changes=True),
        Route("POST", "/v2/describe", Describe, None, Token.WRITE),
        Route("POST", "/v2/lookup", Lookup, LookedUp, Token.READ),
        Route("POST", "/v2/reserve", Reserve, Leases, Token.WRITE, changes=True),
        Route("POST", "/v2/commit", Commit, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/abort", Abort, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/renew", Renew, SettledLeases, Token.WRITE, changes=True),
        Route("POST", "/v2/touch", Touch, Marked, Token.READ),
        Route("POST", "/v2/delete", Delete, Marked, Token.WRITE, changes=True),
        Route("POST", "/v2/clear", Clear, Cleared, Token.WRITE, changes=True),
        Route("POST", "/v2/removals", CollectRemovals, CollectedRemovals, Token.READ),
        Route("POST", "/v2/drop", Drop, Dropped, Token.WRITE),
        Route("GET", "/v2/scopes", None, Scopes, Token.READ),
        Route("POST", "/v2/inspect", Inspect, Inspected, Token.READ),
        Route("POST", "/v2/fsck", Fsck, FsckReport, Token.ADMIN),
        Route("POST", "/v2/drain", Drain, Draining, Token.ADMIN),
    )
}
HISTORY_ROUTE: Final = Route("GET", HISTORY, None, History, Token.READ)
"""Not every server has it."""


# SGLang's protocol. Unknown fields are ignored, as by SGLang's own server.


# Plain structs, not `Request`: unknown fields of SGLang's clients must not be refused.
class SglangInitialize(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/initialize`."""

    num_pages: Slots
    namespace: Namespace = "kv"


class SglangKeys(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/exists`, `/{rank}/get_page_indices` and `/{rank}/delete_keys`."""

    keys: list[Key]
    namespace: Namespace = "kv"


class SglangReserve(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/reserve_and_allocate_page_indices`: pairs of a key and its prefix.

    The prefix is the key before it in its chain, "" at the head.
    """

    keys: list[tuple[Key, str]]
    namespace: Namespace = "kv"


class SglangConfirm(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/confirm_write`: pairs of a key and its slot, and slots to give back."""

    # Keys and slots: this protocol has no leases that a confirm could name.
    written_keys_to_confirm: list[tuple[Key, Natural]] = field(
        default_factory=list[tuple[str, int]]
    )
    pages_to_release: list[Natural] = field(default_factory=list[int])
    namespace: Namespace = "kv"


class SglangClear(Struct, frozen=True, kw_only=True):
    """`POST /{rank}/clear`."""

    namespace: Namespace = "kv"


# Reads need a token of the right READ only, though `exists` marks pages as used.
SGLANG_ROUTES: Final = {
    operation: Route("POST", f"/{{rank}}/{operation}", request, None, token)
    for operation, request, token in (
        ("initialize", SglangInitialize, Token.WRITE),
        ("exists", SglangKeys, Token.READ),
        ("reserve_and_allocate_page_indices", SglangReserve, Token.WRITE),
        ("confirm_write", SglangConfirm, Token.WRITE),
        ("get_page_indices", SglangKeys, Token.READ),
        ("delete_keys", SglangKeys, Token.WRITE),
        ("clear", SglangClear, Token.WRITE),
    )
}
"""By operation; paths contain a rank."""
