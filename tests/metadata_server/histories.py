"""Random histories of several clients on one scope, and what must be true after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_metadata_server.core.codec import changes_of
from hicache_metadata_server.core.invariants import audit
from hicache_metadata_server.core.leases import SlotPins
from hicache_metadata_server.core.restore import SlotRow, restore, rows_from
from hicache_metadata_server.core.scope import Scope
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED
from hicache_metadata_server.protocol import Reserved, ScopeGeometry
from hicache_metadata_server.storage.blocks import BLOCK, SlotBlock, split_by_block

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

QUARANTINE = 2.0
MAX_LEASE = 8


def problems_of(scope: Scope) -> list[str]:
    """Problems that an fsck would report."""
    return [problem for chunk in audit(scope) for problem in chunk]


@dataclass
class History:
    """A scope, what its clients were told, and a store that is written after each step."""

    chance: random.Random
    slots: int
    keys: int
    scope: Scope = field(init=False)
    now: float = 1000.0
    next_lease: int = 1
    next_pin: int = 1
    held: dict[int, tuple[str, int, float]] = field(default_factory=dict)
    """Leases that clients believe to hold: key, slot, end."""
    pins: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    blocks: dict[int, SlotBlock] = field(default_factory=dict)
    rested: dict[int, float] = field(default_factory=dict)
    """Slots that were let go, and when at the latest they may still be written or read."""
    written: dict[int, float] = field(default_factory=dict)
    """Slots whose lease a clear has ended, and until when their writers, whom nobody has asked,
    take it for theirs."""
    generations: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scope = Scope(self.geometry, QUARANTINE)

    @property
    def geometry(self) -> ScopeGeometry:
        return ScopeGeometry(scope="0:kv", slots=self.slots)

    def step(self) -> None:
        chance = self.chance
        live = {key: self.scope.lru.slot(key) for key in self.scope.lru}
        # A lease that ends by itself ends at its time, whenever that is seen.
        before = {
            slot: self.scope.table.until[slot] if state == LEASED else float("inf")
            for slot, state in enumerate(self.scope.table.states)
            if state in (LEASED, LIVE)
        }
        match chance.choice(
            ("reserve",) * 3
            + ("commit",) * 3
            + (
                "abort",
                "release",
                "delete",
                "touch",
                "pin",
                "unpin",
                "renew",
                "wait",
                "wait",
                "clear",
                "crash",
            )
        ):
            case "reserve":
                self.reserve()
            case "commit" if self.held:
                leases = chance.sample(list(self.held), chance.randint(1, len(self.held)))
                valid = [self.scope.leases.slot(lease) == self.held[lease][1] for lease in leases]
                lengths, checksums = (
                    [chance.randint(1, 9) for _ in leases],
                    [chance.getrandbits(64) for _ in leases],
                )
                done = self.scope.commit(leases, lengths, checksums, self.now)
                for lease, was_valid, did in zip(leases, valid, done, strict=True):
                    key, slot, end = self.held.pop(lease)
                    assert did == (was_valid and end > self.now)
                    if did:
                        assert self.scope.lru.slot(key) == slot
            case "abort" if self.held:
                lease = chance.choice(list(self.held))
                self.scope.abort([lease, lease], self.now)
                del self.held[lease]
            case "release":
                self.scope.release([chance.randrange(self.slots) for _ in range(2)], self.now)
            case "delete":
                self.delete()
            case "touch":
                self.scope.lru.touch([self.key() for _ in range(3)])
            case "pin" if live:
                slots = [
                    live[key] for key in chance.sample(list(live), chance.randint(1, len(live)))
                ]
                until = self.now + chance.choice((1, 5))
                self.scope.pin(self.next_pin, slots, until)
                self.pins[self.next_pin] = slots, until
                self.next_pin += 1
            case "unpin" if self.pins:
                self.unpin(chance.choice(list(self.pins)))
            case "renew" if self.held:
                lease, end = (
                    chance.choice(list(self.held)),
                    self.now + chance.choice((3, MAX_LEASE)),
                )
                if self.scope.renew([lease], self.now, end) == [True]:
                    self.held[lease] = (*self.held[lease][:2], end)
            case "wait":
                self.now += chance.choice((0.5, 1, 3, 10))
                for pin in [pin for pin, (_, until) in self.pins.items() if until <= self.now]:
                    self.unpin(pin)
                if chance.random() < 0.5:
                    # Else the next that somebody asks for has to see to what is due.
                    self.scope.settle(self.now)
                    self.check_nothing_overdue()
            case "clear" if chance.random() < 0.3:
                self.scope.settle(self.now, 10**6)
                self.written |= {slot: self.scope.table.until[slot] for slot in self.leased_slots()}
                self.scope.clear(self.now)
            case "crash" if chance.random() < 0.5:
                self.crash()
            case _:
                pass
        self.write()
        for slot, end in before.items():
            if slot < len(self.scope.table) and self.scope.table.states[slot] in (
                QUARANTINED,
                FREE,
            ):
                self.rested.setdefault(slot, min(self.now, end))
        self.see()

    def leased_slots(self) -> list[int]:
        return [slot for slot, state in enumerate(self.scope.table.states) if state == LEASED]

    def key(self) -> str:
        return f"k{self.chance.randrange(self.keys)}"

    def reserve(self) -> None:
        keys = [self.key() for _ in range(self.chance.randint(1, 4))]
        prefixes = [self.chance.choice(("", self.key())) for _ in keys]
        for lease in [
            lease
            for lease, (_, _, end) in self.held.items()
            if end <= self.now and self.chance.random() < 0.5
        ]:
            del self.held[lease]
        pinned = self.pinned_pages()
        states, slots, leases = self.scope.reserve(
            keys, prefixes, "me", self.next_lease, self.now, self.now + 3
        )
        assert pinned <= self.pinned_pages(), "a pinned page was evicted"
        self.next_lease += len(keys)
        assert len(states) == len(slots) == len(leases) == len(keys)
        for i, (key, state, slot, lease) in enumerate(
            zip(keys, states, slots, leases, strict=True)
        ):
            assert (slot >= 0) == (state in (Reserved.LEASED, Reserved.EXISTS))
            assert (lease > 0) == (state is Reserved.LEASED)
            if state is Reserved.LEASED:
                assert key not in keys[:i], "the first of several gets the lease"
                assert self.scope.table.generations[slot] > self.generations.get(slot, 0)
                assert slot not in self.rested or self.rested[slot] + QUARANTINE <= self.now, (
                    "a slot is given out that rests"
                )
                assert self.written.pop(slot, 0.0) <= self.now, (
                    "a slot is given out that its writer may write into"
                )
                pinned = [
                    pin
                    for pin, (slots_, until) in self.pins.items()
                    if slot in slots_ and until > self.now
                ]
                assert not pinned, "a slot is given out that is pinned"
                self.generations[slot] = self.scope.table.generations[slot]
                self.rested.pop(slot, None)
                self.held[lease] = key, slot, self.now + 3

    def delete(self) -> None:
        keys, table = list({self.key(): None for _ in range(2)}), self.scope.table
        slots = self.scope.lru.slots(keys)
        generations = [
            table.generations[slot] + self.chance.randint(0, 1) if slot >= 0 else 1
            for slot in slots
        ]
        meant = [
            slot >= 0 and table.generations[slot] == one
            for slot, one in zip(slots, generations, strict=True)
        ]
        if self.chance.random() < 0.5:
            generations, meant = [], [slot >= 0 for slot in slots]
        assert self.scope.delete(keys, generations, self.now) == meant
        assert [self.scope.lru.slot(key) >= 0 for key in keys] == [
            slot >= 0 and not goes for slot, goes in zip(slots, meant, strict=True)
        ]

    def pinned_pages(self) -> set[tuple[str, int]]:
        live = [(key, self.scope.lru.slot(key)) for key in self.scope.lru]
        return {
            (key, slot)
            for key, slot in live
            if any(slot in slots and end > self.now for slots, end in self.pins.values())
        }

    def unpin(self, pin: int) -> None:
        slots, _ = self.pins.pop(pin)
        self.scope.unpin(pin, slots, self.now)

    def write(self) -> None:
        """Write changes into blocks, as a store does."""
        changed, leased = self.scope.changed, self.scope.leased
        self.scope.changed, self.scope.leased = [], []
        if changed:
            for number, written, start, end in split_by_block(
                changes_of(self.scope, changed, leased)
            ):
                block = self.blocks.get(number) or SlotBlock()
                written.merge(block, start, end)
                self.blocks[number] = SlotBlock.decode(block.encode())

    def rows(self) -> Iterator[SlotRow]:
        for number in sorted(self.blocks):
            columns = self.blocks[number].rows(number * BLOCK)
            if columns is not None:
                yield from map(SlotRow, *columns)

    def crash(self) -> None:
        """Go on with what was written."""
        old = self.scope
        old.settle(self.now, 10**6)
        scope = self.scope = Scope(self.geometry, QUARANTINE)
        scope.epoch, scope.cleared_until, scope.pins = old.epoch, old.cleared_until, SlotPins()
        for pin, (slots, until) in self.pins.items():
            scope.pin(pin, slots, until)
        rows = rows_from(self.rows(), self.chance.randint(1, 5))
        assert restore(scope, rows, self.now, 100.0) == []
        assert sorted(scope.lru) == sorted(old.lru)
        for key in scope.lru:
            slot = scope.lru.slot(key)
            assert scope.status(slot, self.now) == old.status(slot, self.now)
        assert scope.table.by_key == old.table.by_key
        assert len(scope.leases) == len(old.leases)
        held = [
            old.table.leases[slot] for slot, state in enumerate(old.table.states) if state == LEASED
        ]
        assert list(scope.leases.slots(held)) == list(old.leases.slots(held))
        assert all(
            until <= max(self.now + QUARANTINE, self.written.get(slot, 0.0))
            for slot, until in enumerate(scope.table.until)
            if scope.table.states[slot] == QUARANTINED
        )

    def see(self) -> None:
        assert problems_of(self.scope) == []
        leased = [lease for lease in self.held if self.scope.leases.slot(lease) >= 0]
        owned = [
            *map(self.scope.lru.slot, self.scope.lru),
            *map(self.scope.leases.slot, leased),
        ]
        assert len(set(owned)) == len(owned), "a slot belongs to two keys"

    def check_nothing_overdue(self) -> None:
        """Leases and quarantines have ended that were to end by now."""
        table = self.scope.table
        overdue = [
            slot
            for slot, state in enumerate(table.states)
            if state in (LEASED, QUARANTINED) and table.until[slot] <= self.now
        ]
        assert [
            slot
            for slot in overdue
            if table.states[slot] == LEASED or not self.scope.is_pinned(slot, self.now)
        ] == []

    def check_nothing_lost(self) -> None:
        """Once nothing holds them, all slots can be leased."""
        self.scope.clear(self.now)
        for pin in list(self.pins):
            self.unpin(pin)
        self.now += max(QUARANTINE, MAX_LEASE) + 1
        self.scope.settle(self.now, 10**6)
        states, slots, _ = self.scope.reserve(
            [f"n{i}" for i in range(self.slots)], (), "", self.next_lease, self.now, self.now + 1
        )
        assert set(states) == {Reserved.LEASED}
        assert sorted(slots) == list(range(self.slots))
