"""Encoding of slots for a store: changed slots for its log, blocks of slots for its snapshot.

Columns are copied as slices of the slot table. A loop over slots would take several times as long.
"""

from __future__ import annotations

from array import array
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from hicache_metadata_server.core.slot_table import LEASED, LIVE, as_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_metadata_server.core.scope import Scope
    from hicache_metadata_server.core.slot_table import SlotTable

BLOCK: Final = 64
"""Slots of a block, which takes about 7 KB. A batch of 128 neighbours changes two or three blocks."""

Prefixes = list[str | None]
"""Prefixes of some slots; None for the key of the slot before it in the column."""


class SlotStates(NamedTuple):
    """Current states of some slots. Columns have 8 bytes a slot, `states` one."""

    epoch: int
    slots: bytes
    """In ascending order, as in all columns; of three or more neighbours only the first and the
    last."""
    states: bytes
    until: bytes
    """Empty if all slots are live."""
    lengths: bytes
    """Empty if all are 0; so are checksums."""
    checksums: bytes


class SlotLeases(NamedTuple):
    """Leases of some slots: constant until the slots are leased again."""

    slots: bytes
    generations: bytes
    leases: bytes
    keys: list[str]
    prefixes: Prefixes
    """Empty if no slot has a prefix."""
    owners: list[str]
    """Empty if no owner has a name."""


class SlotChanges(NamedTuple):
    """Changes of one scope: states of all changed slots, leases of those leased anew."""

    states: SlotStates
    leases: SlotLeases

    @property
    def changed(self) -> Sequence[int]:
        """Changed slots, in ascending order."""
        # A leased slot has changed its state, too.
        return _slots_of(self.states.slots, len(self.states.states))

    @property
    def leased(self) -> Sequence[int]:
        """Slots that were leased anew, in ascending order."""
        return _slots_of(self.leases.slots, len(self.leases.keys))


def changes_of(
    scope: Scope, changed: Sequence[Sequence[int]], leased: Sequence[Sequence[int]]
) -> SlotChanges:
    """Encode the current state of slots.

    `changed` has the changed slots in parts, in which a slot may occur several times; `leased`
    likewise those of them that were leased since they were encoded last.
    """
    table, owners = scope.table, scope.leases.owners
    slots = _ascending(changed)
    pick = _picker(slots)
    now = bytes(pick(table.states))
    states = SlotStates(
        scope.epoch,
        _places(slots),
        now,
        # A live slot has no end, and batches of commits are nearly all that is written.
        b"" if now.count(LIVE) == len(now) else _wide("d", pick(table.until)),
        _unless_zero(pick(table.lengths)),
        _unless_zero(pick(table.checksums)),
    )
    if not leased:
        return SlotChanges(states, SlotLeases(b"", b"", b"", [], [], []))
    slots = _ascending(leased)
    pick = _picker(slots)
    keys, prefixes = list(pick(table.keys)), list(pick(table.prefixes))
    leases = SlotLeases(
        _places(slots),
        _wide("Q", pick(table.generations)),
        _wide("Q", pick(table.leases)),
        keys,
        _encoded_prefixes(keys, prefixes) if any(prefixes) else [],
        [owners.get(slot, "") for slot in slots] if owners else [],
    )
    return SlotChanges(states, leases)


def changed_blocks(changes: SlotChanges) -> Iterable[int]:
    """Numbers of the changed blocks."""
    slots = changes.changed
    if slots[-1] - slots[0] < BLOCK or isinstance(slots, range):
        return range(slots[0] // BLOCK, slots[-1] // BLOCK + 1)
    return {slot // BLOCK for slot in slots}


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


_WIDE: Final = ("epochs", "lengths", "checksums", "generations", "leases")
_OF_TABLE: Final = ("until", "lengths", "checksums", "generations", "leases", "keys", "prefixes")


class SlotColumns:
    """Columns of neighbouring slots, as a store has them: those of a block, or of a scope.

    Unused slots are free and of generation 0. Slots that are neither live nor leased may still have
    keys and owners of earlier leases.
    """

    def __init__(self, count: int = BLOCK) -> None:
        self.states = bytearray()
        self.epochs = array("Q")
        self.lengths = array("Q")
        self.checksums = array("Q")
        self.generations = array("Q")
        self.leases = array("Q")
        self.until = array("d")
        self.keys = list[str]()
        self.prefixes = list[str]()
        self.owners: dict[int, str] = {}
        self.outside = list[int]()
        """Slots of blocks beyond the end of their scope, which are left out."""
        self._grow(count)

    def __len__(self) -> int:
        return len(self.states)

    def fill(self, table: SlotTable, count: int) -> None:
        """Hand the first `count` slots over to an empty table."""
        for name in ("states", *_OF_TABLE):
            setattr(table, name, getattr(self, name)[:count])
        table.children = array("Q", bytes(8 * count))
        table.older = array("q", bytes(8 * count))
        table.newer = array("q", bytes(8 * count))

    @classmethod
    def decode(cls, blob: bytes) -> SlotColumns:
        """Decode a block.

        Raises:
            ValueError: the blob is no block.
        """
        written = msgspec.msgpack.decode(blob, type=_EncodedBlock)
        if {len(column) for column in written[1:7]} != {8 * BLOCK} or {
            len(written[i]) for i in (0, 7, 8)
        } != {BLOCK}:
            raise ValueError(f"a block of other than {BLOCK} slots")
        block = cls(0)
        block.states = bytearray(written.states)
        block.until = array("d", written.until)
        for name in _WIDE:
            setattr(block, name, array("Q", getattr(written, name)))
        block.keys = written.keys
        block.prefixes = _decoded_prefixes(written.keys, written.prefixes)
        block.owners = written.owners
        return block

    @classmethod
    def of(cls, scope: Scope, number: int) -> SlotColumns:
        """Copy a block of a scope as it is now."""
        table, first, end = scope.table, number * BLOCK, (number + 1) * BLOCK
        block = cls(0)
        block.states = table.states[first:end]
        for name in _OF_TABLE:
            setattr(block, name, getattr(table, name)[first:end])
        # Memory has applied all clears, so every slot is of the current epoch.
        block.epochs = array("Q", (scope.epoch,)) * len(block.states)
        if owners := scope.leases.owners:
            block.owners = {
                slot - first: owners[slot] for slot in range(first, end) if slot in owners
            }
        block._grow(BLOCK - len(block))
        return block

    def encode(self) -> bytes:
        """Encode a block, without keys of slots that are neither live nor leased."""
        keys, prefixes = self.keys, self.prefixes
        if self.states.count(LIVE) + self.states.count(LEASED) < BLOCK:
            owned = [state in (LIVE, LEASED) for state in self.states]
            keys = [key if kept else "" for key, kept in zip(keys, owned, strict=True)]
            prefixes = [one if kept else "" for one, kept in zip(prefixes, owned, strict=True)]
        return msgspec.msgpack.encode(
            _EncodedBlock(
                bytes(self.states),
                self.epochs.tobytes(),
                self.until.tobytes(),
                self.lengths.tobytes(),
                self.checksums.tobytes(),
                self.generations.tobytes(),
                self.leases.tobytes(),
                keys,
                _encoded_prefixes(keys, prefixes),
                {
                    place: owner
                    for place, owner in self.owners.items()
                    if self.states[place] == LEASED
                },
            )
        )

    def merge(self, changes: SlotChanges) -> None:
        """Take over the changed slots of one group."""
        states, leases = changes
        slots = changes.changed
        self._grow(slots[-1] + 1 - len(self))
        put, zeros = _column_writer(slots), bytes(8 * len(slots))
        put(self.states, states.states)
        put(self.epochs, array("Q", (states.epoch,)) * len(slots))
        put(self.until, array("d", states.until or zeros))
        put(self.lengths, array("Q", states.lengths or zeros))
        put(self.checksums, array("Q", states.checksums or zeros))
        if not leases.keys:
            return
        slots = changes.leased
        put = _column_writer(slots)
        put(self.generations, array("Q", leases.generations))
        put(self.leases, array("Q", leases.leases))
        put(self.keys, leases.keys)
        put(
            self.prefixes,
            _decoded_prefixes(leases.keys, leases.prefixes)
            if leases.prefixes
            else [""] * len(slots),
        )
        if leases.owners or self.owners:
            self.owners.update(zip(slots, leases.owners or [""] * len(slots), strict=True))

    def put_block(self, number: int, block: SlotColumns) -> None:
        """Take over a block of the same scope."""
        first = number * BLOCK
        self._grow(first + BLOCK - len(self))
        run = slice(first, first + BLOCK)
        self.states[run] = block.states
        for name in ("until", "keys", "prefixes", *_WIDE):
            getattr(self, name)[run] = getattr(block, name)
        self.owners |= {first + place: owner for place, owner in block.owners.items()}

    def _grow(self, count: int) -> None:
        """Add unused slots at the end."""
        if count <= 0:
            return
        self.states.extend(bytes(count))
        for name in ("until", *_WIDE):
            getattr(self, name).frombytes(bytes(8 * count))
        self.keys += [""] * count
        self.prefixes += [""] * count


def columns_of(
    slots: int, blocks: Iterable[tuple[int, SlotColumns]], groups: Iterable[SlotChanges]
) -> SlotColumns:
    """Columns of a scope: blocks of the snapshot, and on them the groups of the log in their order.

    A block may have changes of later groups already. All groups in order repeat them, so that each
    slot ends in its last state.

    Raises:
        ValueError: a group has a slot that the scope has not.
    """
    columns = SlotColumns(0)
    for number, block in blocks:
        # A damaged number may be that of a slot far outside, up to which no column could grow.
        if number * BLOCK < slots:
            columns.put_block(number, block)
        first = max(0, slots - number * BLOCK)
        columns.outside += [
            number * BLOCK + place
            for place in range(first, BLOCK)
            if block.states[place] or block.generations[place]
        ]
    for changes in groups:
        if changes.changed[-1] >= slots:
            raise ValueError(f"a change of slot {changes.changed[-1]} in a scope of {slots}")
        columns.merge(changes)
    return columns


def _encoded_prefixes(keys: list[str], prefixes: list[str]) -> Prefixes:
    """Encode the prefixes of slots with these keys; there must be at least one.

    The pages of a batch are a chain: without this, each key would be written twice.
    """
    if prefixes[1:] == keys[:-1]:
        # The usual case: one batch, whose comparison looks at no text.
        return [prefixes[0], *[None] * (len(keys) - 1)]
    return [
        None if prefix == key else prefix
        for key, prefix in zip(["", *keys[:-1]], prefixes, strict=True)
    ]


def _decoded_prefixes(keys: Sequence[str], prefixes: Prefixes) -> list[str]:
    """Decode the prefixes of slots with these keys."""
    return [
        key if prefix is None else prefix
        for key, prefix in zip(["", *keys[:-1]], prefixes, strict=True)
    ]


def _slots_of(column: bytes, count: int) -> Sequence[int]:
    """Decode a column of `count` slots."""
    slots = array("Q", column)
    return slots if len(slots) == count else range(slots[0], slots[0] + count)


def _column_writer(slots: Sequence[int]) -> Callable[[Any, Any], None]:
    """Return a function that writes values of slots into a column."""
    first, last = slots[0], slots[-1]

    def put_run(column: Any, values: Any) -> None:
        column[first : last + 1] = values

    def put_each(column: Any, values: Any) -> None:
        for slot, value in zip(slots, values, strict=True):
            column[slot] = value

    return put_run if last - first == len(slots) - 1 else put_each


def _ascending(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Sorted slots without duplicates; a range if they are neighbours."""
    if len(parts) == 1 and isinstance(parts[0], range):
        # The usual case: one batch of neighbours since the last group.
        return parts[0]
    return as_run(sorted(set(chain.from_iterable(parts))))


def _picker(slots: Sequence[int]) -> Callable[[Any], Any]:
    """Return a function that selects slots from a column; there must be at least one slot."""
    # Either is several times as fast as a loop over the slots.
    return (
        itemgetter(slice(slots.start, slots.stop))
        if isinstance(slots, range)
        else itemgetter(*slots)
    )


def _places(slots: Sequence[int]) -> bytes:
    return array(
        "Q", (slots[0], slots[-1]) if isinstance(slots, range) and len(slots) > 2 else slots
    ).tobytes()


def _unless_zero(values: Any) -> bytes:
    wide = _wide("Q", values)
    return wide if wide.strip(b"\0") else b""


def _wide(kind: str, values: Any) -> bytes:
    found: bytes = values.tobytes() if isinstance(values, array) else array(kind, values).tobytes()
    return found
