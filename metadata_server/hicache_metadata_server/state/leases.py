"""Who may write which slot, and by which lease a live page was written."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache_metadata_server.state.slots import SlotTable

CHUNK: Final = 4096


class LeaseLog:
    """Slots by the leases that were given for them, in 16 to 32 bytes each.

    A live page is asked for by its lease when a commit is repeated: rarely enough for a search, too often to forget.
    """

    __slots__ = ("_chunks", "_cursor", "_entries", "_firsts", "_table")

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._chunks: list[tuple[array[int], array[int]]] = []
        self._firsts: list[int] = []
        self._cursor = self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def add(self, first: int, slots: list[int]) -> None:
        """Slots that were leased under consecutive numbers, greater than all before."""
        if not self._chunks or len(self._chunks[-1][0]) >= CHUNK:
            self._chunks.append((array("Q"), array("Q")))
            self._firsts.append(first)
            # At most one entry a slot is current.
            if self._entries > 2 * len(self._table) + CHUNK:
                self._tidy()
                self._tidy()
        self._entries += len(slots)
        leases, where = self._chunks[-1]
        leases.extend(range(first, first + len(slots)))
        where.extend(slots)

    def restore(self, leases: list[int], slots: list[int]) -> None:
        """Fill an empty one, in ascending order of leases."""
        for start in range(0, len(leases), CHUNK):
            self._chunks.append((array("Q", leases[start : start + CHUNK]), array("Q", slots[start : start + CHUNK])))
            self._firsts.append(leases[start])
        self._entries = len(leases)

    def slot(self, lease: int) -> int:
        """The slot that this lease was given for last, or -1 if it has had another since."""
        at = bisect_right(self._firsts, lease) - 1
        if at < 0:
            return -1
        leases, slots = self._chunks[at]
        i = bisect_left(leases, lease)
        if i == len(leases) or leases[i] != lease or self._table.leases[slots[i]] != lease:
            return -1
        return slots[i]

    def _tidy(self) -> None:
        """Forget what is outdated in one of the chunks, and join it with the one before it if they are small."""
        if self._cursor >= len(self._chunks) - 1:
            self._cursor = 0
        at = self._cursor
        if at >= len(self._chunks) - 1:
            return
        old_leases, old_slots = self._chunks[at]
        current = self._table.leases
        kept = [(lease, slot) for lease, slot in zip(old_leases, old_slots, strict=True) if current[slot] == lease]
        leases, slots = array("Q", [lease for lease, _ in kept]), array("Q", [slot for _, slot in kept])
        self._entries -= len(old_leases) - len(leases)
        if at and len(self._chunks[at - 1][0]) + len(leases) <= CHUNK:
            self._chunks[at - 1][0].extend(leases)
            self._chunks[at - 1][1].extend(slots)
            del self._chunks[at], self._firsts[at]
        else:
            self._chunks[at] = (leases, slots)
            self._cursor += 1


class Leases:
    """The leases that are held, by key and by number."""

    __slots__ = ("by_key", "by_number", "log", "owners")

    def __init__(self, table: SlotTable) -> None:
        self.by_key: dict[str, int] = {}
        self.by_number: dict[int, int] = {}
        self.owners: dict[int, str] = {}
        """By slot; those that gave no name are not here."""
        self.log = LeaseLog(table)

    def __len__(self) -> int:
        return len(self.by_number)

    def detach(self) -> list[dict[str, int]]:
        """Forget all that are held at once; what is returned is for the caller to take apart."""
        detached = [self.by_key]
        self.by_key, self.by_number, self.owners = {}, {}, {}
        return detached

    def remove(self, key: str, lease: int, slot: int) -> None:
        """End one."""
        del self.by_key[key], self.by_number[lease]
        if self.owners:
            self.owners.pop(slot, None)
