"""Blocks of 64 neighbouring slots: the rows of the SQLite file.

A block is written as a whole, so a crash leaves the old or the new block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from hicache_metadata_server.core.codec import (
    Prefixes,
    SlotChanges,
    SlotLeases,
    SlotStates,
    decoded_prefixes,
    encoded_prefixes,
    numbers_of,
    slots_of,
    times_of,
)
from hicache_metadata_server.core.slot_table import LEASED, LIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hicache_metadata_server.core.scope import Scope

BLOCK: Final = 64
"""Slots of a block, which takes about 7 KB. A batch of 128 neighbours changes two or three blocks."""
_ZEROS: Final = bytes(8 * BLOCK)


class _EncodedBlock(NamedTuple):
    """Encoded block: columns of 8 bytes a slot, `states` of one byte."""

    states: bytes
    epochs: bytes
    until: bytes
    lengths: bytes
    checksums: bytes
    generations: bytes
    leases: bytes
    keys: list[str]
    prefixes: Prefixes
    owners: dict[int, str]


class SlotBlock:
    """Columns of `BLOCK` neighbouring slots. Unused slots are free and of generation 0."""

    __slots__ = (
        "checksums",
        "epochs",
        "generations",
        "keys",
        "leases",
        "lengths",
        "owners",
        "prefixes",
        "states",
        "until",
    )

    def __init__(self) -> None:
        self.states = bytearray(BLOCK)
        self.epochs = numbers_of(_ZEROS)
        self.lengths = numbers_of(_ZEROS)
        self.checksums = numbers_of(_ZEROS)
        self.generations = numbers_of(_ZEROS)
        self.leases = numbers_of(_ZEROS)
        self.until = times_of(_ZEROS)
        self.keys = [""] * BLOCK
        self.prefixes = [""] * BLOCK
        self.owners: dict[int, str] = {}

    @classmethod
    def decode(cls, blob: bytes) -> SlotBlock:
        """Decode a block.

        Raises:
            ValueError: the blob is no block.
        """
        written = msgspec.msgpack.decode(blob, type=_EncodedBlock)
        if {len(column) for column in written[1:7]} != {8 * BLOCK} or {
            len(written[i]) for i in (0, 7, 8)
        } != {BLOCK}:
            raise ValueError(f"a block of other than {BLOCK} slots")
        block = cls.__new__(cls)
        block.states = bytearray(written.states)
        block.until = times_of(written.until)
        for name in ("epochs", "lengths", "checksums", "generations", "leases"):
            setattr(block, name, numbers_of(getattr(written, name)))
        block.keys = written.keys
        block.prefixes = decoded_prefixes(written.keys, written.prefixes)
        block.owners = written.owners
        return block

    @classmethod
    def of(cls, scope: Scope, number: int) -> SlotBlock:
        """Copy a block of a scope as it is now."""
        table, first, end = scope.table, number * BLOCK, (number + 1) * BLOCK
        block = cls.__new__(cls)
        block.states = table.states[first:end]
        block.until = table.until[first:end]
        block.generations = table.generations[first:end]
        block.leases = table.leases[first:end]
        block.lengths = table.lengths[first:end]
        block.checksums = table.checksums[first:end]
        block.keys = table.keys[first:end]
        block.prefixes = table.prefixes[first:end]
        missing = BLOCK - len(block.states)
        if missing:
            block._pad(missing)
        # Memory has applied all clears, so every slot is of the current epoch.
        block.epochs = array("Q", (scope.epoch,)) * BLOCK
        owners = scope.leases.owners
        block.owners = (
            {slot - first: owners[slot] for slot in range(first, end) if slot in owners}
            if owners
            else {}
        )
        return block

    def _pad(self, missing: int) -> None:
        """Add unused slots at the end."""
        self.states.extend(bytes(missing))
        zeros = bytes(8 * missing)
        for column in (self.until, self.generations, self.leases, self.lengths, self.checksums):
            column.frombytes(zeros)
        self.keys += [""] * missing
        self.prefixes += [""] * missing

    def encode(self) -> bytes:
        """Encode the block, without keys of slots that are neither live nor leased."""
        # A merged block still has the keys of earlier leases, which would grow the file.
        if self.states.count(LIVE) + self.states.count(LEASED) < BLOCK:
            owned = [state in (LIVE, LEASED) for state in self.states]
            self.keys = [key if kept else "" for key, kept in zip(self.keys, owned, strict=True)]
            self.prefixes = [
                prefix if kept else "" for prefix, kept in zip(self.prefixes, owned, strict=True)
            ]
        if self.owners:
            self.owners = {
                place: owner for place, owner in self.owners.items() if self.states[place] == LEASED
            }
        return msgspec.msgpack.encode(
            _EncodedBlock(
                bytes(self.states),
                self.epochs.tobytes(),
                self.until.tobytes(),
                self.lengths.tobytes(),
                self.checksums.tobytes(),
                self.generations.tobytes(),
                self.leases.tobytes(),
                self.keys,
                encoded_prefixes(self.keys, self.prefixes),
                self.owners,
            )
        )


class StateColumns:
    """Decoded states of one group."""

    __slots__ = ("_columns", "_states", "epoch", "slots")

    def __init__(self, written: SlotStates) -> None:
        count = len(written.states)
        self.epoch = written.epoch
        self.slots = slots_of(written.slots, count)
        self._states = written.states
        zeros = bytes(8 * count)
        self._columns = (
            times_of(written.until or zeros),
            numbers_of(written.lengths or zeros),
            numbers_of(written.checksums or zeros),
        )

    def merge(self, block: SlotBlock, start: int, end: int) -> None:
        """Merge the entries from `start` to `end` into their block."""
        put = _column_writer(self.slots, start, end)
        put(block.states, self._states)
        put(block.epochs, array("Q", [self.epoch]) * len(self.slots))
        for column, values in zip(
            (block.until, block.lengths, block.checksums), self._columns, strict=True
        ):
            put(column, values)


class LeaseColumns:
    """Decoded leases of one group."""

    __slots__ = ("_columns", "_owners", "slots")

    def __init__(self, written: SlotLeases) -> None:
        self.slots = slots_of(written.slots, len(written.keys))
        prefixes = (
            decoded_prefixes(written.keys, written.prefixes)
            if written.prefixes
            else [""] * len(self.slots)
        )
        self._columns = (
            numbers_of(written.generations),
            numbers_of(written.leases),
            written.keys,
            prefixes,
        )
        self._owners = written.owners

    def merge(self, block: SlotBlock, start: int, end: int) -> None:
        """Merge the entries from `start` to `end` into their block."""
        put = _column_writer(self.slots, start, end)
        for column, values in zip(
            (block.generations, block.leases, block.keys, block.prefixes),
            self._columns,
            strict=True,
        ):
            put(column, values)
        for i in range(start, end) if self._owners or block.owners else ():
            block.owners[self.slots[i] % BLOCK] = self._owners[i] if self._owners else ""


def split_by_block(
    changes: SlotChanges,
) -> Iterator[tuple[int, StateColumns | LeaseColumns, int, int]]:
    """Yield changes by block: number of the block, columns, first entry, end of its entries."""
    for written in (StateColumns(changes.states), LeaseColumns(changes.leases)):
        slots, start = written.slots, 0
        while start < len(slots):
            block = slots[start] // BLOCK
            end = bisect_left(slots, (block + 1) * BLOCK, start)
            yield block, written, start, end
            start = end


def changed_blocks(changes: SlotChanges) -> Iterable[int]:
    """Numbers of the changed blocks."""
    # States suffice: a leased slot has changed its state, too.
    slots = slots_of(changes.states.slots, len(changes.states.states))
    if slots[-1] - slots[0] < BLOCK or isinstance(slots, range):
        return range(slots[0] // BLOCK, slots[-1] // BLOCK + 1)
    return {slot // BLOCK for slot in slots}


def _column_writer(slots: Sequence[int], start: int, end: int) -> Callable[[Any, Any], None]:
    """Return a function that copies entries from `start` to `end` into a block's column."""
    first, last = slots[start] % BLOCK, slots[end - 1] % BLOCK

    def put_run(column: Any, values: Any) -> None:
        column[first : last + 1] = values[start:end]

    def put_each(column: Any, values: Any) -> None:
        for slot, value in zip(slots[start:end], values[start:end], strict=True):
            column[slot % BLOCK] = value

    return put_run if last - first == end - start - 1 else put_each
