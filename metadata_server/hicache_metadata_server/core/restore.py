"""Restoring a scope from the columns of a store.

Slots that contradict each other are quarantined and reported: after a loss of power, blocks of a
store may differ in age.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED

if TYPE_CHECKING:
    from array import array

    from hicache_metadata_server.core.codec import SlotColumns
    from hicache_metadata_server.core.scope import Scope

_STEP: Final = 64
"""Slots that are checked together if they are live pages without contradictions, as nearly all are
in a store with millions of pages."""
MMAP_THRESHOLD: Final = -3
"""M_MMAP_THRESHOLD in glibc's malloc.h."""
LARGE_BYTES: Final = 1 << 20


class ScopeRestorer:
    """Fills a new scope whose `epoch` and `cleared_until` are set.

    No lease with its quarantine lasts longer than `max_seconds` from now, because the clock may
    have been set back. The LRU order is not durable: pages count as used in the order of their
    leases. The columns become those of the scope.
    """

    def __init__(self, scope: Scope, columns: SlotColumns, now: float, max_seconds: float) -> None:
        self.scope = scope
        self.epochs: array[int] = columns.epochs
        self.owners = columns.owners
        self.now = now
        self.latest = now + max_seconds
        slots = scope.geometry.slots
        self.problems = [
            f"slot {slot} is outside the {slots} of the scope" for slot in columns.outside
        ]
        used = min(len(columns), slots)
        while used and not (columns.states[used - 1] or columns.generations[used - 1]):
            used -= 1
        columns.fill(scope.table, used)

    def run(self) -> list[str]:
        """Fill the scope; returns contradictions, one sentence each."""
        scope, table = self.scope, self.scope.table
        for first in range(0, len(table), _STEP):
            end = min(first + _STEP, len(table))
            keys = table.keys[first:end]
            if (
                self._is_uniform(first, end)
                and len(set(keys)) == len(keys)
                and table.by_key.keys().isdisjoint(keys)
            ):
                table.by_key.update(zip(keys, range(first, end), strict=True))
                continue
            for slot in range(first, end):
                self._place(slot)
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

    def _is_uniform(self, first: int, end: int) -> bool:
        """True if all are live pages of this epoch without contradictions."""
        table = self.scope.table
        return (
            table.states.count(LIVE, first, end) == end - first
            and set(self.epochs[first:end]) == {self.scope.epoch}
            and all(table.keys[first:end])
            and min(table.leases[first:end]) > 0
            and min(table.generations[first:end]) > 0
        )

    def _place(self, slot: int) -> None:
        scope, table = self.scope, self.scope.table
        state, until, epoch = table.states[slot], table.until[slot], self.epochs[slot]
        if state in (LEASED, LIVE) and epoch != scope.epoch:
            # The clear has ended the lease without its writer, which may write until the old end.
            state, until = QUARANTINED, max(scope.cleared_until, until if state == LEASED else 0.0)
        elif state == LEASED and until <= self.now:
            state, until = QUARANTINED, until + scope.quarantine_seconds
        elif state in (LEASED, LIVE) and self._is_contradiction(slot):
            state, until = QUARANTINED, self.now + scope.quarantine_seconds
        elif state not in (FREE, LEASED, LIVE, QUARANTINED):
            self.problems.append(f"slot {slot} has the unknown state {state}")
            state, until = QUARANTINED, self.now + scope.quarantine_seconds
        if state == QUARANTINED:
            # A cleared slot may have been encoded before the clear reached it and set its end.
            until = max(until, scope.cleared_until)
            if until <= self.now:
                state = FREE
        table.states[slot] = state
        table.until[slot] = min(until, self.latest)
        if state in (LEASED, LIVE):
            table.by_key[table.keys[slot]] = slot
        else:
            table.keys[slot] = ""
            table.prefixes[slot] = ""
        if state in (LEASED, QUARANTINED):
            scope.timers.add(table.until[slot], [slot])
        if state == QUARANTINED:
            scope.in_quarantine += 1
        elif state == LEASED:
            scope.leases.held += 1
            if owner := self.owners.get(slot):
                scope.leases.owners[slot] = owner

    def _is_contradiction(self, slot: int) -> bool:
        table, problem = self.scope.table, ""
        key = table.keys[slot]
        if not key or table.leases[slot] < 1 or table.generations[slot] < 1:
            problem = "is live or leased without a key, a lease or a generation"
        elif (other := table.by_key.get(key)) is not None:
            problem = f"belongs to the key of slot {other}: {key!r}"
        if problem:
            self.problems.append(f"slot {slot} {problem}")
        return bool(problem)


def keep_large_blocks_apart() -> None:
    """Give each large block of memory its own mapping while the process runs, with glibc.

    The columns of a scope grow with its pages. By default glibc raises its threshold each time a
    mapped block is freed, so that later blocks come from the heap, where each growth leaves a hole:
    a seventh of all memory with a million pages. Setting the threshold stops that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def trim_heap() -> None:
    """Return to the kernel the memory that a recovery or a takeover needed beyond the pages.

    It takes some milliseconds, in which other threads go on.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
