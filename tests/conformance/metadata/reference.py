"""Operations of a right metadata server: `docs/metadata-protocol.md` as a program."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.reference_state import Scope

LIMITS = p.Limits(
    body_bytes=4_000_000,
    keys=20_000,
    scopes=16,
    key_bytes=1024,
    lease_seconds=3,
    min_lease_seconds=0.2,
    max_lease_seconds=60,
    max_pin_seconds=30,
    quarantine_seconds=0.2,
    idempotency_seconds=60,
)


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.problem = p.Problem(code=code, message=message, field=field)


@dataclass
class Reference:
    """The operations of the protocol; each is called with the time at which it happens."""

    kind_of_scope: ClassVar[type[Scope]] = Scope
    limits: p.Limits = LIMITS
    durability: p.StoreDurability = p.StoreDurability.NONE
    scopes: dict[str, Scope] = field(default_factory=dict)
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    next_lease: int = 1
    next_pin: int = 1
    draining: bool = False
    kept: dict[str, tuple[float, bytes, Any]] = field(default_factory=dict)

    def scope(self, name: str, now: float, where: str = "namespace") -> Scope:
        if name not in self.scopes:
            raise Refused(404, "unknown_scope", f"scope {name!r} is not initialized", where)
        self.scopes[name].settle(now)
        return self.scopes[name]

    def all_scopes(self, request: Any, now: float) -> list[tuple[Any, Scope]]:
        """The scopes of a request, before anything is done to any."""
        return [
            (part, self.scope(part.scope, now, f"scopes[{i}].scope"))
            for i, part in enumerate(request.scopes)
        ]

    def check_limits(self, request: Any) -> None:
        parts = getattr(request, "scopes", [])
        if len(parts) > self.limits.scopes:
            raise Refused(
                413,
                "too_large",
                f"{len(parts)} scopes, {self.limits.scopes} is the limit",
                "scopes",
            )
        lists = [
            (f"scopes[{i}].", part) for i, part in enumerate(parts) if not isinstance(part, str)
        ] or [("", request)]
        seen = 0
        for where, part in lists:
            for name in ("keys", "leases", "written_keys_to_confirm", "pages_to_release"):
                entries = getattr(part, name, [])
                seen += len(entries)
                if seen > self.limits.keys:
                    raise Refused(
                        413, "too_large", f"more than {self.limits.keys} entries", where + name
                    )
                for i, entry in enumerate(entries):
                    key = (
                        entry
                        if isinstance(entry, str)
                        else entry[0]
                        if isinstance(entry, tuple)
                        else ""
                    )
                    if len(key.encode("utf-8", "surrogatepass")) > self.limits.key_bytes:
                        raise Refused(
                            422,
                            "invalid",
                            f"a key of more than {self.limits.key_bytes} bytes",
                            f"{where}{name}[{i}]",
                        )
            for name in ("prefixes", "generations", "lengths", "checksums"):
                column, rows = (
                    getattr(part, name, None),
                    len(getattr(part, "leases", None) or getattr(part, "keys", ())),
                )
                if (
                    column is not None
                    and len(column) != rows
                    and (column or name in ("lengths", "checksums"))
                ):
                    raise Refused(422, "invalid", f"{len(column)} entries for {rows}", where + name)

    def lease_seconds(self, wish: float | None) -> float:
        return min(
            max(wish or self.limits.lease_seconds, self.limits.min_lease_seconds),
            self.limits.max_lease_seconds,
        )

    # The native part.

    def initialize(self, request: p.Initialize, now: float) -> p.Initialized:
        for i, wanted in enumerate(request.scopes):
            known = self.scopes[wanted.scope].geometry if wanted.scope in self.scopes else wanted
            for name in ("slots", "slot_bytes", "geometry", "identity"):
                if getattr(known, name) != getattr(wanted, name):
                    message = f"scope {wanted.scope!r} has {name} {getattr(known, name)!r}, not {getattr(wanted, name)!r}"
                    raise Refused(409, "mismatch", message, f"scopes[{i}].{name}")
        created = [wanted.scope not in self.scopes for wanted in request.scopes]
        earlier = request.earlier_lease_seconds or [0.0] * len(request.scopes)
        if len(earlier) != len(request.scopes):
            raise Refused(
                422,
                "invalid",
                f"{len(earlier)} entries for {len(request.scopes)}",
                "earlier_lease_seconds",
            )
        for wanted, seconds in zip(request.scopes, earlier, strict=True):
            if wanted.scope not in self.scopes:
                scope = self.scopes[wanted.scope] = self.kind_of_scope(
                    wanted, self.limits.quarantine_seconds
                )
                if seconds:
                    scope.close(
                        now
                        + min(seconds, self.limits.max_lease_seconds)
                        + self.limits.quarantine_seconds
                    )
        return p.Initialized(created=created)

    def describe(self, request: p.Describe, now: float) -> None:
        self.scope(request.scope, now, "scope").model = request.model

    def lookup(self, request: p.Lookup, now: float) -> p.LookedUp:
        seconds = min(request.pin_seconds, self.limits.max_pin_seconds)
        pin, found = (self.next_pin, list[p.FoundPages]()) if seconds else (0, [])
        self.next_pin += 1
        for part, scope in self.all_scopes(request, now):
            indices = [scope.live.get(key, p.NO_SLOT) for key in part.keys]
            slots = [scope.slots[index] if index >= 0 else None for index in indices]
            if request.touch:
                scope.touch(part.keys)
            if pin:
                for slot in filter(None, slots):
                    slot.pins[pin] = now + seconds
            found.append(
                p.FoundPages(
                    slots=indices,
                    generations=[slot.generation if slot else 0 for slot in slots],
                    lengths=[slot.length if slot else 0 for slot in slots],
                    checksums=[slot.checksum if slot else 0 for slot in slots],
                )
            )
        return p.LookedUp(scopes=found, pin=pin, pin_seconds=seconds)

    def reserve(self, request: p.Reserve, now: float) -> p.Leases:
        if self.draining:
            raise Refused(503, "draining", "this server gives no new leases")
        seconds = self.lease_seconds(request.lease_seconds)
        answers = list[p.Leased]()
        for part, scope in self.all_scopes(request, now):
            pairs = list(zip(part.keys, part.prefixes or [""] * len(part.keys), strict=True))
            states = self.reserve_in(scope, pairs, request.owner, now, seconds)
            known = {p.Reserved.LEASED: scope.leasing, p.Reserved.EXISTS: scope.live}
            slots = [
                known[state][key] if state in known else p.NO_SLOT
                for key, state in zip(part.keys, states, strict=True)
            ]
            leased = [
                scope.slots[slot] if state is p.Reserved.LEASED else None
                for slot, state in zip(slots, states, strict=True)
            ]
            answers.append(
                p.Leased(
                    states=states,
                    slots=slots,
                    generations=[
                        scope.slots[slot].generation if slot >= 0 else 0 for slot in slots
                    ],
                    leases=[slot.lease if slot else 0 for slot in leased],
                )
            )
        return p.Leases(scopes=answers, lease_seconds=seconds)

    def reserve_in(
        self, scope: Scope, pairs: list[tuple[str, str]], owner: str, now: float, seconds: float
    ) -> list[p.Reserved]:
        self.next_lease = self.lease_at(now)
        states = scope.reserve(pairs, owner, self.next_lease, now, now + seconds)
        self.next_lease += len(pairs)
        return states

    def lease_at(self, now: float) -> int:
        """The next number: by the time, so that none is given twice where all is lost."""
        return max(self.next_lease, int(now * 1e6))

    def commit(self, request: p.Commit, now: float) -> p.SettledLeases:
        parts = self.all_scopes(request, now)
        for i, (part, scope) in enumerate(parts):
            for j, length in enumerate(part.lengths):
                if 0 < scope.geometry.slot_bytes < length:
                    raise Refused(
                        422,
                        "invalid",
                        f"{length} bytes in slots of fewer",
                        f"scopes[{i}].lengths[{j}]",
                    )
        return _settled(
            [
                [
                    self.commit_one(scope, *row, now)
                    for row in zip(part.leases, part.lengths, part.checksums, strict=True)
                ]
                for part, scope in parts
            ]
        )

    def commit_one(self, scope: Scope, lease: int, length: int, checksum: int, now: float) -> bool:
        if lease not in scope.leases:
            again = scope.committed(lease)
            return again is not None and (
                scope.slots[again].length,
                scope.slots[again].checksum,
            ) == (length, checksum)
        scope.commit(scope.leases[lease], length, checksum)
        return True

    def abort(self, request: p.Abort, now: float) -> p.SettledLeases:
        return _settled(
            [
                [self.abort_one(scope, lease, now) for lease in part.leases]
                for part, scope in self.all_scopes(request, now)
            ]
        )

    def abort_one(self, scope: Scope, lease: int, now: float) -> bool:
        if lease not in scope.leases:
            return False
        scope.let_go(scope.leases[lease], now)
        return True

    def renew(self, request: p.Renew, now: float) -> p.SettledLeases:
        until = now + self.lease_seconds(request.lease_seconds)
        return _settled(
            [
                [self.renew_one(scope, lease, until) for lease in part.leases]
                for part, scope in self.all_scopes(request, now)
            ]
        )

    def renew_one(self, scope: Scope, lease: int, until: float) -> bool:
        if lease not in scope.leases:
            return False
        scope.end_at(scope.leases[lease], until)
        return True

    def unpin(self, request: p.Unpin, now: float) -> None:
        for scope in self.scopes.values():
            scope.unpin(request.pins, now)

    def touch(self, request: p.Touch, now: float) -> p.Marked:
        parts = self.all_scopes(request, now)
        for part, scope in parts:
            scope.touch(part.keys)
        return p.Marked(
            scopes=[p.Flags(done=[key in scope.live for key in part.keys]) for part, scope in parts]
        )

    def delete(self, request: p.Delete, now: float) -> p.Marked:
        flags = list[p.Flags]()
        for part, scope in self.all_scopes(request, now):
            done = list[bool]()
            for i, key in enumerate(part.keys):
                index = scope.live.get(key, p.NO_SLOT)
                meant = not part.generations or (
                    index >= 0 and scope.slots[index].generation == part.generations[i]
                )
                done.append(meant and scope.delete(key, now))
            flags.append(p.Flags(done=done))
        return p.Marked(scopes=flags)

    def clear(self, request: p.Clear, now: float) -> p.Cleared:
        scopes = [self.scope(name, now, f"scopes[{i}]") for i, name in enumerate(request.scopes)]
        return p.Cleared(pages=[scope.clear(now) for scope in scopes])

    def drop(self, request: p.Drop, now: float) -> p.Dropped:
        scopes = [self.scope(name, now, f"scopes[{i}]") for i, name in enumerate(request.scopes)]
        for i, scope in enumerate(scopes):
            if used := self.used(scope):
                raise Refused(409, "in_use", f"{used} slots are in use", f"scopes[{i}]")
        self.scopes = {
            name: scope for name, scope in self.scopes.items() if name not in request.scopes
        }
        return p.Dropped(slots=[len(scope.slots) for scope in scopes])

    def used(self, scope: Scope) -> int:
        return len(scope.slots) - len(scope.free)

    def list_scopes(self, now: float) -> p.Scopes:
        return p.Scopes(
            scopes=[
                p.ScopeStatus(
                    scope=name,
                    slots=len(scope.slots),
                    slot_bytes=scope.geometry.slot_bytes,
                    geometry=scope.geometry.geometry,
                    identity=scope.geometry.identity,
                    model=scope.model,
                    **{str(state): scope.count(state) for state in p.SlotState},
                )
                for name, scope in ((name, self.scope(name, now)) for name in sorted(self.scopes))
            ]
        )

    def inspect(self, request: p.Inspect, now: float) -> p.Inspected:
        scope = self.scope(request.scope, now, "scope")
        for i, slot in enumerate(request.slots):
            if slot >= len(scope.slots):
                raise Refused(422, "invalid", f"there are {len(scope.slots)} slots", f"slots[{i}]")
        indices = [
            *request.slots,
            *(scope.live.get(key, scope.leasing.get(key, p.NO_SLOT)) for key in request.keys),
        ]
        return p.Inspected(
            slots=[self.status(scope, index, now) if index >= 0 else None for index in indices]
        )

    def status(self, scope: Scope, index: int, now: float) -> p.SlotStatus:
        slot = scope.slots[index]
        owned, timed = (
            slot.state in (p.SlotState.LEASED, p.SlotState.LIVE),
            slot.state in (p.SlotState.LEASED, p.SlotState.QUARANTINED),
        )
        live = slot.state is p.SlotState.LIVE
        return p.SlotStatus(
            slot=index,
            state=slot.state,
            generation=slot.generation,
            key=slot.key if owned else "",
            prefix=slot.prefix if owned else "",
            length=slot.length if live else 0,
            checksum=slot.checksum if live else 0,
            owner=slot.owner,
            seconds_left=max(0.0, slot.until - now) if timed else 0.0,
            pins=sum(end > now for end in slot.pins.values()),
        )

    def fsck(self, request: p.Fsck, now: float) -> p.FsckReport:
        scopes = {
            name: self.scope(name, now, f"scopes[{i}]")
            for i, name in enumerate(request.scopes or self.scopes)
        }
        return p.FsckReport(
            slots=sum(len(scope.slots) for scope in scopes.values()),
            problems=[
                f"{name}: {problem}"
                for name, scope in scopes.items()
                for problem in scope.problems()
            ],
        )

    def drain(self, request: p.Drain, now: float) -> p.Draining:
        self.draining = request.enabled
        return p.Draining(
            enabled=request.enabled,
            leases=sum(len(self.scope(name, now).leases) for name in self.scopes),
        )

    # The compatible part.

    def compatible(
        self, rank: int, operation: str, request: Any, now: float
    ) -> dict[str, Any] | None:
        name = f"{rank}:{request.namespace}"
        if operation == "initialize":
            return self.compatible_initialize(name, request.num_pages)
        scope = self.scope(name, now)
        match operation:
            case "exists":
                scope.touch(request.keys)
                return {"exists": [key in scope.live for key in request.keys]}
            case "get_page_indices":
                scope.touch(request.keys)
                return {"indices": [scope.live.get(key) for key in request.keys]}
            case "reserve_and_allocate_page_indices":
                seconds = self.limits.lease_seconds
                full = [p.Reserved.FULL] * len(request.keys)
                states = (
                    full
                    if self.draining
                    else self.reserve_in(scope, request.keys, "", now, seconds)
                )
                known = {p.Reserved.LEASED: scope.leasing, p.Reserved.EXISTS: scope.live}
                return {
                    "indices": [
                        (
                            state is p.Reserved.EXISTS,
                            known[state][key] if state in known else p.NO_SLOT,
                        )
                        for (key, _), state in zip(request.keys, states, strict=True)
                    ]
                }
            case "confirm_write":
                return self.confirm(
                    scope, request.written_keys_to_confirm, request.pages_to_release, now
                )
            case "delete_keys":
                for key in request.keys:
                    scope.delete(key, now)
            case "clear":
                scope.clear(now)
        return None

    def compatible_initialize(self, name: str, slots: int) -> None:
        known = self.scopes.get(name)
        if known and len(known.slots) != slots:
            raise Refused(
                409,
                "mismatch",
                f"scope {name!r} has {len(known.slots)} pages, not {slots}",
                "num_pages",
            )
        if not known:
            self.scopes[name] = self.kind_of_scope(
                p.ScopeGeometry(scope=name, slots=slots), self.limits.quarantine_seconds
            )

    def confirm(
        self, scope: Scope, written: list[tuple[str, int]], released: list[int], now: float
    ) -> None:
        for where, indices in (
            ("written_keys_to_confirm", [index for _, index in written]),
            ("pages_to_release", released),
        ):
            for i, index in enumerate(indices):
                if index >= len(scope.slots):
                    raise Refused(
                        422, "invalid", f"there are {len(scope.slots)} pages", f"{where}[{i}]"
                    )
        refused = ""
        for i, (key, index) in enumerate(written):
            if not self.confirm_one(scope, key, index):
                refused = refused or f"written_keys_to_confirm[{i}]"
        for i, index in enumerate(released):
            if not self.release_one(scope, index, now):
                refused = refused or f"pages_to_release[{i}]"
        if refused:
            raise Refused(409, "stale", "that slot is not reserved for that key", refused)

    def confirm_one(self, scope: Scope, key: str, index: int) -> bool:
        if scope.leasing.get(key) != index:
            return scope.live.get(key) == index
        scope.commit(index, 0, 0)
        return True

    def release_one(self, scope: Scope, index: int, now: float) -> bool:
        state = scope.slots[index].state
        if state is p.SlotState.LEASED:
            scope.let_go(index, now)
        return state is not p.SlotState.LIVE


def _settled(done: list[list[bool]]) -> p.SettledLeases:
    states = {True: p.Settled.DONE, False: p.Settled.STALE}
    return p.SettledLeases(
        scopes=[p.SettledScope(states=[states[flag] for flag in flags]) for flags in done]
    )
