"""Live pages in the order of their use, and which of them goes next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_metadata_server.state.slots import SlotTable


class Recency:
    """Key -> slot of every live page, the least recently used first.

    A page that others build upon, or that is pinned, cannot go. Where the search for a victim meets one it sets it aside, so that no
    later search meets it again before it was used: each eviction is O(log n), amortized. All that was set aside is older than all
    the rest.
    """

    __slots__ = ("_aside_numbers", "_next_number", "_ready", "_table", "aside", "order")

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self.order: OrderedDict[str, int] = OrderedDict()
        self.aside: dict[str, int] = {}
        self._aside_numbers: dict[str, int] = {}
        self._next_number = 0
        self._ready: list[tuple[int, str]] = []
        """Of those aside, the ones that may go now: the number and the key of each; entries may be outdated."""

    def __len__(self) -> int:
        return len(self.order) + len(self.aside)

    def __contains__(self, key: str) -> bool:
        return key in self.order or key in self.aside

    def __iter__(self) -> Iterator[str]:
        yield from sorted(self.aside, key=self._aside_numbers.__getitem__)
        yield from self.order

    def slot(self, key: str) -> int:
        """The slot of a live page, or -1."""
        slot = self.order.get(key, -1)
        return slot if slot >= 0 or not self.aside else self.aside.get(key, -1)

    def slots(self, keys: Sequence[str]) -> list[int]:
        """The slots of pages, -1 for those that are not live."""
        get = self.order.get
        if not self.aside:
            return [get(key, -1) for key in keys]
        aside = self.aside.get
        return [get(key, -1) if key in self.order else aside(key, -1) for key in keys]

    def live(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are live."""
        order = self.order
        if not self.aside:
            return [key in order for key in keys]
        return [key in order or key in self.aside for key in keys]

    def has_none(self, keys: Sequence[str]) -> bool:
        """Whether none of the keys is live."""
        # Half the time of asking for each.
        return self.order.keys().isdisjoint(keys) and (not self.aside or self.aside.keys().isdisjoint(keys))

    def add(self, key: str, slot: int) -> None:
        """A page has become live, which is use."""
        self.order[key] = slot

    def remove(self, key: str) -> None:
        """A page is live no longer."""
        if self.order.pop(key, -1) < 0:
            del self.aside[key], self._aside_numbers[key]

    def detach(self) -> list[dict[str, int]]:
        """Forget all pages at once; what is returned is for the caller to take apart."""
        detached: list[dict[str, int]] = [self.aside, self.order]
        self.order, self.aside, self._aside_numbers = OrderedDict(), {}, {}
        self._ready = []
        return detached

    def touch(self, keys: Sequence[str]) -> None:
        """Count as use, from the last key to the first."""
        order, move = self.order, self.order.move_to_end
        for key in reversed(keys):
            if key in order:
                move(key)
        if self.aside:
            self._touch_aside(keys)

    def _touch_aside(self, keys: Sequence[str]) -> None:
        if any(key in self.aside for key in keys):
            for key in reversed(keys):
                if key in self.aside:
                    self.order[key] = self.aside.pop(key)
                    del self._aside_numbers[key]
                elif key in self.order:
                    self.order.move_to_end(key)

    def became_tail(self, key: str) -> None:
        """Nothing builds upon a live page any more."""
        if (number := self._aside_numbers.get(key)) is not None:
            heapq.heappush(self._ready, (number, key))

    def victims(self, wanted: int, is_pinned: Callable[[int], bool], let_go: Callable[[int], None]) -> int:
        """Let that many pages go by `let_go`, the least recently used first; returns how many it could."""
        gone, held = 0, list[tuple[int, str]]()
        while gone < wanted:
            slot = self._oldest_aside(is_pinned, held)
            if slot < 0:
                slot = self._oldest_in_order(is_pinned, held)
            if slot < 0:
                break
            let_go(slot)
            gone += 1
        for entry in held:
            heapq.heappush(self._ready, entry)
        return gone

    def _oldest_aside(self, is_pinned: Callable[[int], bool], held: list[tuple[int, str]]) -> int:
        while self._ready:
            number, key = self._ready[0]
            if self._aside_numbers.get(key) == number and not self._table.children[self.aside[key]]:
                if not is_pinned(self.aside[key]):
                    return self.aside[key]
                held.append((number, key))
            heapq.heappop(self._ready)
        return -1

    def _oldest_in_order(self, is_pinned: Callable[[int], bool], held: list[tuple[int, str]]) -> int:
        order, children = self.order, self._table.children
        while order:
            key = next(iter(order))
            slot = order[key]
            has_children, pinned = children[slot], is_pinned(slot)
            if not has_children and not pinned:
                return slot
            del order[key]
            self.aside[key], self._aside_numbers[key] = slot, self._next_number
            if not has_children:
                held.append((self._next_number, key))
            self._next_number += 1
        return -1
