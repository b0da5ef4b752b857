"""What all scopes of a service come to."""

from __future__ import annotations

from typing import NamedTuple


class Totals(NamedTuple):
    """Slots by state as they are, and what was counted since the start."""

    live: int = 0
    leased: int = 0
    quarantined: int = 0
    free: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
