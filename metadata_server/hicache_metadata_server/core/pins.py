"""Pins: of one scope by slot, and of all scopes by number."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A pin and its slots."""

    pin: int
    until: float
    slots: dict[int, list[int]]
    """By the number of their scope."""

    def without(self, scopes: Container[int]) -> PinRecord | None:
        """The pin on other scopes than these; None if there are none."""
        slots = {number: some for number, some in self.slots.items() if number not in scopes}
        return PinRecord(self.pin, self.until, slots) if slots else None


class SlotPins:
    """Pins on the slots of one scope: the end of each pin, by slot."""

    __slots__ = ("by_slot",)

    def __init__(self) -> None:
        self.by_slot: dict[int, dict[int, float]] = {}

    def add(self, pin: int, slots: list[int], until: float) -> None:
        """Add a pin on slots."""
        for slot in slots:
            self.by_slot.setdefault(slot, {})[pin] = until

    def remove(self, pin: int, slots: list[int]) -> None:
        """Remove a pin from slots."""
        for slot in slots:
            pins = self.by_slot.get(slot)
            if pins is not None:
                pins.pop(pin, None)
                if not pins:
                    del self.by_slot[slot]

    def count(self, slot: int, now: float) -> int:
        """Number of pins on a slot that have not ended."""
        pins = self.by_slot.get(slot)
        return sum(until > now for until in pins.values()) if pins else 0


class PinTable:
    """Pins of all scopes by number, and the changes that are not durable yet."""

    def __init__(self) -> None:
        self._pins: dict[int, PinRecord] = {}
        self._ends: list[tuple[float, int]] = []
        self.added: dict[int, PinRecord] = {}
        self.removed: list[int] = []

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, record: PinRecord, *, remember: bool = True) -> None:
        """Add a pin, or slots of further scopes to it; `remember` if it is not durable yet."""
        if (known := self._pins.get(record.pin)) is not None:
            record = PinRecord(record.pin, record.until, known.slots | record.slots)
        self._pins[record.pin] = record
        heapq.heappush(self._ends, (record.until, record.pin))
        if remember:
            self.added[record.pin] = record

    def release(self, scope: int) -> None:
        """Drop what is not durable yet of a scope that another server will own."""
        self.added = {
            pin: record
            for pin, one in self.added.items()
            if (record := one.without({scope})) is not None
        }

    def find(self, pins: Iterable[int]) -> list[PinRecord]:
        """Find the pins that exist."""
        return [self._pins[pin] for pin in dict.fromkeys(pins) if pin in self._pins]

    def remove(self, pins: Iterable[int]) -> list[PinRecord]:
        """Remove pins; unknown ones are no error."""
        found = [self._pins.pop(pin) for pin in dict.fromkeys(pins) if pin in self._pins]
        for record in found:
            # A pin that the store never got needs no removal there.
            if self.added.pop(record.pin, None) is None:
                self.removed.append(record.pin)
        return found

    def ended(self, now: float) -> list[PinRecord]:
        """Remove and return the pins that have ended."""
        pins = list[int]()
        while self._ends and self._ends[0][0] <= now:
            pins.append(heapq.heappop(self._ends)[1])
        return self.remove(pins) if pins else []
