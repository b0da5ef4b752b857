"""Race detector: conflicting accesses to memory without an order."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

HOST: Final = 0
"""The actor that enqueues and waits: calls of several threads are ordered by the caller."""
Clock = dict[int, int]
"""A vector clock: the last known step of each actor."""


def join(clock: Clock, other: Clock) -> None:
    """Let a clock know what `other` knows, too."""
    for actor, time in other.items():
        clock[actor] = max(time, clock.get(actor, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """One operation, as the detector sees it."""

    what: str
    """Description given by the code that enqueued it."""
    where: str
    """Name of its stream, or `host`."""
    actor: int
    clock: Clock
    """Vector clock of the access, itself included."""

    def follows(self, other: Access) -> bool:
        """Return True if `other` is before it by a stream's order, by events, or by the host."""
        return self.clock.get(other.actor, 0) >= other.clock[other.actor]

    def __str__(self) -> str:
        return f"{self.what!r} ({self.where})"


class Race(NamedTuple):
    """Two operations on the same bytes, at least one of which writes, that nothing orders."""

    first: Access
    """The one enqueued earlier."""
    second: Access
    first_writes: bool
    second_writes: bool

    def __str__(self) -> str:
        deeds = ("reads", "writes")
        return (
            f"{self.second} {deeds[self.second_writes]} memory that {self.first} "
            f"{deeds[self.first_writes]}, and nothing orders it behind that"
        )


@dataclass(slots=True)
class _Cell:
    """The last write of a range of bytes, and the last read by each actor since."""

    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict[int, Access])


class ShadowMemory:
    """The last accesses to each byte. Not thread-safe.

    All addresses are covered by cells; a cell is split where an access begins or ends within it.
    """

    def __init__(self) -> None:
        self._starts = [0]
        self._cells = [_Cell()]

    def access(
        self, access: Access, runs: Sequence[tuple[int, int]], *, writes: bool
    ) -> list[Race]:
        """Note an access to ranges of addresses.

        Returns the races that this makes, one for each other operation.
        """
        found = dict[Access, Race]()
        for run in runs:
            for cell in self._between(*run):
                others = list(cell.reads.values()) if writes else []
                for other in (*others, *([cell.write] if cell.write else [])):
                    if not access.follows(other):
                        race = Race(other, access, other is cell.write, writes)
                        found.setdefault(other, race)
                if writes:
                    # What follows this write follows the accesses before it as well, or their race
                    # has been found.
                    cell.write = access
                    cell.reads.clear()
                else:
                    # The last read of an actor stands for its earlier ones.
                    cell.reads[access.actor] = access
        return list(found.values())

    def _between(self, start: int, end: int) -> list[_Cell]:
        for address in (start, end):
            at = bisect_left(self._starts, address)
            if at == len(self._starts) or self._starts[at] != address:
                former = self._cells[at - 1]
                self._starts.insert(at, address)
                self._cells.insert(at, _Cell(former.write, dict(former.reads)))
        return self._cells[bisect_left(self._starts, start) : bisect_left(self._starts, end)]


def byte_runs(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The ranges of addresses that a tensor's elements fill, adjacent ones joined."""
    if not tensor.numel():
        return []
    size = tensor.element_size()
    starts, length = [tensor.data_ptr()], size
    # From the innermost axis outwards: an axis that continues the run makes it longer, any other
    # repeats it.
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count == 1:
            continue
        if stride * size == length:
            length *= count
        else:
            starts = [start + step * stride * size for start in starts for step in range(count)]
    return [(start, start + length) for start in sorted(starts)]
