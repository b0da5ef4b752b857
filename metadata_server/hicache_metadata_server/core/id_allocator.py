"""IdAllocator that are never given twice, restarts included."""

from __future__ import annotations

import time
from typing import Final

AHEAD: Final = 1 << 20


def first_number() -> int:
    """Where a server that starts begins to count: the microseconds since 1970, as the scripts in
    Redis do.

    No server gives a million numbers a second for long, so all that an earlier one gave are below,
    whether or not its store has survived. They stay below 2^53, up to which JSON's and Lua's
    numbers are exact, until the year 2255.
    """
    return time.time_ns() // 1000


class IdAllocator:
    """Counts up, from the time of the start or from where a store has kept, whichever is later.

    Only a ceiling is written down, and a restart goes on behind it: a million numbers are cheaper
    than a write each.
    """

    __slots__ = ("_next", "ceiling")

    def __init__(self, kept: int = 1) -> None:
        self._next = self.ceiling = max(kept, first_number())
        """No number from here on was ever given, as far as is written down."""

    def take(self, count: int) -> int:
        """The first of so many numbers in a row."""
        first = self._next
        self._next += count
        if self._next > self.ceiling:
            self.ceiling = self._next + AHEAD
        return first
