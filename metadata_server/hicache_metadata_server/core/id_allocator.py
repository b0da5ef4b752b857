"""Allocation of ids that are never reused, not even after a restart."""

from __future__ import annotations

import time
from typing import Final

AHEAD: Final = 1 << 20
"""Ids between the last one and the durable ceiling."""


def first_number() -> int:
    """First id of a server that starts: the microseconds since 1970, as in the Redis scripts.

    No server allocates a million ids a second for long, so all ids of an earlier server are
    smaller, even if its store is lost. They stay below 2^53, up to which numbers of JSON and Lua
    are exact, until the year 2255.
    """
    return time.time_ns() // 1000


class IdAllocator:
    """A counter that starts at the time of the start, or at the durable ceiling if that is later.

    Only the ceiling is durable. A restart continues behind it, which skips up to a million ids and
    saves one write for each of them.
    """

    __slots__ = ("_next", "ceiling")

    def __init__(self, kept: int = 1) -> None:
        self._next = max(kept, first_number())
        self.ceiling = self._next
        """No id from here on was ever given, as far as the store can know."""

    def take(self, count: int) -> int:
        """Allocate `count` consecutive ids and return the first."""
        first = self._next
        self._next += count
        # The service writes the ceiling with the changes that use these ids, so no response names
        # an id above the durable ceiling.
        if self._next > self.ceiling:
            self.ceiling = self._next + AHEAD
        return first
