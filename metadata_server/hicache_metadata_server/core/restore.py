"""Restoring a scope from the rows of a store.

Rows that contradict each other are quarantined and reported: after a loss of power, blocks of a
store may differ in age.
"""

from __future__ import annotations

from array import array
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicache_metadata_server.core.scope import Scope


BATCH: Final = 256
"""Rows that are read together. One row that differs from its neighbours slows its whole batch."""


class SlotRow(NamedTuple):
    """Durable state of a slot."""

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


class SlotRows(NamedTuple):
    """Rows as columns of one length, which are restored much faster than single rows."""

    slots: Sequence[int]
    epochs: Sequence[int]
    states: Sequence[int]
    generations: Sequence[int]
    keys: Sequence[str]
    prefixes: Sequence[str]
    owners: Sequence[str]
    leases: Sequence[int]
    until: Sequence[float]
    lengths: Sequence[int]
    checksums: Sequence[int]

    def uniform(self, epoch: int) -> bool:
        """True if all are live pages of one epoch in neighbouring slots, without contradictions."""
        return (
            set(self.states) == {LIVE}
            and set(self.epochs) == {epoch}
            and list(self.slots) == list(range(self.slots[0], self.slots[0] + len(self.slots)))
            and all(self.keys)
            and min(self.leases) > 0
            and min(self.generations) > 0
        )


def rows_from(rows: Iterable[SlotRow], most: int = BATCH) -> Iterator[SlotRows]:
    """Convert rows to columns, `most` rows at a time."""
    source = iter(rows)
    while some := list(islice(source, most)):
        yield SlotRows(*zip(*some, strict=True))


def restore(scope: Scope, batches: Iterable[SlotRows], now: float, max_seconds: float) -> list[str]:
    """Fill a new scope whose `epoch`, `cleared_until` and pins are set; returns contradictions.

    No lease and no quarantine lasts longer than `max_seconds` from now, because the clock may have
    been set back. The LRU order is not durable: pages count as used in the order of their leases.
    """
    return _Restoring(scope, now, max_seconds).run(batches)


class _Restoring:
    def __init__(self, scope: Scope, now: float, max_seconds: float) -> None:
        self.scope = scope
        self.now = now
        self.latest = now + max_seconds
        self.problems: list[str] = []

    def run(self, batches: Iterable[SlotRows]) -> list[str]:
        for batch in batches:
            self._place_batch(batch)
        scope, table = self.scope, self.scope.table
        slots = sorted(table.by_key.values(), key=table.leases.__getitem__)
        find, keys, prefixes = table.by_key.get, table.keys, table.prefixes
        for slot in slots:
            # One object for both texts: with long chains, prefixes would double the memory of keys.
            if prefixes[slot] and (before := find(prefixes[slot])) is not None:
                prefixes[slot] = keys[before]
        scope.leases.log.restore([table.leases[slot] for slot in slots], slots)
        live = [slot for slot in slots if table.states[slot] == LIVE]
        scope.lru.restore(live)
        # After the LRU order, in which the counts look up prefixes.
        scope.prefix_refs.add(live)
        scope.free.add([slot for slot, state in enumerate(table.states) if state == FREE])
        return self.problems

    def _place_batch(self, batch: SlotRows) -> None:
        table, slots = self.scope.table, self.scope.geometry.slots
        most = max((slot for slot in batch.slots if slot < slots), default=-1)
        if most >= len(table):
            table.grow(most + 1 - len(table))
        known = len(set(batch.keys)) < len(batch.keys) or not table.by_key.keys().isdisjoint(
            batch.keys
        )
        if (
            known
            or not batch.uniform(self.scope.epoch)
            or not 0 <= batch.slots[0] <= batch.slots[-1] == most
        ):
            for row in map(SlotRow, *batch):
                self._place(row)
            return
        # Whole slices for uniform batches, which are nearly all of a store with millions of pages.
        first, end = batch.slots[0], most + 1
        table.states[first:end] = bytes(batch.states)
        for column, values in (
            (table.generations, batch.generations),
            (table.leases, batch.leases),
            (table.lengths, batch.lengths),
            (table.checksums, batch.checksums),
        ):
            column[first:end] = array("Q", values)
        table.keys[first:end] = batch.keys
        table.prefixes[first:end] = batch.prefixes
        table.by_key.update(zip(batch.keys, batch.slots, strict=True))

    def _place(self, row: SlotRow) -> None:
        scope, slot = self.scope, row.slot
        if not 0 <= slot < scope.geometry.slots:
            self.problems.append(f"slot {slot} is outside the {scope.geometry.slots} of the scope")
            return
        table = scope.table
        table.generations[slot] = row.generation
        table.leases[slot] = row.lease
        state, until = row.state, row.until
        if state in (LEASED, LIVE) and row.epoch != scope.epoch:
            # The clear has ended the lease without its writer, which may write until the old end.
            state, until = QUARANTINED, max(scope.cleared_until, until if state == LEASED else 0.0)
        elif state == LEASED and until <= self.now:
            state, until = QUARANTINED, until + scope.quarantine_seconds
        elif state in (LEASED, LIVE) and self._is_contradiction(row):
            state, until = QUARANTINED, self.now + scope.quarantine_seconds
        elif state not in (FREE, LEASED, LIVE, QUARANTINED):
            self.problems.append(f"slot {slot} has the unknown state {state}")
            state, until = QUARANTINED, self.now + scope.quarantine_seconds
        if state == QUARANTINED:
            # A cleared slot may have been encoded before the clear reached it and set its end.
            until = max(until, scope.cleared_until)
            if until <= self.now and not scope.is_pinned(slot, self.now):
                state = FREE
        table.states[slot] = state
        table.until[slot] = min(until, self.latest)
        if state == QUARANTINED:
            scope.in_quarantine += 1
            scope.timers.add(table.until[slot], [slot])
        elif state in (LEASED, LIVE):
            self._own(row)

    def _is_contradiction(self, row: SlotRow) -> bool:
        problem = ""
        if not row.key or row.lease < 1 or row.generation < 1:
            problem = "is live or leased without a key, a lease or a generation"
        elif (other := self.scope.table.by_key.get(row.key)) is not None:
            problem = f"belongs to the key of slot {other}: {row.key!r}"
        if problem:
            self.problems.append(f"slot {row.slot} {problem}")
        return bool(problem)

    def _own(self, row: SlotRow) -> None:
        scope, table, slot = self.scope, self.scope.table, row.slot
        table.keys[slot] = row.key
        table.prefixes[slot] = row.prefix
        table.by_key[row.key] = slot
        if table.states[slot] == LIVE:
            table.lengths[slot] = row.length
            table.checksums[slot] = row.checksum
            return
        scope.leases.held += 1
        if row.owner:
            scope.leases.owners[slot] = row.owner
        scope.timers.add(table.until[slot], [slot])
