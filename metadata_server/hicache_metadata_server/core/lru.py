"""LRU order of the live pages, their prefix reference counts, and the choice of pages to evict."""

from __future__ import annotations

import heapq
import sys
from array import array
from functools import cache
from itertools import compress, repeat
from operator import eq, itemgetter
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.slot_table import LIVE, as_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_metadata_server.core.slot_table import SlotTable

BITS: Final = 12
"""Bits of a stamp that count entries within a chunk."""
CHUNK: Final = 1 << BITS
"""Entries of a chunk."""
_NONE: Final = array("Q")
SHORT: Final = 256 if sys.byteorder == "little" else 0
"""Most integers that `_descending` computes together."""


class LruOrder:
    """A queue of slots in LRU order, to which each use of a page appends its slot again.

    The stamp of a slot is the position of its last use: number of the chunk, and index in it. An
    entry whose slot has another stamp is outdated. With each new chunk, chunks that hold only
    outdated entries are dropped. If more than half of all entries are outdated, two chunks are
    cleaned.

    A page that other pages name as their prefix, or that is pinned, cannot be evicted. The search
    for a victim skips such a page: `_head` moves behind its entry, so no later search meets it
    again. When its last child goes, the page enters a heap. Each eviction is O(log n), amortized.
    Skipped pages are older than all others.
    """

    __slots__ = (
        "_chunks",
        "_current",
        "_entries",
        "_head",
        "_last",
        "_latest",
        "_pages",
        "_predecessor",
        "_ready",
        "_table",
        "_uncleaned",
    )

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._pages = 0
        self._entries = 0
        # From 1, so that stamp 0 means "not in the queue".
        self._last = 1
        self._chunks: dict[int, array[int]] = {1: array("Q")}
        self._current = {1: 0}
        """Entries of each chunk that are neither outdated nor before `_head`."""
        self._latest = range(0)
        """Slots that were appended last, if they are neighbours."""
        self._head: int = CHUNK
        """Stamp behind the last entry that a search has skipped or evicted."""
        self._ready: list[tuple[int, int]] = []
        """Heap of skipped pages that can be evicted now, as stamp and slot; entries may be
        outdated."""
        self._uncleaned: list[int] = []
        """Chunks to be cleaned in this round, in descending order."""
        self._predecessor = 0
        """Chunk that was cleaned last."""

    def __len__(self) -> int:
        return self._pages

    def __iter__(self) -> Iterator[str]:
        table = self._table
        live = [slot for slot, state in enumerate(table.states) if state == LIVE]
        yield from (table.keys[slot] for slot in sorted(live, key=table.stamps.__getitem__))

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
        stamps, run = self._table.stamps, slots if isinstance(slots, range) else as_run(slots)
        if isinstance(run, range):
            if run.start == self._latest.start and run.stop <= self._latest.stop:
                # These entries are the last ones already: a client often asks for the same batch
                # twice, first for existence and then for slots.
                return
            old = stamps[run.start : run.stop]
            if old == _descending(old[-1], len(old)):
                # Used together before: the first and the last stamp tell all others.
                self._outdate((old[-1], old[0]), len(old))
            else:
                self._outdate(old, len(old))
        else:
            # Slots are used from the last to the first, so the first occurrence is the latest use.
            run = run if len(set(run)) == len(run) else list(dict.fromkeys(run))
            self._outdate([stamps[slot] for slot in run], len(run))
        self._append(run)

    def add(self, slots: Sequence[int]) -> None:
        """Add pages that have become live, from the last slot to the first."""
        self._pages += len(slots)
        self._append(as_run(slots))

    def restore(self, slots: Sequence[int]) -> None:
        """Fill an empty queue with live pages, the least recently used first."""
        stamps = self._table.stamps
        for start in range(0, len(slots), CHUNK):
            self._begin_chunk()
            part = array("Q", slots[start : start + CHUNK])
            for stamp, slot in enumerate(part, self._last << BITS):
                stamps[slot] = stamp
            self._put(part)
        self._pages += len(slots)

    def remove(self, slot: int) -> None:
        """Remove a page that is no longer live."""
        stamps = self._table.stamps
        # Entries before `_head` are not counted any more.
        if (stamp := stamps[slot]) >= self._head:
            self._current[stamp >> BITS] -= 1
        stamps[slot] = 0
        self._pages -= 1

    def clear(self) -> None:
        """Remove all pages. Their stamps stay, and are reset when the clear reaches the slots."""
        # A new chunk number makes all old stamps outdated without a loop over the pages.
        self._last += 1
        self._chunks = {self._last: array("Q")}
        self._current = {self._last: 0}
        self._latest = range(0)
        self._head = self._last << BITS
        self._ready = []
        self._uncleaned = []
        self._pages = 0
        self._entries = 0

    def became_leaf(self, slot: int) -> None:
        """Note that no live page names this live page as its prefix any more."""
        # A page that no search has skipped is still ahead in the queue.
        if (stamp := self._table.stamps[slot]) < self._head:
            heapq.heappush(self._ready, (stamp, slot))

    def victims(
        self, wanted: int, is_pinned: Callable[[int], bool], evict: Callable[[int], None]
    ) -> int:
        """Evict up to `wanted` pages by `evict`, the least recently used first; returns their
        number."""
        gone, pinned = 0, list[tuple[int, int]]()
        while gone < wanted:
            # Skipped pages first: all of them are older than the pages ahead in the queue.
            slot = self._oldest_skipped(is_pinned, pinned)
            if slot < 0:
                slot = self._oldest_in_order(is_pinned, pinned)
            if slot < 0:
                break
            evict(slot)
            gone += 1
        # Pinned pages go back to the heap only now, or this search would meet them again.
        for entry in pinned:
            heapq.heappush(self._ready, entry)
        return gone

    def unreachable(self) -> Iterator[int]:
        """Live pages that no search would find: none, unless there is a defect. O(n), for fsck."""
        table, ready = self._table, set(self._ready)
        for slot, state in enumerate(table.states):
            if state == LIVE:
                stamp = table.stamps[slot]
                chunk, place = self._chunks.get(stamp >> BITS, _NONE), stamp & CHUNK - 1
                queued = stamp >= self._head and place < len(chunk) and chunk[place] == slot
                if not queued and (
                    stamp >= self._head or (not table.children[slot] and (stamp, slot) not in ready)
                ):
                    yield slot

    # The search.

    def _oldest_skipped(
        self, is_pinned: Callable[[int], bool], pinned: list[tuple[int, int]]
    ) -> int:
        stamps, children = self._table.stamps, self._table.children
        while self._ready:
            stamp, slot = self._ready[0]
            if stamps[slot] == stamp and not children[slot]:
                if not is_pinned(slot):
                    return slot
                pinned.append((stamp, slot))
            heapq.heappop(self._ready)
        return -1

    def _oldest_in_order(
        self, is_pinned: Callable[[int], bool], pinned: list[tuple[int, int]]
    ) -> int:
        children, stamps, chunks = self._table.children, self._table.stamps, self._chunks
        while True:
            chunk, place = chunks.get(self._head >> BITS, _NONE), self._head & CHUNK - 1
            # The next entry is current in nearly all cases, so it is tried before the search.
            slot = (
                chunk[place]
                if place < len(chunk) and stamps[chunk[place]] == self._head
                else self._front()
            )
            if slot < 0:
                return -1
            stamp = self._head
            self._head += 1
            self._current[stamp >> BITS] -= 1
            # A page with children needs no entry elsewhere: `became_leaf` puts it into the heap.
            if children[slot]:
                continue
            if not is_pinned(slot):
                return slot
            pinned.append((stamp, slot))

    def _front(self) -> int:
        """Move `_head` to the first current entry, and return its slot, or -1."""
        stamps, chunks, head = self._table.stamps, self._chunks, self._head
        while (number := head >> BITS) <= self._last:
            if number not in chunks:
                oldest = next(iter(chunks))
                if oldest < number:
                    # The search is at the end of a full chunk, and the next number has no chunk.
                    self._drop(oldest)
                    continue
                number, head = oldest, oldest << BITS
            chunk, first = chunks[number], number << BITS
            for place in range(head - first, len(chunk)):
                slot = chunk[place]
                if stamps[slot] == first + place:
                    self._head = first + place
                    return slot
            head = self._head = first + len(chunk)
            if number == self._last:
                break
            self._drop(number)
        return -1

    # The queue.

    @property
    def _end(self) -> int:
        """Stamp of the next entry, unless it begins a chunk."""
        return (self._last << BITS) + len(self._chunks[self._last])

    def _append(self, slots: Sequence[int]) -> None:
        """Append slots of live pages, each once, from the last to the first."""
        stamps = self._table.stamps
        self._latest = slots if isinstance(slots, range) else range(0)
        for end in range(len(slots), 0, -CHUNK):
            part = slots[max(0, end - CHUNK) : end]
            if len(self._chunks[self._last]) + len(part) > CHUNK:
                self._begin_chunk()
            new = _descending(self._end, len(part))
            if isinstance(part, range):
                stamps[part.start : part.stop] = new
                self._put(_descending(part.start, len(part)))
            else:
                for slot, stamp in zip(part, new, strict=True):
                    stamps[slot] = stamp
                self._put(array("Q", part[::-1]))

    def _put(self, entries: array[int]) -> None:
        self._chunks[self._last].extend(entries)
        self._current[self._last] += len(entries)
        self._entries += len(entries)

    def _outdate(self, stamps: Sequence[int], count: int) -> None:
        """Count `count` entries as outdated.

        Args:
            stamps: their stamps, or the least and the greatest of neighbours.
            count: number of the entries.
        """
        first, head, current = min(stamps), self._head, self._current
        if first >= head and first >> BITS == max(stamps) >> BITS:
            # One chunk in the usual case: the pages were used together before.
            current[first >> BITS] -= count
            return
        for stamp in stamps if len(stamps) == count else range(first, first + count):
            if stamp >= head:
                current[stamp >> BITS] -= 1

    def _drop(self, number: int) -> None:
        self._entries -= len(self._chunks.pop(number))
        del self._current[number]

    def _begin_chunk(self) -> None:
        for number in [number for number, count in self._current.items() if not count]:
            self._drop(number)
        self._last += 1
        self._chunks[self._last] = array("Q")
        self._current[self._last] = 0
        # Two chunks are cleaned for each new one, so entries stay bounded by the number of pages.
        if self._entries > 2 * (self._pages + CHUNK):
            self._clean_chunk()
            self._clean_chunk()

    def _clean_chunk(self) -> None:
        """Remove outdated entries of the next chunk, and merge it into the one before if both are
        small."""
        if not self._uncleaned:
            self._uncleaned = list(reversed(self._chunks))
            self._predecessor = 0
        number = self._uncleaned.pop()
        chunk = self._chunks.get(number)
        if chunk is None or number == self._last or number <= self._head >> BITS:
            return
        # The caller may have counted entries as outdated whose stamps it has not changed yet. They
        # are kept here, and their counts are right.
        stamps, first = self._table.stamps, number << BITS
        kept = array(
            "Q",
            compress(
                chunk, map(eq, map(stamps.__getitem__, chunk), range(first, first + len(chunk)))
            ),
        )
        self._entries -= len(chunk) - len(kept)
        before = self._chunks.get(self._predecessor)
        if (
            before is not None
            and self._predecessor > self._head >> BITS
            and len(before) + len(kept) <= CHUNK
        ):
            first = (self._predecessor << BITS) + len(before)
            before.extend(kept)
            self._current[self._predecessor] += self._current.pop(number)
            del self._chunks[number]
        else:
            # Under its own number: chunks are in the order of their numbers.
            self._chunks[number] = kept
            self._predecessor = number
        for stamp, slot in enumerate(kept, first):
            stamps[slot] = stamp


def _descending(last: int, count: int) -> array[int]:
    """Consecutive integers in descending order, the last of which is `last`."""
    if count > SHORT:
        return array("Q", range(last + count - 1, last - 1, -1))
    # One multiplication for all of them, in a tenth of the time of a loop.
    steps, ones = _digits(count)
    return array("Q", (steps + last * ones).to_bytes(8 * count, "little"))


@cache
def _digits(count: int) -> tuple[int, int]:
    """Integers whose digits of 64 bits are `count - 1` to 0, and `count` times 1."""
    return (
        sum(count - 1 - i << 64 * i for i in range(count)),
        sum(1 << 64 * i for i in range(count)),
    )


class PrefixRefs:
    """Counts of the live pages that name a page as their prefix.

    They are in the slot table for live prefixes, and by key for prefixes that are not live. A page may be committed before its prefix, so counts exist before the prefix does.
    """

    __slots__ = ("_lru", "_table", "pending")

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
