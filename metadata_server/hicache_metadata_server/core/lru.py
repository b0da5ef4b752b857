"""LRU order of the live pages, their prefix reference counts, and the choice of pages to evict."""

from __future__ import annotations

import heapq
import itertools
import sys
from array import array
from functools import cache
from itertools import pairwise, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.slot_table import LIVE, as_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_metadata_server.core.slot_table import SlotTable

NONE: Final = -1
"""Link of the first and of the last page."""
SHORT: Final = 256 if sys.byteorder == "little" else 0
"""Most integers that `_ascending` computes together."""


class LruOrder:
    """A linked list of slots in LRU order, whose links are columns of the slot table.

    Pages that were used together follow each other in the list. Their next use moves all of them at
    once: one comparison of slices finds that they do.

    A page that other pages name as their prefix cannot be evicted. The search for a victim takes such
    a page out of the list and gives it a number, so no later search meets it again. Skipped pages are older than all others, in the order of their numbers. When the last child
    of one goes, it enters a heap. Each eviction is O(log n), amortized.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._pages = 0
        self._oldest = NONE
        self._newest = NONE
        self._numbers = itertools.count()
        """Numbers of skipped pages. `older` of a skipped page is `_skipped` of its number."""
        self._ready: list[tuple[int, int]] = []
        """Heap of skipped pages that can be evicted now, as number and slot; entries may be
        outdated."""

    def __len__(self) -> int:
        return self._pages

    def __iter__(self) -> Iterator[str]:
        older, keys = self._table.older, self._table.keys
        live = [slot for slot, state in enumerate(self._table.states) if state == LIVE]
        skipped = [slot for slot in live if older[slot] < NONE]
        yield from (keys[slot] for slot in sorted(skipped, key=older.__getitem__, reverse=True))
        yield from (keys[slot] for slot in self._listed())

    def slot(self, key: str) -> int:
        """Slot of a live page, or -1."""
        slot = self._table.by_key.get(key, -1)
        return slot if slot >= 0 and self._table.states[slot] == LIVE else -1

    def slots(self, keys: Sequence[str]) -> list[int]:
        """Slots of pages, -1 for those that are not live."""
        by_key, states = self._table.by_key, self._table.states
        try:
            # Mostly all are there: one call in place of one for each key.
            slots = list(itemgetter(*keys)(by_key)) if len(keys) > 1 else [by_key[keys[0]]]
        except LookupError:
            slots = list(map(by_key.get, keys, repeat(-1)))
        # Index -1, of a missing key, reads the state of the last slot. That is harmless: a missing
        # key stays -1, whichever way this is decided.
        if self._pages == len(by_key) or bytes(map(states.__getitem__, slots)).count(LIVE) == len(
            slots
        ):
            return slots
        return [slot if slot >= 0 and states[slot] == LIVE else -1 for slot in slots]

    def used(self, keys: Sequence[str]) -> Sequence[int]:
        """Return the same as `slots`, and mark pages as used, from the last key to the first.

        A range for pages in neighbouring slots: the caller selects slices of columns with it.
        """
        slots = as_run(self.slots(keys))
        if -1 in slots:
            slots = list(slots)
            self.use([slot for slot in slots if slot >= 0])
        else:
            self.use(slots)
        return slots

    def use(self, slots: Sequence[int]) -> None:
        """Mark live pages as used, from the last slot to the first."""
        if not slots:
            return
        newer, run = self._table.newer, slots if isinstance(slots, range) else as_run(slots)
        if isinstance(run, range):
            first, last = run.start, run[-1]
            if len(run) > 1 and newer[first + 1 : last + 1] == _ascending(first, last - first):
                self._move(last, first)
                return
        # Slots are used from the last to the first, so the first occurrence is the latest use.
        order = list(dict.fromkeys(run))[::-1]
        next_ones = list(map(newer.__getitem__, order))
        begin = 0
        for end in range(1, len(order) + 1):
            if end == len(order) or next_ones[end - 1] != order[end]:
                self._move(order[begin], order[end - 1])
                begin = end

    def add(self, slots: Sequence[int]) -> None:
        """Add pages that have become live, from the last slot to the first."""
        run = as_run(slots)
        if not isinstance(run, range):
            self.restore(run[::-1])
            return
        first, last = run.start, run[-1]
        self._pages += len(run)
        self._table.newer[first + 1 : last + 1] = _ascending(first, last - first)
        self._table.older[first:last] = _ascending(first + 1, last - first)
        self._append(last, first)

    def restore(self, slots: Sequence[int]) -> None:
        """Add live pages, the least recently used first."""
        newer, older = self._table.newer, self._table.older
        for slot, after in pairwise(slots):
            newer[slot] = after
            older[after] = slot
        if slots:
            self._pages += len(slots)
            self._append(slots[0], slots[-1])

    def remove(self, slot: int) -> None:
        """Remove a page that is no longer live."""
        self._pages -= 1
        if self._table.older[slot] >= NONE:
            self._unlink(slot, slot)
        self._table.older[slot] = NONE

    def clear(self) -> None:
        """Remove all pages; their links stay."""
        self._pages = 0
        self._oldest = NONE
        self._newest = NONE
        self._ready = []

    def became_leaf(self, slot: int) -> None:
        """Note that no live page names this live page as its prefix any more."""
        # A page that no search has skipped is still in the list.
        if (number := _skipped(self._table.older[slot])) >= 0:
            heapq.heappush(self._ready, (number, slot))

    def victims(self) -> Iterator[int]:
        """Yield the page to evict next, the least recently used first, once the last one is gone."""
        # Skipped pages first: all of them are older than the pages in the list.
        while (slot := self._oldest_skipped()) >= 0 or (slot := self._oldest_in_order()) >= 0:
            yield slot

    def unreachable(self) -> Iterator[int]:
        """Live pages that no search would find: none, unless there is a defect. O(n), for fsck."""
        table, listed, ready = self._table, set(self._listed()), set(self._ready)
        for slot, state in enumerate(table.states):
            if state != LIVE:
                continue
            if (number := _skipped(table.older[slot])) < 0:
                found = slot in listed
            else:
                waits = bool(table.children[slot]) or (number, slot) in ready
                found = waits and slot not in listed
            if not found:
                yield slot

    # The search.

    def _oldest_skipped(self) -> int:
        older, children = self._table.older, self._table.children
        while self._ready:
            number, slot = self._ready[0]
            if older[slot] == _skipped(number) and not children[slot]:
                return slot
            heapq.heappop(self._ready)
        return -1

    def _oldest_in_order(self) -> int:
        older, children = self._table.older, self._table.children
        while (slot := self._oldest) >= 0:
            if not children[slot]:
                return slot
            # `became_leaf` puts it into the heap.
            self._unlink(slot, slot)
            older[slot] = _skipped(next(self._numbers))
            self._table.newer[slot] = NONE
        return -1

    # The list.

    def _listed(self) -> Iterator[int]:
        """Slots in the list, the least recently used first."""
        slot, newer = self._oldest, self._table.newer
        # Bounded, because fsck goes through damaged lists.
        for _ in range(len(newer)):
            if slot < 0:
                return
            yield slot
            slot = newer[slot]

    def _move(self, first: int, last: int) -> None:
        """Move pages that follow each other to the end; one page may be a skipped one."""
        if self._table.older[first] >= NONE:
            if last == self._newest:
                return
            self._unlink(first, last)
        self._append(first, last)

    def _append(self, first: int, last: int) -> None:
        newest, self._newest = self._newest, last
        self._table.older[first] = newest
        self._table.newer[last] = NONE
        if newest >= 0:
            self._table.newer[newest] = first
        else:
            self._oldest = first

    def _unlink(self, first: int, last: int) -> None:
        before, after = self._table.older[first], self._table.newer[last]
        if before >= 0:
            self._table.newer[before] = after
        else:
            self._oldest = after
        if after >= 0:
            self._table.older[after] = before
        else:
            self._newest = before


def _skipped(number: int) -> int:
    """Link for the number of a skipped page, and the number of a link; negative for other links."""
    return -2 - number


def _ascending(first: int, count: int) -> array[int]:
    """Consecutive integers."""
    if count > SHORT:
        return array("q", range(first, first + count))
    # One multiplication for all of them, in a tenth of the time of a loop.
    steps, ones = _digits(count)
    return array("q", (steps + first * ones).to_bytes(8 * count, "little"))


@cache
def _digits(count: int) -> tuple[int, int]:
    """Integers whose digits of 64 bits are 0 to `count - 1`, and `count` times 1."""
    return sum(i << 64 * i for i in range(count)), sum(1 << 64 * i for i in range(count))


class PrefixRefs:
    """Counts of the live pages that name a page as their prefix.

    They are in the slot table for live prefixes, and by key for prefixes that are not live. A page
    may be committed before its prefix, so counts exist before the prefix does.
    """

    def __init__(self, table: SlotTable, lru: LruOrder) -> None:
        self._table = table
        self._lru = lru
        self.pending: dict[str, int] = {}
        """Live pages that name a prefix which is not live, by the key of the prefix."""

    def add(self, slots: Sequence[int]) -> None:
        """Count the prefixes of pages that have become live."""
        keys, prefixes, children, pending = (
            self._table.keys,
            self._table.prefixes,
            self._table.children,
            self.pending,
        )
        if isinstance(slots, range) and not pending and not any(prefixes[slots.start : slots.stop]):
            # One look at the column for a batch without prefixes.
            return
        # First all counts that wait for these pages, then the prefixes of these: a batch may hold a
        # page before its prefix.
        for slot in slots if pending else ():
            children[slot] = pending.pop(keys[slot], 0)
        if (
            isinstance(slots, range)
            and prefixes[slots.start + 1 : slots.stop] == keys[slots.start : slots.stop - 1]
        ):
            # The usual case: a chain in neighbouring slots. The prefix of the first is elsewhere.
            for slot in slots[:-1]:
                children[slot] += 1
            slots = slots[:1]
        named = [prefixes[slot] for slot in slots]
        for slot, prefix in zip(slots, named, strict=True) if any(named) else ():
            # A page that names itself would never become a leaf.
            if prefix and prefix != keys[slot]:
                before = self._lru.slot(prefix)
                if before >= 0:
                    children[before] += 1
                else:
                    pending[prefix] = pending.get(prefix, 0) + 1

    def remove(self, slot: int) -> None:
        """Uncount the prefix of a page that is no longer live."""
        table = self._table
        key, prefix = table.keys[slot], table.prefixes[slot]
        # The children stay live, and the page may be written again.
        if children := table.children[slot]:
            self.pending[key] = children
            table.children[slot] = 0
        if not prefix or prefix == key:
            return
        before = self._lru.slot(prefix)
        if before >= 0:
            table.children[before] -= 1
            if not table.children[before]:
                self._lru.became_leaf(before)
        elif self.pending[prefix] > 1:
            self.pending[prefix] -= 1
        else:
            del self.pending[prefix]
