"""Encoding of slot changes for the log: columns as bytes.

Columns are copied as slices of the slot table. A loop over slots would take several times as long.
"""

from __future__ import annotations

from array import array
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_metadata_server.core.slot_table import LIVE, as_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_metadata_server.core.scope import Scope


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


def changes_of(
    scope: Scope, changed: Sequence[Sequence[int]], leased: Sequence[Sequence[int]]
) -> SlotChanges:
    """Encode the current state of slots.

    Args:
        scope: their scope.
        changed: changed slots, in parts; a slot may occur several times.
        leased: those of them that were leased since they were encoded last, likewise.
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
        encoded_prefixes(keys, prefixes) if any(prefixes) else [],
        [owners.get(slot, "") for slot in slots] if owners else [],
    )
    return SlotChanges(states, leases)


def encoded_prefixes(keys: list[str], prefixes: list[str]) -> Prefixes:
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


def decoded_prefixes(keys: Sequence[str], prefixes: Prefixes) -> list[str]:
    """Decode the prefixes of slots with these keys."""
    return [
        key if prefix is None else prefix
        for key, prefix in zip(["", *keys[:-1]], prefixes, strict=True)
    ]


def slots_of(column: bytes, count: int) -> Sequence[int]:
    """Decode a column of `count` slots."""
    slots = numbers_of(column)
    return slots if len(slots) == count else range(slots[0], slots[0] + count)


def numbers_of(column: bytes) -> array[int]:
    """Decode a column of integers."""
    return array("Q", column)


def times_of(column: bytes) -> array[float]:
    """Decode a column of times."""
    return array("d", column)


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
