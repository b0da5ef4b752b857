"""The state machine of `docs/metadata-protocol.md`, as short as it can be said.

One scope, slots, leases, pins, chains.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from hicache_metadata_server.protocol import Reserved, ScopeGeometry, SlotState

FREE, LEASED, LIVE, QUARANTINED = (
    SlotState.FREE,
    SlotState.LEASED,
    SlotState.LIVE,
    SlotState.QUARANTINED,
)


@dataclass(slots=True)
class Slot:
    state: SlotState = FREE
    generation: int = 0
    key: str = ""
    prefix: str = ""
    owner: str = ""
    lease: int = 0
    until: float = 0.0
    length: int = 0
    checksum: int = 0
    pins: dict[int, float] = field(default_factory=dict)

    def pinned_until(self, now: float) -> float:
        return max((end for end in self.pins.values() if end > now), default=0.0)


class Scope:
    def __init__(self, geometry: ScopeGeometry, quarantine_seconds: float) -> None:
        self.geometry = geometry
        self.model = ""
        self.quarantine_seconds = quarantine_seconds
        self.slots = [Slot() for _ in range(geometry.slots)]
        self.free = deque(range(geometry.slots))
        self.live: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self.leasing: dict[str, int] = {}  # key -> slot
        self.leases: dict[int, int] = {}  # lease -> slot
        self.children: dict[str, set[str]] = {}  # live keys by the key before them
        self.ends: list[tuple[float, int]] = []  # when to look again at which slot
        self.resting = 0

    # What time does.

    def settle(self, now: float) -> None:
        """End the leases and quarantines whose time has come."""
        while self.ends and self.ends[0][0] <= now:
            index = heapq.heappop(self.ends)[1]
            slot = self.slots[index]
            if slot.state is LEASED and slot.until <= now:
                self.let_go(index, now)
            elif slot.state is QUARANTINED and slot.until <= now:
                if end := slot.pinned_until(now):
                    self.look_again(index, end)
                else:
                    self.resting -= 1
                    self.release(index)

    def end_at(self, index: int, until: float) -> None:
        self.slots[index].until = until
        self.look_again(index, until)

    def look_again(self, index: int, when: float) -> None:
        heapq.heappush(self.ends, (when, index))

    # How slots change their state.

    def release(self, index: int) -> None:
        self.slots[index].state = FREE
        self.free.append(index)

    def let_go(self, index: int, now: float) -> None:
        """A live or leased slot goes into quarantine."""
        slot = self.slots[index]
        if slot.state is LEASED:
            del self.leasing[slot.key], self.leases[slot.lease]
        else:
            del self.live[slot.key]
            self.children[slot.prefix].discard(slot.key)
        slot.state = QUARANTINED
        slot.lease = 0
        slot.owner = ""
        self.resting += 1
        self.end_at(index, now + self.quarantine_seconds)

    def lease(self, key: str, prefix: str, owner: str, lease: int, until: float) -> int:
        index = self.free.popleft()
        slot = self.slots[index]
        slot.state = LEASED
        slot.key = key
        slot.prefix = prefix
        slot.owner = owner
        slot.lease = lease
        slot.generation += 1
        self.leasing[key] = self.leases[lease] = index
        self.end_at(index, until)
        return index

    def commit(self, index: int, length: int, checksum: int) -> None:
        slot = self.slots[index]
        del self.leasing[slot.key], self.leases[slot.lease]
        slot.state = LIVE
        slot.length = length
        slot.checksum = checksum
        self.live[slot.key] = index
        self.children.setdefault(slot.prefix, set()).add(slot.key)

    def evict(self, wanted: int, now: float) -> None:
        """Let pages go, least recently used first.

        None that others build upon, and none that is pinned.
        """
        found = True
        while wanted > 0 and found:
            found = False
            for key, index in list(self.live.items()):
                if (
                    wanted > 0
                    and not self.children.get(key)
                    and not self.slots[index].pinned_until(now)
                ):
                    self.let_go(index, now)
                    wanted, found = wanted - 1, True
        self.settle(now)

    # What clients ask for.

    def unpin(self, pins: list[int], now: float) -> None:
        for index, slot in enumerate(self.slots):
            if any(slot.pins.pop(pin, None) for pin in pins):
                self.look_again(index, now)

    def reserve(
        self, keys: list[tuple[str, str]], owner: str, next_lease: int, now: float, until: float
    ) -> list[Reserved]:
        new = {key for key, _ in keys if key not in self.live and key not in self.leasing}
        self.evict(len(new) - len(self.free) - self.resting, now)
        states = list[Reserved]()
        for key, prefix in keys:
            if key in self.live:
                self.live.move_to_end(key)
                states.append(Reserved.EXISTS)
            elif key in self.leasing:
                states.append(Reserved.BUSY)
            elif not self.free:
                states.append(Reserved.FULL)
            else:
                self.lease(key, prefix, owner, next_lease, until)
                next_lease += 1
                states.append(Reserved.LEASED)
        return states

    def committed(self, lease: int) -> int | None:
        """The slot that is live because of this lease."""
        return next(
            (index for index in self.live.values() if self.slots[index].lease == lease), None
        )

    def touch(self, keys: list[str]) -> None:
        for key in reversed(keys):
            if key in self.live:
                self.live.move_to_end(key)

    def delete(self, key: str, now: float) -> bool:
        if key not in self.live:
            return False
        self.let_go(self.live[key], now)
        return True

    def clear(self, now: float) -> int:
        pages = len(self.live)
        for index in [*self.live.values(), *self.leases.values()]:
            # The writer is not asked: it may write until its lease would have ended.
            until = self.slots[index].until if self.slots[index].state is LEASED else now
            self.let_go(index, now)
            self.end_at(index, max(self.slots[index].until, until))
        return pages

    def close(self, until: float) -> None:
        """No slot of a new scope is given before then."""
        for index in self.free:
            self.slots[index].state = QUARANTINED
            self.end_at(index, until)
        self.resting += len(self.free)
        self.free.clear()

    def count(self, state: SlotState) -> int:
        return sum(slot.state is state for slot in self.slots)

    def problems(self) -> list[str]:
        """Every invariant that does not hold."""
        by_state = {
            state: [i for i, slot in enumerate(self.slots) if slot.state is state]
            for state in SlotState
        }
        found = list[str]()
        if sorted(self.free) != by_state[FREE]:
            found.append("the free slots are not those in the free list")
        if sorted(self.live.values()) != by_state[LIVE]:
            found.append("the live slots are not those of the keys")
        if (
            sorted(self.leases.values()) != by_state[LEASED]
            or sorted(self.leasing.values()) != by_state[LEASED]
        ):
            found.append("the leased slots are not those of the leases")
        if self.resting != len(by_state[QUARANTINED]):
            found.append("the quarantined slots are miscounted")
        return found
