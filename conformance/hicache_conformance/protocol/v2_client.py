"""Client of the native part: typed calls, and one scope with the calls that cases make most."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import expect
from hicache_metadata_server.protocol import (
    IDEMPOTENCY_HEADER,
    JSON,
    ROUTES,
    Abort,
    Answer,
    Clear,
    Cleared,
    Commit,
    CommitScope,
    Delete,
    DeleteScope,
    FoundPages,
    Initialize,
    Initialized,
    Inspect,
    Inspected,
    Leased,
    Leases,
    LeaseScope,
    LookedUp,
    Lookup,
    LookupScope,
    Marked,
    Renew,
    Request,
    Reserve,
    Reserved,
    ReserveScope,
    ScopeGeometry,
    Scopes,
    ScopeStatus,
    Settled,
    SettledLeases,
    SlotStatus,
    decode,
    encode,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from hicache_conformance.protocol.http_client import HttpClient, Reply

RULE = "MD-API-1"
MOVING_SECONDS: Final = 0.2
"""Interval in which a request for scopes without an owner is sent again."""
A = TypeVar("A", bound=Answer)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class V2Client:
    """Typed calls, by one client."""

    http: HttpClient
    content_type: str = JSON

    def send(self, path: str, request: Request | None = None, *, once: str = "") -> Reply:
        """Send a request of a route; `once` is its idempotency key.

        A request is sent again while one of several servers answers that its scopes have no owner
        at the moment, for as long as an answer may take.
        """
        method = ROUTES[path].method
        body = None if request is None else encode(request, self.content_type)
        headers = {IDEMPOTENCY_HEADER: once} if once else {}
        until = time.monotonic() + self.http.answer_seconds
        while True:
            reply = self.http.send(
                method, path, body, content_type=self.content_type, headers=headers
            )
            # Refused before it has changed anything.
            moving = reply.status == 503 and b"moving" in reply.body
            if not moving or time.monotonic() >= until:
                return reply
            time.sleep(MOVING_SECONDS)

    def call(self, path: str, request: Request | None, kind: type[A], *, once: str = "") -> A:
        """Send a request and take its answer.

        Raises:
            Violation: it is not of the documented type.
        """
        return self.understood(expect(self.send(path, request, once=once), RULE, 200), kind)

    def understood(self, reply: Reply, kind: type[A]) -> A:
        """The message in a reply.

        Raises:
            Violation: there is none, or another content type than was asked in.
        """
        # Before decoding: a msgpack body may decode as something by chance.
        if reply.content_type != self.content_type:
            raise Violation(
                RULE,
                f"{reply.asked} was asked as {self.content_type} and is answered as "
                f"{reply.content_type!r}",
            )
        try:
            return decode(reply.body, kind, self.content_type)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise Violation(RULE, f"{reply} is no {kind.__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Written:
    """A page as it was committed."""

    key: str
    slot: int
    generation: int
    lease: int
    length: int
    checksum: int


class V2Scope:
    """One scope."""

    def __init__(
        self, client: V2Client, name: str, slots: int, slot_bytes: int, chance: random.Random
    ) -> None:
        self.client = client
        self.name = name
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._chance = chance

    @property
    def geometry(self) -> ScopeGeometry:
        """Parameters of its initialization."""
        return ScopeGeometry(
            scope=self.name,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            # Opaque to the server. It compares them and reads nothing out of them (MD-GEO-1).
            geometry="page_first",
            identity="cf-identity",
        )

    def initialize(self, earlier_lease_seconds: float = 0.0) -> bool:
        """Make the scope; returns whether it is new."""
        earlier = [earlier_lease_seconds] if earlier_lease_seconds else []
        request = Initialize(scopes=[self.geometry], earlier_lease_seconds=earlier)
        created = self.client.call("/v2/initialize", request, Initialized).created
        if len(created) != 1:
            raise Violation(RULE, f"initialize of one scope answers {len(created)} flags")
        return created[0]

    def lookup(self, keys: Sequence[str], *, touch: bool = True) -> FoundPages:
        """Look keys up; their slots."""
        return self.pinned_lookup(keys, 0.0, touch=touch)[0]

    def pinned_lookup(
        self, keys: Sequence[str], seconds: float, *, touch: bool = True
    ) -> tuple[FoundPages, int]:
        """Look keys up and pin their slots; the slots, and the pin."""
        request = Lookup(
            scopes=[LookupScope(scope=self.name, keys=list(keys))], pin_seconds=seconds, touch=touch
        )
        answer = self.client.call("/v2/lookup", request, LookedUp)
        found = self._only(answer.scopes, "lookup")
        self._columns(
            "lookup", len(keys), found.slots, found.generations, found.lengths, found.checksums
        )
        return found, answer.pin

    def live(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys are live, without counting as use."""
        # A lookup that counts as use would change the order of eviction that the case is about.
        return [slot >= 0 for slot in self.lookup(keys, touch=False).slots]

    def reserve(
        self,
        keys: Sequence[str],
        prefixes: Sequence[str] = (),
        *,
        lease_seconds: float | None = None,
        once: str = "",
    ) -> Leased:
        """Ask for leases."""
        part = ReserveScope(scope=self.name, keys=list(keys), prefixes=list(prefixes))
        request = Reserve(scopes=[part], owner="conformance", lease_seconds=lease_seconds)
        leased = self._only(
            self.client.call("/v2/reserve", request, Leases, once=once).scopes, "reserve"
        )
        self._columns(
            "reserve", len(keys), leased.states, leased.slots, leased.generations, leased.leases
        )
        return leased

    def commit(
        self, leases: Sequence[int], lengths: Sequence[int] = (), checksums: Sequence[int] = ()
    ) -> list[bool]:
        """Make pages live; says for which leases it did."""
        # The whole slot and checksum 1, where the case is not about them.
        sizes, sums = (
            list(lengths) or [self.slot_bytes] * len(leases),
            list(checksums) or [1] * len(leases),
        )
        part = CommitScope(scope=self.name, leases=list(leases), lengths=sizes, checksums=sums)
        return self._settled("commit", Commit(scopes=[part]), len(leases))

    def abort(self, leases: Sequence[int]) -> list[bool]:
        """Give leases back; says which were there."""
        return self._settled(
            "abort", Abort(scopes=[LeaseScope(scope=self.name, leases=list(leases))]), len(leases)
        )

    def renew(self, leases: Sequence[int], seconds: float) -> list[bool]:
        """Let leases last; says which were there."""
        part = LeaseScope(scope=self.name, leases=list(leases))
        return self._settled("renew", Renew(scopes=[part], lease_seconds=seconds), len(leases))

    def delete(self, keys: Sequence[str], generations: Sequence[int] = ()) -> list[bool]:
        """Make keys go; says which were there."""
        part = DeleteScope(scope=self.name, keys=list(keys), generations=list(generations))
        done = self._only(
            self.client.call("/v2/delete", Delete(scopes=[part]), Marked).scopes, "delete"
        ).done
        self._columns("delete", len(keys), done)
        return done

    def clear(self) -> int:
        """Make everything go; says how many pages."""
        return self._only(
            self.client.call("/v2/clear", Clear(scopes=[self.name]), Cleared).pages, "clear"
        )

    def status(self) -> ScopeStatus:
        """As the list of scopes has it.

        Raises:
            Violation: it is not in the list.
        """
        found = [
            scope
            for scope in self.client.call("/v2/scopes", None, Scopes).scopes
            if scope.scope == self.name
        ]
        if len(found) != 1:
            raise Violation(
                "MD-OPS-1", f"GET /v2/scopes lists scope {self.name} {len(found)} times"
            )
        return found[0]

    def inspect(
        self, keys: Sequence[str] = (), slots: Sequence[int] = ()
    ) -> list[SlotStatus | None]:
        """Inspect slots, then keys."""
        request = Inspect(scope=self.name, keys=list(keys), slots=list(slots))
        answer = self.client.call("/v2/inspect", request, Inspected).slots
        self._columns("inspect", len(keys) + len(slots), answer)
        return answer

    def store(
        self, keys: Sequence[str], prefixes: Sequence[str] = (), rule: str = "MD-LEASE-1"
    ) -> list[Written]:
        """Lease and commit keys for which there is room, with lengths and checksums of their own.

        Raises:
            Violation: one got no lease, or its commit was refused.
        """
        leased = self.reserve(keys, prefixes)
        if any(state is not Reserved.LEASED for state in leased.states):
            raise Violation(
                rule,
                f"new keys get {list(map(str, leased.states))} from a scope that has room for them",
            )
        pages = [
            Written(
                key,
                slot,
                generation,
                lease,
                self._chance.randint(1, self.slot_bytes),
                # All 64 bits: a server that keeps checksums as signed integers or doubles loses the
                # upper ones.
                self._chance.getrandbits(64),
            )
            for key, slot, generation, lease in zip(
                keys, leased.slots, leased.generations, leased.leases, strict=True
            )
        ]
        done = self.commit(
            leased.leases, [page.length for page in pages], [page.checksum for page in pages]
        )
        if not all(done):
            raise Violation(
                rule,
                f"commit of leases that were just given answers stale for {done.count(False)} of "
                f"{len(done)}",
            )
        return pages

    def _settled(self, operation: str, request: Request, length: int) -> list[bool]:
        states = self._only(
            self.client.call(f"/v2/{operation}", request, SettledLeases).scopes, operation
        ).states
        self._columns(operation, length, states)
        return [state is Settled.DONE for state in states]

    def _only(self, parts: list[T], operation: str) -> T:
        if len(parts) != 1:
            raise Violation(RULE, f"{operation} of one scope answers {len(parts)} of them")
        return parts[0]

    def _columns(self, operation: str, length: int, *columns: Sequence[object]) -> None:
        # Checked in every answer and not in a case of its own, since clients take columns apart
        # without looking (MD-API-1).
        lengths = [len(column) for column in columns]
        if any(found != length for found in lengths):
            raise Violation(RULE, f"{operation} of {length} answers columns of {lengths}")
