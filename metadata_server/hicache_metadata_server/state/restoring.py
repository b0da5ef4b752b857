"""A scope as it was written down: rows in, and out again."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 - msgspec reads the annotations of the columns
from itertools import islice, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hicache_metadata_server.state.slots import FREE, LEASED, LIVE, QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hicache_metadata_server.state.scope import Scope


BATCH: Final = 8192


class SlotRow(NamedTuple):
    """What a restart must know of a slot."""

    slot: int
    epoch: int
    state: int
    generation: int
    key: str
    prefix: str
    owner: str
    lease: int
    until: float
    length: int
    checksum: int


class SlotColumns(NamedTuple):
    """The same of several slots, each column as long as `slots`."""

    epoch: int
    slots: Sequence[int]
    states: Sequence[int]
    generations: Sequence[int]
    keys: Sequence[str]
    prefixes: Sequence[str]
    owners: Sequence[str]
    leases: Sequence[int]
    until: Sequence[float]
    lengths: Sequence[int]
    checksums: Sequence[int]


def columns_of(scope: Scope, slots: Sequence[int]) -> SlotColumns:
    """The columns of some slots that were used, each of them once and in ascending order."""
    table, owners = scope.table, scope.leases.owners
    first, end = slots[0], slots[-1] + 1
    pick: Callable[[Any], Any]
    # Either is several times as fast as a loop over the slots.
    if end - first == len(slots):
        pick = lambda column: list(column[first:end])  # noqa: E731 - next to its other form
    else:
        pick = itemgetter(*slots)
    named = [owners.get(slot, "") for slot in slots] if owners else [""] * len(slots)
    return SlotColumns(
        scope.epoch, slots, pick(table.states), pick(table.generations), pick(table.keys), pick(table.prefixes), named,
        pick(table.leases), pick(table.until), pick(table.lengths), pick(table.checksums),
    )  # fmt: skip


def rows_of(columns: SlotColumns) -> Iterator[SlotRow]:
    """Columns as rows."""
    epoch, slots, *others = columns
    return map(SlotRow, slots, repeat(epoch), *others)


def restore(scope: Scope, rows: Iterable[SlotRow], now: float, most_lease_seconds: float) -> list[str]:
    """Fill a new scope; `epoch`, `cleared_until` and pins are set already. Returns what contradicts itself and was left out.

    Pages are taken to have been used in the order in which their leases were given: use itself is not written down.
    """
    return _Restoring(scope, now, most_lease_seconds).run(rows)


class _Restoring:
    def __init__(self, scope: Scope, now: float, most_lease_seconds: float) -> None:
        self.scope, self.now, self.latest = scope, now, now + most_lease_seconds
        self.problems: list[str] = []
        self.owners: dict[str, int] = {}
        """Slots of live and leased keys."""

    def run(self, rows: Iterable[SlotRow]) -> list[str]:
        source = iter(rows)
        while batch := list(islice(source, BATCH)):
            self._place_batch(batch)
        scope, table = self.scope, self.scope.table
        slots = sorted(self.owners.values(), key=table.leases.__getitem__)
        find, keys, prefixes = self.owners.get, table.keys, table.prefixes
        for slot in slots:
            # A prefix that is a page's key is kept once.
            if prefixes[slot] and (before := find(prefixes[slot])) is not None:
                prefixes[slot] = keys[before]
        scope.leases.log.restore([table.leases[slot] for slot in slots], slots)
        live = [slot for slot in slots if table.states[slot] == LIVE]
        scope.recency.order.update(zip([keys[slot] for slot in live], live, strict=True))
        scope.chains.joined(live)
        scope.free.add([slot for slot, state in enumerate(table.states) if state == FREE])
        return self.problems

    def _place_batch(self, batch: list[SlotRow]) -> None:
        table, epoch = self.scope.table, self.scope.epoch
        most = max((row.slot for row in batch if row.slot < self.scope.geometry.slots), default=-1)
        if most >= len(table):
            table.grow(most + 1 - len(table))
        live = [
            row for row in batch if row.state == LIVE and row.epoch == epoch and row.key and row.lease > 0 and row.generation > 0
        ]
        keys = [row.key for row in live]
        if (
            len(set(keys)) < len(keys)
            or not self.owners.keys().isdisjoint(keys)
            or not 0 <= min(batch).slot <= max(batch).slot == most
        ):
            live = []
        for slot, _, _, generation, key, prefix, _, lease, _, length, checksum in live:
            table.states[slot], table.generations[slot], table.leases[slot] = LIVE, generation, lease
            table.lengths[slot], table.checksums[slot] = length, checksum
            table.keys[slot], table.prefixes[slot] = key, prefix
        self.owners.update(zip(keys, [row.slot for row in live], strict=False))
        if len(live) < len(batch):
            placed = {row.slot for row in live}
            for row in batch:
                if row.slot not in placed:
                    self._place(row)

    def _place(self, row: SlotRow) -> None:
        scope, slot = self.scope, row.slot
        if not 0 <= slot < scope.geometry.slots:
            self.problems.append(f"slot {slot} is outside the {scope.geometry.slots} of the scope")
            return
        table = scope.table
        table.generations[slot], table.leases[slot] = row.generation, row.lease
        state, until = row.state, row.until
        if state in (LEASED, LIVE) and row.epoch != scope.epoch:
            state, until = QUARANTINED, scope.cleared_until
        elif state == LEASED and until <= self.now:
            state, until = QUARANTINED, until + scope.quarantine_seconds
        elif state in (LEASED, LIVE) and self._is_contradiction(row):
            state, until = QUARANTINED, self.now + scope.quarantine_seconds
        elif state not in (FREE, LEASED, LIVE, QUARANTINED):
            self.problems.append(f"slot {slot} is in no state that there is: {state}")
            state, until = QUARANTINED, self.now + scope.quarantine_seconds
        if state == QUARANTINED:
            # A slot that was cleared may have been written down before it was told when its quarantine ends.
            until = max(until, scope.cleared_until)
            if until <= self.now and not scope.is_pinned(slot, self.now):
                state = FREE
        table.states[slot], table.until[slot] = state, min(until, self.latest)
        if state == QUARANTINED:
            scope.resting += 1
            scope.timers.add(table.until[slot], [slot])
        elif state in (LEASED, LIVE):
            self._own(row)

    def _is_contradiction(self, row: SlotRow) -> bool:
        problem = ""
        if not row.key or row.lease < 1 or row.generation < 1:
            problem = "is live or leased without a key, a lease or a generation"
        elif (other := self.owners.get(row.key)) is not None:
            problem = f"belongs to the key of slot {other}: {row.key!r}"
        if problem:
            self.problems.append(f"slot {row.slot} {problem}")
        return bool(problem)

    def _own(self, row: SlotRow) -> None:
        scope, table, slot = self.scope, self.scope.table, row.slot
        table.keys[slot], table.prefixes[slot] = row.key, row.prefix
        self.owners[row.key] = slot
        if table.states[slot] == LIVE:
            table.lengths[slot], table.checksums[slot] = row.length, row.checksum
            return
        scope.leases.by_key[row.key] = scope.leases.by_number[row.lease] = slot
        if row.owner:
            scope.leases.owners[slot] = row.owner
        scope.timers.add(table.until[slot], [slot])
