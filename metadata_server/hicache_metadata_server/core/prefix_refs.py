"""How many live pages build upon which."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server.core.lru import LruOrder
    from hicache_metadata_server.core.slot_table import SlotTable


class PrefixRefs:
    """Counts kept with the page that is built upon or, while that is not live, under its key."""

    __slots__ = ("_lru", "_table", "pending")

    def __init__(self, table: SlotTable, lru: LruOrder) -> None:
        self._table, self._lru = table, lru
        self.pending: dict[str, int] = {}
        """Pages by the prefix that they name and that is not live."""

    def add(self, slots: Sequence[int]) -> None:
        """The pages in those slots have become live."""
        keys, prefixes, children, pending = (
            self._table.keys,
            self._table.prefixes,
            self._table.children,
            self.pending,
        )
        if isinstance(slots, range) and not pending and not any(prefixes[slots.start : slots.stop]):
            # Nearly always: neighbours, and none builds upon another.
            return
        for slot in slots if pending else ():
            children[slot] = pending.pop(keys[slot], 0)
        named = [prefixes[slot] for slot in slots]
        for slot, prefix in zip(slots, named, strict=True) if any(named) else ():
            if prefix and prefix != keys[slot]:
                before = self._lru.slot(prefix)
                if before >= 0:
                    children[before] += 1
                else:
                    pending[prefix] = pending.get(prefix, 0) + 1

    def remove(self, slot: int) -> None:
        """The page in that slot is live no longer."""
        table = self._table
        key, prefix = table.keys[slot], table.prefixes[slot]
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
