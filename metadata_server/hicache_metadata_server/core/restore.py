"""Restoring a scope from the blocks of a store.

Slots that contradict each other are quarantined and reported: after a loss of power, blocks of a
store may differ in age.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache_metadata_server.core.blocks import BLOCK
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.core.blocks import SlotBlock
    from hicache_metadata_server.core.scope import Scope


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


def restore(
    scope: Scope, blocks: Iterable[tuple[int, SlotBlock]], now: float, max_seconds: float
) -> list[str]:
    """Fill a new scope whose `epoch`, `cleared_until` and pins are set; returns contradictions.

    No lease and no quarantine lasts longer than `max_seconds` from now, because the clock may have
    been set back. The LRU order is not durable: pages count as used in the order of their leases.

    Args:
        scope: to be filled.
        blocks: its blocks, by their numbers.
        now: current time.
        max_seconds: of a lease and a quarantine together.
    """
    return _Restoring(scope, now, max_seconds).run(blocks)


class _Restoring:
    def __init__(self, scope: Scope, now: float, max_seconds: float) -> None:
        self.scope = scope
        self.now = now
        self.latest = now + max_seconds
        self.problems: list[str] = []

    def run(self, blocks: Iterable[tuple[int, SlotBlock]]) -> list[str]:
        for number, block in blocks:
            self._place_block(number * BLOCK, block)
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

    def _place_block(self, first: int, block: SlotBlock) -> None:
        table, slots = self.scope.table, self.scope.geometry.slots
        used = [place for place in range(BLOCK) if block.states[place] or block.generations[place]]
        if not used:
            return
        begin, end = used[0], used[-1] + 1
        # A damaged block may be far outside the scope.
        size = min(first + end, slots) if first < slots else 0
        if size > len(table):
            table.grow(size - len(table))
        keys = block.keys[begin:end]
        if (
            not self._is_uniform(block, begin, end)
            or first + end > slots
            or len(set(keys)) < len(keys)
            or not table.by_key.keys().isdisjoint(keys)
        ):
            for place in used:
                self._place(_row(block, first, place))
            return
        # Whole slices for the blocks that are nearly all of a store with millions of pages.
        run = range(first + begin, first + end)
        table.states[run.start : run.stop] = block.states[begin:end]
        for column, values in (
            (table.generations, block.generations),
            (table.leases, block.leases),
            (table.lengths, block.lengths),
            (table.checksums, block.checksums),
        ):
            column[run.start : run.stop] = values[begin:end]
        table.keys[run.start : run.stop] = keys
        table.prefixes[run.start : run.stop] = block.prefixes[begin:end]
        table.by_key.update(zip(keys, run, strict=True))

    def _is_uniform(self, block: SlotBlock, begin: int, end: int) -> bool:
        """True if all are live pages of this epoch without contradictions."""
        return (
            block.states.count(LIVE, begin, end) == end - begin
            and set(block.epochs[begin:end]) == {self.scope.epoch}
            and all(block.keys[begin:end])
            and min(block.leases[begin:end]) > 0
            and min(block.generations[begin:end]) > 0
        )

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


def _row(block: SlotBlock, first: int, place: int) -> SlotRow:
    return SlotRow(
        first + place,
        block.epochs[place],
        block.states[place],
        block.generations[place],
        block.keys[place],
        block.prefixes[place],
        block.owners.get(place, ""),
        block.leases[place],
        block.until[place],
        block.lengths[place],
        block.checksums[place],
    )
