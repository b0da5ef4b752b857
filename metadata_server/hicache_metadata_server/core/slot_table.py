"""Columns of a scope's slots, 73 bytes a used slot, and the index of slots by key."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, cast

from hicache_metadata_server.protocol import SlotState

if TYPE_CHECKING:
    from collections.abc import Sequence

FREE: Final = 0
LEASED: Final = 1
LIVE: Final = 2
QUARANTINED: Final = 3
NAMES: Final = (SlotState.FREE, SlotState.LEASED, SlotState.LIVE, SlotState.QUARANTINED)

_AFTER_CLEAR: Final = bytes((FREE, QUARANTINED, QUARANTINED, QUARANTINED)) + bytes(252)
"""State after a clear, by the state before it."""


class SlotTable:
    """One entry a used slot in each column; the length is the number of slots ever used.

    Unused slots take no memory, so a scope may declare far more slots than it will ever use.
    """

    __slots__ = (
        "by_key",
        "checksums",
        "children",
        "generations",
        "keys",
        "leases",
        "lengths",
        "prefixes",
        "stamps",
        "states",
        "until",
    )

    def __init__(self) -> None:
        self.states = bytearray()
        self.generations = array("Q")
        self.leases = array("Q")
        """Number of the last lease; 0 for a slot that was never leased."""
        self.until = array("d")
        """End of the lease or of the quarantine."""
        self.lengths = array("Q")
        self.checksums = array("Q")
        self.children = array("Q")
        """Live pages that name this live page as their prefix; 0 for slots that are not live."""
        self.stamps = array("Q")
        """Position of a live page in the LRU order; else 0, or stale until a clear is finished."""
        self.keys = list[str]()
        self.prefixes = list[str]()
        self.by_key = _new_index()
        """Slot of every key that is live or leased."""

    def __len__(self) -> int:
        return len(self.states)

    def grow(self, count: int) -> None:
        """Add free slots at the end."""
        self.states.extend(bytes(count))
        zeros = bytes(8 * count)
        for column in (
            self.generations,
            self.leases,
            self.until,
            self.lengths,
            self.checksums,
            self.children,
            self.stamps,
        ):
            column.frombytes(zeros)
        self.keys.extend([""] * count)
        self.prefixes.extend([""] * count)

    def count(self, state: int) -> int:
        """Number of slots in a state; a scan of the column, a millisecond for a million."""
        return self.states.count(state)

    def quarantine_all(self) -> dict[str, int]:
        """Quarantine every live or leased slot; returns the old index by key.

        Takes a millisecond for a million slots. The caller frees the index step by step.
        """
        # In place, because other objects hold this bytearray.
        self.states[:] = self.states.translate(_AFTER_CLEAR)
        index = self.by_key
        self.by_key = _new_index()
        return index


def as_run(slots: Sequence[int]) -> Sequence[int]:
    """Return a list of ascending neighbours as a range, and anything else unchanged.

    A range selects a slice of each column, which is several times as fast as a loop over slots.
    """
    if not isinstance(slots, list) or not slots or slots[-1] - slots[0] != len(slots) - 1:
        return slots
    run = range(slots[0], slots[-1] + 1)
    return run if slots == list(run) else slots


def _new_index() -> dict[str, int]:
    # A dict that has had a key of another type stores the hash of each key. CPython then compares
    # hashes before it reads a key, which with millions of keys is in no CPU cache. That saves a
    # quarter of a lookup's time, and takes 8 bytes a key.
    index: dict[str | None, int] = {None: 0}
    del index[None]
    return cast("dict[str, int]", index)
