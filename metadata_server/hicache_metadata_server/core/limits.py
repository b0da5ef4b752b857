"""Limits: of the size of requests, beyond the ranges of their fields, and of tenants: access, quotas."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from msgspec import Struct, field, structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import invalid, too_large
from hicache_metadata_server.protocol import Limits, Natural, ScopeGeometry, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A request is done at once, and nothing else meanwhile: these limits are some 20 ms of work.
DEFAULTS: Final = Limits(
    body_bytes=512 << 10,
    keys=4096,
    scopes=64,
    key_bytes=1024,
    lease_seconds=30,
    min_lease_seconds=0.2,
    max_lease_seconds=600,
    quarantine_seconds=5,
    idempotency_seconds=60,
)
MAX_INTEGER: Final = 2**63
"""Exclusive bound of the integers that SQLite stores."""
MAX_CHECKSUM: Final = 2**64 - 1
OPTIONAL: Final = ("prefixes", "generations")
"""Columns that may be empty."""
OWNER_BYTES: Final = 1024
TEXT_BYTES: Final = 4096
"""Length of a geometry or an identity."""
LONG_BODY: Final = 32 << 10
"""Bytes of a body, of some 256 keys with prefixes; a longer one has a turn of the event loop of its
own."""

NAME: Final = "[A-Za-z0-9._-]{1,64}"
"""Regular expression of tenant names."""
Columns = p.Lookup | p.Touch | p.Reserve | p.Commit | p.Abort | p.Renew | p.Delete
"""Requests whose scopes have columns of entries."""


class Measure:
    """Counts the entries of one request, and checks them against the limits.

    All methods raise `RequestError` if a limit is exceeded.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seen = 0

    def scopes(self, parts: Sequence[object]) -> None:
        """Check the number of scopes."""
        if len(parts) > self._limits.scopes:
            raise too_large(f"{len(parts)} scopes; {self._limits.scopes} is the limit", "scopes")

    def entries(self, entries: Sequence[object], field: str) -> None:
        """Check the number of keys, leases or slots; all of a request count together."""
        self._seen += len(entries)
        if self._seen > self._limits.keys:
            raise too_large(f"more than {self._limits.keys} entries", field)

    def keys(self, keys: Sequence[str], field: str) -> None:
        """Check the number and the lengths of keys."""
        self.entries(keys, field)
        self.lengths(keys, field)

    def lengths(self, keys: Sequence[str], field: str) -> None:
        """Check the lengths of keys in bytes."""
        # A character takes four bytes at most, and keys are short: the longest one in characters
        # decides for nearly every batch, without encoding any key.
        if 4 * max(map(len, keys), default=0) > self._limits.key_bytes:
            for i, key in enumerate(keys):
                if len(key.encode()) > self._limits.key_bytes:
                    raise invalid(
                        f"a key of more than {self._limits.key_bytes} bytes", f"{field}[{i}]"
                    )

    def owner(self, name: str) -> None:
        """Check the length of a client's name in bytes."""
        if len(name.encode()) > OWNER_BYTES:
            raise invalid(f"a name of more than {OWNER_BYTES} bytes", "owner")

    def geometry(self, part: ScopeGeometry, where: str) -> None:
        """Check the fields of a scope to be made."""
        if part.slot_bytes >= MAX_INTEGER:
            raise invalid("a slot has fewer than 2**63 bytes", f"{where}.slot_bytes")
        for name in ("geometry", "identity"):
            if len(getattr(part, name).encode()) > TEXT_BYTES:
                raise invalid(f"a text of more than {TEXT_BYTES} bytes", f"{where}.{name}")


def check_limits(request: Columns, limits: Limits) -> None:
    """Check that a request is within the limits, and that its columns have equal lengths.

    Raises:
        RequestError: it exceeds one.
    """
    measure = Measure(limits)
    measure.scopes(request.scopes)
    if isinstance(request, p.Reserve | p.Delete):
        measure.owner(request.owner)
    first, *others = p.COLUMNS[type(request)]
    for i, part in enumerate(request.scopes):
        rows: Sequence[Any] = getattr(part, first)
        if first == "keys":
            measure.keys(rows, f"scopes[{i}].keys")
        else:
            measure.entries(rows, f"scopes[{i}].{first}")
        for name in others:
            column: Sequence[Any] = getattr(part, name)
            if not column and name in OPTIONAL:
                continue
            field = f"scopes[{i}].{name}"
            if len(column) != len(rows):
                raise invalid(f"{len(column)} entries for {len(rows)}", field)
            if name == "prefixes":
                measure.lengths(column, field)
            elif name == "checksums" and max(column, default=0) > MAX_CHECKSUM:
                where = next(j for j, value in enumerate(column) if value > MAX_CHECKSUM)
                raise invalid(f"{column[where]} is out of range", f"{field}[{where}]")


def check_slots(request: p.SglangConfirm, slots: int) -> None:
    """Check that a confirm names only slots of its scope.

    Raises:
        RequestError: one is outside the scope.
    """
    confirmed = list(map(itemgetter(1), request.written_keys_to_confirm))
    released = request.pages_to_release
    for name, column in (("written_keys_to_confirm", confirmed), ("pages_to_release", released)):
        if max(column, default=0) >= slots:
            where = next(i for i, slot in enumerate(column) if slot >= slots)
            raise invalid(f"there are {slots} pages", f"{name}[{where}]")


def check_earlier_leases(request: p.Initialize) -> dict[str, float]:
    """Seconds that leases of an earlier server may last, by scope.

    Of a scope that is named twice, the longer time counts.

    Raises:
        RequestError: the column is not as long as that of the scopes.
    """
    found = dict[str, float]()
    if request.earlier_lease_seconds and len(request.earlier_lease_seconds) != len(request.scopes):
        message = f"{len(request.earlier_lease_seconds)} entries for {len(request.scopes)}"
        raise invalid(message, "earlier_lease_seconds")
    for part, seconds in zip(request.scopes, request.earlier_lease_seconds, strict=False):
        found[part.scope] = max(seconds, found.get(part.scope, 0.0))
    return found


def lease_seconds(limits: Limits, wanted: float | None) -> float:
    """Seconds of a lease: the wanted time within the limits, or the default."""
    return min(
        max(wanted or limits.lease_seconds, limits.min_lease_seconds), limits.max_lease_seconds
    )


def check_lengths(request: p.Commit, slot_bytes: Sequence[int]) -> None:
    """Check that pages fit into the slots of their scopes (0: size not known).

    Raises:
        RequestError: a page is longer than its slot.
    """
    for i, (part, max_length) in enumerate(zip(request.scopes, slot_bytes, strict=True)):
        if 0 < max_length < max(part.lengths, default=0):
            where = next(j for j, length in enumerate(part.lengths) if length > max_length)
            raise invalid(
                f"{part.lengths[where]} bytes in slots of {max_length}",
                f"scopes[{i}].lengths[{where}]",
            )


class RequestSize(NamedTuple):
    """Size of a request."""

    entries: int = 0
    """Keys, leases and slots, in all scopes."""
    scopes: int = 0
    scope: str = ""
    """The first scope; empty for requests of SGLang's protocol."""


def request_size(request: object) -> RequestSize:
    """Count entries and scopes of a request; all are zero for None."""
    if not isinstance(request, Struct):
        return RequestSize()
    parts: list[Any] | None = getattr(request, "scopes", None)
    if parts is None:
        columns = [
            cast("list[object]", value)
            for value in structs.astuple(request)
            if isinstance(value, list)
        ]
        scope: str = getattr(request, "scope", "")
        return RequestSize(sum(map(len, columns)), 1 if scope else 0, scope)
    # All columns of a part have the same length, so that the first one is enough.
    first = p.COLUMNS.get(type(request), ("",))[0]
    entries = sum(len(getattr(part, first)) for part in parts) if first else 0
    names = [part if isinstance(part, str) else part.scope for part in parts]
    return RequestSize(entries, len(names), names[0] if names else "")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as its token identifies it."""

    token: str = ""
    """Id of the token; empty on a server without tokens."""
    right: Token = Token.ADMIN
    tenant: str = ""
    """Empty for none."""
    sees_all: bool = False
    """True for an admin without tenant, who may use scopes of every tenant."""


ANYBODY: Final = Caller(sees_all=True)
"""The caller on a server without tokens."""


def may_use(caller: Caller, tenant: str) -> bool:
    """True if a caller may use the scopes of a tenant, "" for scopes without one.

    The only access rule, for every kind of store.
    """
    return caller.sees_all or caller.tenant == tenant


class TenantUsage(NamedTuple):
    """Sums over all scopes of a tenant."""

    scopes: int = 0
    slots: int = 0
    bytes: int = 0
    """Slots times slot bytes."""

    @classmethod
    def of(cls, geometries: Iterable[ScopeGeometry]) -> TenantUsage:
        """Sum over scopes."""
        found = list(geometries)
        return cls(
            len(found),
            sum(one.slots for one in found),
            sum(one.slots * one.slot_bytes for one in found),
        )


class Quota(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one tenant, as its file names them; None for no limit."""

    scopes: Natural | None = field(default=None, name="max_scopes")
    slots: Natural | None = field(default=None, name="max_slots")
    bytes: Natural | None = field(default=None, name="max_bytes")
    """Slots times slot bytes, in all of its scopes."""

    def beyond(self, held: TenantUsage, new: Sequence[ScopeGeometry]) -> str:
        """Explain why new scopes would exceed this quota; "" if they would not.

        A quota of bytes refuses a scope without `slot_bytes`, which would count as empty whatever
        is written into it.
        """
        if self.bytes is not None and any(not one.slot_bytes for one in new):
            return "its bytes are limited, so that each of its scopes has to say its slot_bytes"
        wanted = TenantUsage.of(new)
        for name, most in (("scopes", self.scopes), ("slots", self.slots), ("bytes", self.bytes)):
            has, more = getattr(held, name), getattr(wanted, name)
            if most is not None and has + more > most:
                return f"it has {has:,} of {most:,} {name}, and this would be {more:,} more"
        return ""


NO_QUOTA: Final = Quota()


class Quotas(Struct, frozen=True):
    """Quotas of all tenants."""

    by_tenant: dict[str, Quota] = field(default_factory=dict[str, Quota])
    default: Quota = NO_QUOTA
    """Quota of a tenant that is not named. Callers without tenant have no quota."""

    def of(self, tenant: str) -> Quota:
        """Quota of one tenant."""
        return self.by_tenant.get(tenant, self.default) if tenant else NO_QUOTA
