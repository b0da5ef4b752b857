"""The slots of a scope as columns: 61 bytes a slot that was ever used, none for the others."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.protocol import SlotState

if TYPE_CHECKING:
    from collections.abc import Sequence

FREE: Final = 0
LEASED: Final = 1
LIVE: Final = 2
QUARANTINED: Final = 3
NAMES: Final = (SlotState.FREE, SlotState.LEASED, SlotState.LIVE, SlotState.QUARANTINED)

_LET_GO: Final = bytes((FREE, QUARANTINED, QUARANTINED, QUARANTINED))
_LET_GO_ALL: Final = _LET_GO + bytes(256 - len(_LET_GO))


class SlotTable:
    """One entry a slot in each column. Slots that nobody has used yet have none: `len` says where they begin."""

    __slots__ = ("checksums", "children", "generations", "keys", "leases", "lengths", "prefixes", "states", "until")

    def __init__(self) -> None:
        self.states = bytearray()
        self.generations = array("Q")
        self.leases = array("Q")
        """The lease by which a slot was given out last; 0 where there was none."""
        self.until = array("d")
        """When the lease or the quarantine ends."""
        self.lengths = array("Q")
        self.checksums = array("Q")
        self.children = array("Q")
        """Live pages that name this live page as their prefix."""
        self.keys = list[str]()
        self.prefixes = list[str]()

    def __len__(self) -> int:
        return len(self.states)

    def grow(self, count: int) -> None:
        """Add free slots at the end."""
        self.states.extend(bytes(count))
        zeros = bytes(8 * count)
        for column in (self.generations, self.leases, self.until, self.lengths, self.checksums, self.children):
            column.frombytes(zeros)
        self.keys.extend([""] * count)
        self.prefixes.extend([""] * count)

    def count(self, state: int) -> int:
        """Slots in that state, counted one by one (a millisecond for a million)."""
        return self.states.count(state)

    def let_all_go(self) -> None:
        """Every live or leased slot becomes quarantined (a millisecond for a million)."""
        # In place: others hold on to this bytearray.
        self.states[:] = self.states.translate(_LET_GO_ALL)


def is_run(slots: Sequence[int]) -> bool:
    """Whether some slots are neighbours in ascending order: a slice of each column."""
    return slots[-1] - slots[0] == len(slots) - 1 and list(slots) == list(range(slots[0], slots[0] + len(slots)))
