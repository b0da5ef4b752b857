"""LRU order and lease log against plain models; chunks of the log so small that they are cleaned and
merged all the time."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from hicache_metadata_server.core import slot_table
from hicache_metadata_server.core.lru import LruOrder
from hicache_metadata_server.core.slot_table import FREE, LIVE, LeaseLog, SlotTable

SLOTS = 24


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(slot_table, "CHUNK", 4)


class Model:
    """An LRU order, and a plain list of the same pages."""

    def __init__(self) -> None:
        self.table = SlotTable()
        self.table.grow(SLOTS)
        self.lru = LruOrder(self.table)
        self.order: OrderedDict[int, None] = OrderedDict()
        """The least recently used first."""
        self.pinned = set[int]()

    def add(self, slots):
        for slot in slots:
            self.table.states[slot], self.table.keys[slot] = LIVE, f"k{slot}"
            self.table.by_key[f"k{slot}"] = slot
        self.lru.add(slots)
        self.order.update(dict.fromkeys(reversed(slots)))

    def use(self, slots):
        self.lru.use(slots)
        for slot in reversed(slots):
            self.order.move_to_end(slot)

    def children(self, slot, count):
        had, self.table.children[slot] = self.table.children[slot], count
        if had and not count:
            self.lru.became_leaf(slot)

    def remove(self, slot):
        del self.order[slot], self.table.by_key[f"k{slot}"]
        self.table.states[slot], self.table.children[slot] = FREE, 0
        self.lru.remove(slot)

    def evict(self, wanted):
        may_go = [
            slot for slot in self.order if not self.table.children[slot] and slot not in self.pinned
        ][:wanted]
        gone = list[int]()

        def evict(slot):
            gone.append(slot)
            self.remove(slot)

        assert self.lru.victims(wanted, self.pinned.__contains__, evict) == len(may_go)
        assert gone == may_go

    def clear(self):
        self.order.clear()
        self.table.quarantine_all()
        self.lru.clear()
        for slot in range(SLOTS):
            self.table.states[slot] = FREE
            self.table.children[slot] = 0

    def check(self):
        assert list(self.lru) == [f"k{slot}" for slot in self.order]
        assert len(self.lru) == len(self.order)
        assert list(self.lru.unreachable()) == []


def step(model, chance):
    live, free = list(model.order), [slot for slot in range(SLOTS) if slot not in model.order]
    some = chance.sample(live, chance.randint(0, len(live)))
    steps = [
        "add",
        *["use"] * 2,
        *["one"] * 2,
        "run",
        "remove",
        "children",
        "pin",
        "evict",
        "clear",
    ]
    match chance.choice(steps):
        case "add":
            model.add(chance.sample(free, chance.randint(0, len(free))))
        case "use":
            model.use(some)
        case "one":
            for slot in some[:2] * chance.randint(0, 10):
                model.use([slot])
        case "run" if live:
            first = last = chance.choice(live)
            while last + 1 in model.order and chance.random() < 0.8:
                last += 1
            model.use(chance.choice((range(first, last + 1), list(range(first, last + 1)))))
        case "remove":
            for slot in some[:2]:
                model.remove(slot)
        case "children":
            for slot in some:
                model.children(slot, chance.randint(0, 1))
        case "pin":
            model.pinned = set(some)
        case "evict":
            model.evict(chance.randint(1, 4))
        case "clear" if chance.random() < 0.05:
            model.clear()
    model.check()


@pytest.mark.parametrize("seed", range(6))
def test_long_use(seed):
    model, chance = Model(), random.Random(seed)
    for _ in range(3000):
        step(model, chance)


def test_pages_in_neighbouring_slots_are_a_range():
    model = Model()
    model.add(range(5))
    assert model.lru.used(["k0", "k1"]) == range(2)
    # -1 and 0 are neighbours, too.
    assert model.lru.used(["missing", "k0"]) == [-1, 0]
    assert model.lru.used(["missing"]) == [-1]
    assert list(model.lru) == ["k4", "k3", "k2", "k1", "k0"]


@pytest.mark.parametrize("slots", [range(1, 4), [1, 2, 3], [3, 1, 2], [2, -1, 1], []])
def test_lengths_are_compared_alike_in_neighbouring_slots_and_in_others(slots):
    table = SlotTable()
    table.grow(5)
    for slot, length in enumerate([7, 7, 7, 8, 7]):
        table.lengths[slot] = length
    for length in (7, 8, 9):
        expected = [slot >= 0 and table.lengths[slot] == length for slot in slots]
        assert table.have_length(slots, length) == expected
    table.lengths[3] = 7
    assert table.have_length(slots, 7) == [slot >= 0 for slot in slots]


@pytest.mark.parametrize("seed", range(5))
def test_slots_by_their_leases(seed):
    """Against a dict, with runs of neighbours and slots alone."""
    chance, table, next_lease = random.Random(seed), SlotTable(), 1
    log, slots = LeaseLog(table), dict[int, int]()
    table.grow(SLOTS)
    for _ in range(600):
        first, count = chance.randrange(SLOTS), chance.randint(1, 6)
        given = (
            range(first, min(first + count, SLOTS))
            if chance.random() < 0.5
            else chance.sample(range(SLOTS), count)
        )
        next_lease += chance.randint(0, 2)
        for lease, slot in enumerate(given, next_lease):
            table.leases[slot] = lease
        log.add(next_lease, given)
        slots = {lease: slot for lease, slot in slots.items() if slot not in given}
        slots.update(enumerate(given, next_lease))
        next_lease += len(given)
        asked = range(max(1, next_lease - 200), next_lease + 5)
        assert [log.slot(lease) for lease in asked] == [slots.get(lease, -1) for lease in asked]
        some = range(begin := chance.choice(asked), begin + chance.randint(1, 6))
        if (found := log.slots(some)) is not None:
            assert list(found) == [slots.get(lease) for lease in some]
        given_last = range(next_lease - len(given), next_lease)
        assert list(log.slots(given_last) or ()) == list(given)
    assert len(log) < 4 * SLOTS
    again = LeaseLog(table)
    again.restore(sorted(slots), [slots[lease] for lease in sorted(slots)])
    assert all(again.slot(lease) == slot for lease, slot in slots.items())
