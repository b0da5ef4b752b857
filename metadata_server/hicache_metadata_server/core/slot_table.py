"""The slots of a scope as columns: 73 bytes a slot that was ever used, none for the others; and the
slot of each key."""

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

_LET_GO: Final = bytes((FREE, QUARANTINED, QUARANTINED, QUARANTINED))
_LET_GO_ALL: Final = _LET_GO + bytes(256 - len(_LET_GO))


class SlotTable:
    """One entry a slot in each column. Slots that nobody has used yet have none: `len` says where
    they begin."""

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
        """The lease by which a slot was given out last; 0 where there was none."""
        self.until = array("d")
        """When the lease or the quarantine ends."""
        self.lengths = array("Q")
        self.checksums = array("Q")
        self.children = array("Q")
        """Live pages that name this live page as their prefix; 0 for what is not live."""
        self.stamps = array("Q")
        """The place of a live page in the order of use; 0 for what is not live, but for what a
        clear has left."""
        self.keys = list[str]()
        self.prefixes = list[str]()
        self.by_key = _new_index()
        """The slot of every key that is live or leased."""

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
        """Slots in that state, counted one by one (a millisecond for a million)."""
        return self.states.count(state)

    def quarantine_all(self) -> dict[str, int]:
        """Every live or leased slot becomes quarantined (a millisecond for a million); returns them
        by key, to be taken apart."""
        # In place: others hold on to this bytearray.
        self.states[:] = self.states.translate(_LET_GO_ALL)
        index, self.by_key = self.by_key, _new_index()
        return index


def as_run(slots: Sequence[int]) -> Sequence[int]:
    """The same as a range if they are a list of neighbours in ascending order: a slice of each
    column."""
    if not isinstance(slots, list) or not slots or slots[-1] - slots[0] != len(slots) - 1:
        return slots
    run = range(slots[0], slots[-1] + 1)
    return run if slots == list(run) else slots


def _new_index() -> dict[str, int]:
    # A dict that has had a key of another type keeps the hash of each key: CPython then looks at a
    # key itself, which with millions of them is in no cache, only where it is the right one. That
    # is a quarter of a lookup's time, for 8 bytes a key.
    index: dict[str | None, int] = {None: 0}
    del index[None]
    return cast("dict[str, int]", index)
