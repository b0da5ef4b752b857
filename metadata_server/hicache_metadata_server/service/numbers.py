"""Numbers that are never given twice, restarts included."""

from __future__ import annotations

from typing import Final

AHEAD: Final = 1 << 20


class Numbers:
    """Counts up. Only a ceiling is written down, and a restart goes on behind it: a million numbers are cheaper than a write each."""

    __slots__ = ("_next", "ceiling")

    def __init__(self, ceiling: int = 1) -> None:
        self._next = self.ceiling = ceiling
        """No number from here on was ever given, as far as is written down."""

    def take(self, count: int) -> int:
        """The first of so many numbers in a row."""
        first = self._next
        self._next += count
        if self._next > self.ceiling:
            self.ceiling = self._next + AHEAD
        return first
