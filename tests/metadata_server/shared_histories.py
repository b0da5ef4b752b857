"""Random histories on a shared store and, beside it, on the state machine that our servers have in
memory: both must say the same.

Slots, leases and generations have other numbers in each; everything else is compared, and the
shared store is checked by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.shared.assembly import open_connection
from hicache_metadata_server.shared.catalog import MICROSECONDS
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.names import ScopeKeys
from hicache_metadata_server.shared.service import SharedService
from hicache_metadata_server.shared.sglang import SharedSglangCompat

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence


UNIT = 100.0
"""Seconds. Redis' clock goes on by itself: what a test takes must not count."""
LIMITS = msgspec.structs.replace(
    DEFAULTS,
    lease_seconds=3 * UNIT,
    max_lease_seconds=20 * UNIT,
    quarantine_seconds=2 * UNIT,
    max_pin_seconds=20 * UNIT,
)
SCOPES = ("0:kv", "7:mamba")


@dataclass
class SharedHistory:
    """Two servers on one store, what their clients were told, and the reference."""

    chance: random.Random
    slots: int
    keys: int
    url: str
    limits: p.Limits = LIMITS
    now: float = 0.0
    servers: list[SharedService] = field(default_factory=list)
    leases: dict[tuple[str, int], int] = field(default_factory=dict)
    """Those of the store by those of the reference, of each scope."""
    pins: dict[int, int] = field(default_factory=dict)
    generations: dict[tuple[str, int], int] = field(default_factory=dict)
    owned: dict[str, dict[int, str]] = field(default_factory=dict)
    left: dict[tuple[str, int], float] = field(default_factory=dict)
    """When each slot was let go."""
    pinned: dict[int, tuple[set[tuple[str, int]], float]] = field(default_factory=dict)

    async def begin(self) -> None:
        self.reference = MetadataService(self.limits)
        self.old = SglangService(self.reference)
        self.servers = [self.server(), self.server()]
        await self.servers[0].connection.command("FLUSHALL")
        request = p.Initialize(
            scopes=[p.ScopeGeometry(scope=name, slots=self.slots) for name in SCOPES]
        )
        assert await self.servers[0].initialize(request) == self.reference.initialize(
            request, self.now
        )

    async def end(self) -> None:
        for server in self.servers:
            await server.connection.close()

    def server(self) -> SharedService:
        made = SharedService(
            open_connection(self.url), self.limits, durability=p.StoreDurability.NONE
        )
        made.catalog.clock_offset = round(self.now * MICROSECONDS)
        return made

    @property
    def any_server(self) -> SharedService:
        return self.chance.choice(self.servers)

    async def step(self) -> None:
        # What time has brought to the reference, it does where it is asked; the store does it by
        # itself.
        self.reference.settle(self.now, 10**6)
        kinds = (
            ("reserve",) * 4
            + ("commit",) * 4
            + (
                "abort",
                "renew",
                "delete",
                "lookup",
                "pin",
                "unpin",
                "touch",
                "exists",
                "compatible",
                "compatible",
                "wait",
                "wait",
                "clear",
                "crash",
            )
        )
        await getattr(self, self.chance.choice(kinds))()
        await self.see()

    # What clients do.

    async def reserve(self) -> None:
        parts = list[p.ReserveScope]()
        for scope in self.some_scopes():
            keys = self.some_keys(6)
            prefixes = (
                [self.chance.choice(("", self.key())) for _ in keys]
                if self.chance.random() < 0.7
                else []
            )
            parts.append(p.ReserveScope(scope=scope, keys=keys, prefixes=prefixes))
        request = p.Reserve(
            scopes=parts, owner="me", lease_seconds=self.chance.choice((None, 5 * UNIT))
        )
        ours, theirs = (
            await self.any_server.reserve(request),
            self.reference.reserve(request, self.now),
        )
        assert ours.lease_seconds == theirs.lease_seconds
        for part, mine, other in zip(parts, ours.scopes, theirs.scopes, strict=True):
            assert (mine.states, mine.evicted) == (other.states, other.evicted), part
            for state, slot, generation, lease, known in zip(
                mine.states, mine.slots, mine.generations, mine.leases, other.leases, strict=True
            ):
                assert (
                    (slot >= 0)
                    == (state in (p.Reserved.LEASED, p.Reserved.EXISTS))
                    == (generation > 0)
                )
                assert (lease > 0) == (state is p.Reserved.LEASED)
                if lease:
                    self.leases[part.scope, known] = lease
                    self.check_leased(part.scope, slot, generation)

    async def commit(self) -> None:
        scope, known = self.some_leases()
        known += known[:1] if self.chance.random() < 0.2 else []
        lengths, sums = (
            [self.chance.randint(1, 3) for _ in known],
            [self.chance.choice((0, 2**64 - 1, 5)) for _ in known],
        )
        await self.settled(
            p.Commit, "commit", scope, known, {"lengths": lengths, "checksums": sums}, {}
        )

    async def abort(self) -> None:
        scope, known = self.some_leases()
        await self.settled(p.Abort, "abort", scope, known * self.chance.choice((1, 2)), {}, {})

    async def renew(self) -> None:
        await self.settled(
            p.Renew,
            "renew",
            *self.some_leases(),
            {},
            {"lease_seconds": self.chance.choice((3, 8)) * UNIT},
        )

    async def settled(
        self, kind: Any, name: str, scope: str, known: list[int], columns: Any, options: Any
    ) -> None:
        scope_kind = p.CommitScope if kind is p.Commit else p.LeaseScope
        mine = [self.leases.get((scope, lease), 2**53 + 1) for lease in known]
        ours = kind(scopes=[scope_kind(scope=scope, leases=mine, **columns)], **options)
        theirs = kind(scopes=[scope_kind(scope=scope, leases=known, **columns)], **options)
        assert await getattr(self.any_server, name)(ours) == getattr(self.reference, name)(
            theirs, self.now
        )

    async def delete(self) -> None:
        scope, keys = self.chance.choice(SCOPES), self.some_keys(3)
        mine, known = (
            self.found(await self.look_up(scope, keys)),
            self.found(self.look_up_reference(scope, keys)),
        )
        shift = [self.chance.randint(0, 1) for _ in keys]
        given = self.chance.random() < 0.5
        answers = []
        for column in (mine, known):
            generations = (
                [one[1] + more for one, more in zip(column, shift, strict=True)] if given else []
            )
            part = p.DeleteScope(scope=scope, keys=keys, generations=generations)
            answers.append(p.Delete(scopes=[part]))
        assert await self.any_server.delete(answers[0]) == self.reference.delete(
            answers[1], self.now
        )

    async def lookup(self) -> None:
        parts = [p.LookupScope(scope=scope, keys=self.some_keys(5)) for scope in self.some_scopes()]
        request = p.Lookup(scopes=parts, touch=self.chance.random() < 0.5)
        self.same_pages(
            await self.any_server.lookup(request), self.reference.lookup(request, self.now)
        )

    async def pin(self) -> None:
        parts = [p.LookupScope(scope=scope, keys=self.some_keys(4)) for scope in self.some_scopes()]
        request = p.Lookup(scopes=parts, pin_seconds=self.chance.choice((1, 5)) * UNIT)
        ours, theirs = (
            await self.any_server.lookup(request),
            self.reference.lookup(request, self.now),
        )
        self.same_pages(ours, theirs)
        assert (ours.pin > 0, ours.pin_seconds) == (theirs.pin > 0, theirs.pin_seconds)
        if ours.pin:
            self.pins[theirs.pin] = ours.pin
            slots = {
                (part.scope, slot)
                for part, found in zip(parts, ours.scopes, strict=True)
                for slot in found.slots
                if slot >= 0
            }
            self.pinned[theirs.pin] = slots, self.now + request.pin_seconds

    async def unpin(self) -> None:
        known = [pin for pin in self.pins if self.chance.random() < 0.5]
        await self.any_server.unpin(p.Unpin(pins=[*(self.pins[pin] for pin in known), 1, 2**60]))
        self.reference.unpin(p.Unpin(pins=known), self.now)
        for pin in known:
            del self.pins[pin]
            self.pinned.pop(pin, None)

    async def touch(self) -> None:
        request = p.Touch(
            scopes=[
                p.LookupScope(scope=scope, keys=self.some_keys(4)) for scope in self.some_scopes()
            ]
        )
        assert await self.any_server.touch(request) == self.reference.touch(request, self.now)

    async def exists(self) -> None:
        request, new = p.SglangKeys(keys=self.some_keys(4)), SharedSglangCompat(self.any_server)
        assert await new.exists(0, request) == self.old.exists(0, request, self.now)

    async def compatible(self) -> None:
        """Reserve, confirm some and release others by the compatible part, some of them wrong."""
        pairs = [(key, self.chance.choice(("", self.key()))) for key in self.some_keys(4)]
        request, new = p.SglangReserve(keys=pairs), SharedSglangCompat(self.any_server)
        ours = (await new.reserve_and_allocate_page_indices(0, request))["indices"]
        theirs = self.old.reserve_and_allocate_page_indices(0, request, self.now)["indices"]
        assert [(there, slot >= 0) for there, slot in ours] == [
            (there, slot >= 0) for there, slot in theirs
        ]
        choices = [
            self.chance.choice(("confirm", "confirm", "release", "wrong", "leave")) for _ in pairs
        ]
        said = []
        for indices in (ours, theirs):
            columns: dict[str, list[Any]] = {"confirm": [], "release": [], "wrong": [], "leave": []}
            for (key, _), (_, slot), choice in zip(pairs, indices, choices, strict=True):
                if slot >= 0:
                    columns[choice].append((key, slot))
            confirms = [*columns["confirm"], *(("other", slot) for _, slot in columns["wrong"])]
            said.append(
                p.SglangConfirm(
                    written_keys_to_confirm=confirms,
                    pages_to_release=[s for _, s in columns["release"]],
                )
            )
        refused = []
        for do in (new.confirm_write(0, said[0]), None):
            try:
                if do is not None:
                    await do
                else:
                    self.old.confirm_write(0, said[1], self.now)
                refused.append("")
            except RequestError as error:
                refused.append(error.problem.field)
        assert refused[0] == refused[1]

    async def wait(self) -> None:
        self.now += self.chance.choice((0.5, 1, 3, 10)) * UNIT
        for server in self.servers:
            server.catalog.clock_offset = round(self.now * MICROSECONDS)
        for pin in [pin for pin, (_, until) in self.pinned.items() if until <= self.now]:
            del self.pinned[pin]

    async def clear(self) -> None:
        if self.chance.random() < 0.4:
            request = p.Clear(scopes=[self.chance.choice(SCOPES)])
            assert await self.any_server.clear(request) == self.reference.clear(request, self.now)

    async def crash(self) -> None:
        """A server is gone, another comes; Redis has forgotten the scripts."""
        gone = self.servers.pop(self.chance.randrange(2))
        await gone.connection.command("SCRIPT FLUSH")
        await gone.connection.close()
        self.servers.append(self.server())

    # What must be true.

    async def see(self) -> None:
        server = self.any_server
        # Both do what is due before they tell.
        self.reference.settle(self.now, 10**6)
        await server.look()
        assert server.list_scopes() == self.reference.list_scopes()
        for scope in SCOPES:
            state = self.reference.scopes[scope]
            assert await self.by_use(server, scope) == list(state.lru)
            await self.check_slots(server, scope, state.table.by_key)
        assert (await fsck(server, p.Fsck())).problems == []

    async def check_slots(
        self, server: SharedService, scope: str, by_key: Mapping[str, int]
    ) -> None:
        found = (await server.inspect(p.Inspect(scope=scope, slots=list(range(self.slots))))).slots
        owned = {one.slot: one.key for one in found if one is not None and one.key}
        assert sorted(owned.values()) == sorted(by_key), "a slot belongs to two keys, or to none"
        for slot, key in self.owned.get(scope, {}).items():
            if owned.get(slot) != key:
                self.left[scope, slot] = self.now
        self.owned[scope] = owned

    def check_leased(self, scope: str, slot: int, generation: int) -> None:
        assert generation > self.generations.get((scope, slot), 0), "generations grow"
        self.generations[scope, slot] = generation
        left = self.left.pop((scope, slot), None)
        assert left is None or left + self.limits.quarantine_seconds <= self.now, (
            "a slot is given out that rests"
        )
        assert not any((scope, slot) in slots for slots, _ in self.pinned.values()), (
            "a slot is given out that is pinned"
        )

    async def by_use(self, server: SharedService, scope: str) -> list[str]:
        keys = ScopeKeys(scope)
        names = dict(
            zip(
                ("meta", "slots", "live", "leased", "leases", "free", "expiring", "order", "aside"),
                keys.all,
                strict=False,
            )
        )
        live = await server.connection.command("HGETALL", names["live"])
        owner = {slot: key.decode() for key, slot in live.items()}
        uses = [
            (use, owner[slot])
            for name in ("order", "aside")
            for slot, use in await server.connection.command(
                "ZRANGE", names[name], 0, -1, "WITHSCORES", withscores=True
            )
        ]
        return [key for _, key in sorted(uses)]

    async def check_nothing_lost(self) -> None:
        """Once nothing holds them, all slots can be leased."""
        server = self.any_server
        await server.clear(p.Clear(scopes=list(SCOPES)))
        await server.unpin(p.Unpin(pins=list(self.pins.values())))
        self.pinned = {}
        self.now += 30 * UNIT
        server.catalog.clock_offset = round(self.now * MICROSECONDS)
        for scope in SCOPES:
            part = p.ReserveScope(scope=scope, keys=[f"n{i}" for i in range(self.slots)])
            (leased,) = (await server.reserve(p.Reserve(scopes=[part]))).scopes
            assert set(leased.states) == {p.Reserved.LEASED}
            assert sorted(leased.slots) == list(range(self.slots))

    # Drawing.

    def key(self) -> str:
        return f"k{self.chance.randrange(self.keys)}"

    def some_keys(self, most: int) -> list[str]:
        return [self.key() for _ in range(self.chance.randint(1, most))]

    def some_scopes(self) -> Sequence[str]:
        return self.chance.choice((SCOPES[:1], SCOPES[1:], SCOPES, SCOPES[:1] * 2))

    def some_leases(self) -> tuple[str, list[int]]:
        scope = self.chance.choice(SCOPES)
        # Mostly those that may still be held.
        known = [lease for name, lease in self.leases if name == scope][-12:]
        return scope, [
            *self.chance.sample(known, min(len(known), self.chance.randint(1, 5))),
            *self.chance.choice(((), (999_999,))),
        ]

    async def look_up(self, scope: str, keys: list[str]) -> p.LookedUp:
        return await self.any_server.lookup(
            p.Lookup(scopes=[p.LookupScope(scope=scope, keys=keys)], touch=False)
        )

    def look_up_reference(self, scope: str, keys: list[str]) -> p.LookedUp:
        return self.reference.lookup(
            p.Lookup(scopes=[p.LookupScope(scope=scope, keys=keys)], touch=False), self.now
        )

    def found(self, answer: p.LookedUp) -> list[tuple[int, int]]:
        return list(zip(answer.scopes[0].slots, answer.scopes[0].generations, strict=True))

    def same_pages(self, ours: p.LookedUp, theirs: p.LookedUp) -> None:
        for mine, other in zip(ours.scopes, theirs.scopes, strict=True):
            assert (mine.lengths, mine.checksums) == (other.lengths, other.checksums)
            assert [slot >= 0 for slot in mine.slots] == [slot >= 0 for slot in other.slots]
            assert [slot >= 0 for slot in mine.slots] == [
                generation > 0 for generation in mine.generations
            ]
