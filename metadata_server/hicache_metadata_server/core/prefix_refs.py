"""Prefix reference counts: how many live pages name a page as their prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server.core.lru import LruOrder
    from hicache_metadata_server.core.slot_table import SlotTable


class PrefixRefs:
    """Counts in the slot table for live prefixes, and by key for prefixes that are not live.

    A page may be committed before its prefix, so counts exist before the prefix does.
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
