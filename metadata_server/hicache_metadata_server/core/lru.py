"""Live pages in the order of their use, and which of them goes next."""

from __future__ import annotations

import heapq
from array import array
from itertools import compress, repeat
from operator import eq
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.slot_table import LIVE, as_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_metadata_server.core.slot_table import SlotTable

BITS: Final = 12
CHUNK: Final = 1 << BITS
_NONE: Final = array("Q")


class LruOrder:
    """A queue of slots, the least recently used first, to which each use of a page appends its slot
    again.

    A slot's stamp is the place of its last use: number of the chunk and place within it. An entry
    that is not where its slot's stamp points is outdated. With each new chunk those that hold
    nothing else are dropped, and where more than half of all entries are outdated, two are tidied.

    A page that others build upon, or that is pinned, cannot go. Where the search for a victim meets
    one it sets it aside, by going on behind it, so that no later search meets it again before it
    was used: each eviction is O(log n), amortized. All that was set aside is older than all the
    rest.
    """

    __slots__ = (
        "_chunks",
        "_current",
        "_entries",
        "_head",
        "_last",
        "_pages",
        "_predecessor",
        "_ready",
        "_table",
        "_untidy",
    )

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._pages = self._entries = 0
        # From 1, so that a stamp of 0 is none.
        self._last = 1
        self._chunks: dict[int, array[int]] = {1: array("Q")}
        self._current = {1: 0}
        """Entries of each chunk that are not outdated, and from `_head` on."""
        self._head: int = CHUNK
        """Behind the last entry that a search has set aside or let go."""
        self._ready: list[tuple[int, int]] = []
        """Of those aside, the ones that may go now: the stamp and the slot of each; entries may be
        outdated."""
        self._untidy: list[int] = []
        """Chunks that are still to be tidied in this round, in descending order."""
        self._predecessor = 0
        """The chunk that was tidied last."""

    def __len__(self) -> int:
        return self._pages

    def __iter__(self) -> Iterator[str]:
        table = self._table
        live = [slot for slot, state in enumerate(table.states) if state == LIVE]
        yield from (table.keys[slot] for slot in sorted(live, key=table.stamps.__getitem__))

    def slot(self, key: str) -> int:
        """The slot of a live page, or -1."""
        slot = self._table.by_key.get(key, -1)
        return slot if slot >= 0 and self._table.states[slot] == LIVE else -1

    def slots(self, keys: Sequence[str]) -> list[int]:
        """The slots of pages, -1 for those that are not live."""
        by_key, states = self._table.by_key, self._table.states
        slots = list(map(by_key.get, keys, repeat(-1)))
        # A key that is not there takes the state of the last slot, whatever that is.
        if self._pages == len(by_key) or bytes(map(states.__getitem__, slots)).count(LIVE) == len(
            slots
        ):
            return slots
        return [slot if slot >= 0 and states[slot] == LIVE else -1 for slot in slots]

    def used(self, keys: Sequence[str]) -> list[int]:
        """The same as `slots`, and counts as use, from the last key to the first."""
        slots = self.slots(keys)
        self.use([slot for slot in slots if slot >= 0] if -1 in slots else slots)
        return slots

    def touch(self, keys: Sequence[str]) -> None:
        """Count as use, from the last key to the first."""
        self.used(keys)

    def use(self, slots: Sequence[int]) -> None:
        """Slots of live pages were used, from the last to the first."""
        if not slots:
            return
        stamps, run = self._table.stamps, as_run(slots)
        if isinstance(run, range):
            old, end = stamps[run.start : run.stop], self._end
            if old[0] == end - 1 and old == array("Q", range(end - 1, end - len(old) - 1, -1)):
                # Often: who has asked whether pages are there asks where they are.
                return
            self._outdate(old)
        else:
            # The first of several is the last to be used.
            run = run if len(set(run)) == len(run) else list(dict.fromkeys(run))
            self._outdate([stamps[slot] for slot in run])
        self._append(run)

    def add(self, slots: Sequence[int]) -> None:
        """Pages have become live, which is use, from the last to the first."""
        self._pages += len(slots)
        self._append(as_run(slots))

    def restore(self, slots: Sequence[int]) -> None:
        """Fill an empty one with live pages, the least recently used first."""
        stamps = self._table.stamps
        for start in range(0, len(slots), CHUNK):
            self._begin_chunk()
            part = array("Q", slots[start : start + CHUNK])
            for stamp, slot in enumerate(part, self._last << BITS):
                stamps[slot] = stamp
            self._put(part)
        self._pages += len(slots)

    def remove(self, slot: int) -> None:
        """A page is live no longer."""
        stamps = self._table.stamps
        if (stamp := stamps[slot]) >= self._head:
            self._current[stamp >> BITS] -= 1
        stamps[slot] = 0
        self._pages -= 1

    def clear(self) -> None:
        """No page is live any longer. Their stamps stay."""
        self._last += 1
        self._chunks, self._current, self._head = (
            {self._last: array("Q")},
            {self._last: 0},
            self._last << BITS,
        )
        self._ready, self._untidy = [], []
        self._pages = self._entries = 0

    def became_leaf(self, slot: int) -> None:
        """Nothing builds upon a live page any more."""
        if (stamp := self._table.stamps[slot]) < self._head:
            heapq.heappush(self._ready, (stamp, slot))

    def victims(
        self, wanted: int, is_pinned: Callable[[int], bool], evict: Callable[[int], None]
    ) -> int:
        """Let that many pages go by `evict`, the least recently used first; returns how many it
        could."""
        gone, held = 0, list[tuple[int, int]]()
        while gone < wanted:
            slot = self._oldest_aside(is_pinned, held)
            if slot < 0:
                slot = self._oldest_in_order(is_pinned, held)
            if slot < 0:
                break
            evict(slot)
            gone += 1
        for entry in held:
            heapq.heappush(self._ready, entry)
        return gone

    def unreachable(self) -> Iterator[int]:
        """Live pages that no search would meet though nothing builds upon them: there are none.
        Goes through all of them."""
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

    def _oldest_aside(self, is_pinned: Callable[[int], bool], held: list[tuple[int, int]]) -> int:
        stamps, children = self._table.stamps, self._table.children
        while self._ready:
            stamp, slot = self._ready[0]
            if stamps[slot] == stamp and not children[slot]:
                if not is_pinned(slot):
                    return slot
                held.append((stamp, slot))
            heapq.heappop(self._ready)
        return -1

    def _oldest_in_order(
        self, is_pinned: Callable[[int], bool], held: list[tuple[int, int]]
    ) -> int:
        children, stamps, chunks = self._table.children, self._table.stamps, self._chunks
        while True:
            chunk, place = chunks.get(self._head >> BITS, _NONE), self._head & CHUNK - 1
            # Nearly always the next entry.
            slot = (
                chunk[place]
                if place < len(chunk) and stamps[chunk[place]] == self._head
                else self._front()
            )
            if slot < 0:
                return -1
            stamp, self._head = self._head, self._head + 1
            self._current[stamp >> BITS] -= 1
            has_children, pinned = children[slot], is_pinned(slot)
            if not has_children and not pinned:
                return slot
            if not has_children:
                held.append((stamp, slot))

    def _front(self) -> int:
        """The slot of the first entry that is current, with `_head` moved there, or -1."""
        stamps, chunks, head = self._table.stamps, self._chunks, self._head
        while (number := head >> BITS) <= self._last:
            if number not in chunks:
                oldest = next(iter(chunks))
                if oldest < number:
                    # It ended where the search stood.
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
        """The stamp of the next entry, unless it begins a chunk."""
        return (self._last << BITS) + len(self._chunks[self._last])

    def _append(self, slots: Sequence[int]) -> None:
        """Put slots of live pages, each once, behind all others, from the last to the first."""
        stamps = self._table.stamps
        for end in range(len(slots), 0, -CHUNK):
            part = slots[max(0, end - CHUNK) : end]
            if len(self._chunks[self._last]) + len(part) > CHUNK:
                self._begin_chunk()
            new = range(self._end + len(part) - 1, self._end - 1, -1)
            if isinstance(part, range):
                stamps[part.start : part.stop] = array("Q", new)
            else:
                for slot, stamp in zip(part, new, strict=True):
                    stamps[slot] = stamp
            self._put(array("Q", part[::-1]))

    def _put(self, entries: array[int]) -> None:
        self._chunks[self._last].extend(entries)
        self._current[self._last] += len(entries)
        self._entries += len(entries)

    def _outdate(self, stamps: Sequence[int]) -> None:
        """The entries with these stamps."""
        first, head, current = min(stamps), self._head, self._current
        if first >= head and first >> BITS == max(stamps) >> BITS:
            # Often: pages that were used together before.
            current[first >> BITS] -= len(stamps)
            return
        for stamp in stamps:
            if stamp >= head:
                current[stamp >> BITS] -= 1

    def _drop(self, number: int) -> None:
        self._entries -= len(self._chunks.pop(number))
        del self._current[number]

    def _begin_chunk(self) -> None:
        for number in [number for number, count in self._current.items() if not count]:
            self._drop(number)
        self._last += 1
        self._chunks[self._last], self._current[self._last] = array("Q"), 0
        if self._entries > 2 * (self._pages + CHUNK):
            self._tidy()
            self._tidy()

    def _tidy(self) -> None:
        """Forget what is outdated in one of the chunks, and join it with the one before it if they
        are small."""
        if not self._untidy:
            self._untidy, self._predecessor = list(reversed(self._chunks)), 0
        number = self._untidy.pop()
        chunk = self._chunks.get(number)
        if chunk is None or number == self._last or number <= self._head >> BITS:
            return
        # It may keep entries of slots that are just being used: they are not counted.
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
            # In its place: the order of the chunks is that of their numbers.
            self._chunks[number] = kept
            self._predecessor = number
        for stamp, slot in enumerate(kept, first):
            stamps[slot] = stamp
