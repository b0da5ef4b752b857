"""What is written down of slots: columns as bytes, made and read without a look at each slot."""

from __future__ import annotations

from array import array
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_metadata_server.core.slot_table import LIVE, as_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_metadata_server.core.scope import Scope


class SlotStates(NamedTuple):
    """How some slots are now. Columns have 8 bytes a slot, `states` one."""

    epoch: int
    slots: bytes
    """In ascending order, as in all columns; of three neighbours and more the first and the
    last."""
    states: bytes
    until: bytes
    """Empty where all are live."""
    lengths: bytes
    """Empty where all are 0; so are checksums."""
    checksums: bytes


class SlotLeases(NamedTuple):
    """For what some slots were leased: it stays as it is until they are leased again."""

    slots: bytes
    generations: bytes
    leases: bytes
    keys: list[str]
    prefixes: list[str]
    """Empty where none has one."""
    owners: list[str]
    """Empty where none has a name."""


class SlotChanges(NamedTuple):
    """What has changed in one scope: the states of all slots that did, and the leases of those that
    were leased anew."""

    states: SlotStates
    leases: SlotLeases


def changes_of(
    scope: Scope, changed: Sequence[Sequence[int]], leased: Sequence[Sequence[int]]
) -> SlotChanges:
    """Some slots as they are now; `leased` are those among them that were leased since they were
    written down last.

    Both come in parts, and slots may come several times.
    """
    table, owners = scope.table, scope.leases.owners
    slots = _ascending(changed)
    pick = _picker(slots)
    now = bytes(pick(table.states))
    states = SlotStates(
        scope.epoch,
        _places(slots),
        now,
        b"" if now.count(LIVE) == len(now) else _wide("d", pick(table.until)),
        _unless_zero(pick(table.lengths)),
        _unless_zero(pick(table.checksums)),
    )
    if not leased:
        return SlotChanges(states, SlotLeases(b"", b"", b"", [], [], []))
    slots = _ascending(leased)
    pick = _picker(slots)
    prefixes = list(pick(table.prefixes))
    leases = SlotLeases(
        _places(slots),
        _wide("Q", pick(table.generations)),
        _wide("Q", pick(table.leases)),
        list(pick(table.keys)),
        prefixes if any(prefixes) else [],
        [owners.get(slot, "") for slot in slots] if owners else [],
    )
    return SlotChanges(states, leases)


def slots_of(column: bytes, count: int) -> Sequence[int]:
    """So many slots, as they were before they were written."""
    slots = numbers_of(column)
    return slots if len(slots) == count else range(slots[0], slots[0] + count)


def numbers_of(column: bytes) -> array[int]:
    """A column of whole numbers as it was before it was written."""
    return array("Q", column)


def times_of(column: bytes) -> array[float]:
    """The same of times."""
    return array("d", column)


def _ascending(parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Each once; a range if they are neighbours."""
    if len(parts) == 1 and isinstance(parts[0], range):
        # Nearly always.
        return parts[0]
    return as_run(sorted(set(chain.from_iterable(parts))))


def _picker(slots: Sequence[int]) -> Callable[[Any], Any]:
    """What takes those slots, of which there are some, out of a column."""
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
