"""Slots that are to be given to nobody for a time."""

from __future__ import annotations


class Pins:
    """The pins on slots of one scope: for each slot, when each of its pins ends."""

    __slots__ = ("by_slot",)

    def __init__(self) -> None:
        self.by_slot: dict[int, dict[int, float]] = {}

    def add(self, pin: int, slots: list[int], until: float) -> None:
        """Put one pin on some slots."""
        for slot in slots:
            self.by_slot.setdefault(slot, {})[pin] = until

    def remove(self, pin: int, slots: list[int]) -> None:
        """Take it off again."""
        for slot in slots:
            pins = self.by_slot.get(slot)
            if pins is not None:
                pins.pop(pin, None)
                if not pins:
                    del self.by_slot[slot]

    def count(self, slot: int, now: float) -> int:
        """Pins on a slot that have not ended."""
        pins = self.by_slot.get(slot)
        return sum(until > now for until in pins.values()) if pins else 0
