"""Invariants of a scope, checked from its slots and from its indexes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, NAMES, QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_metadata_server.core.scope import Scope

CHUNK_SLOTS: Final = 2048
MAX_WHOLE_SLOTS: Final = 50_000
"""Larger scopes are checked in chunks only. Checking all indexes of this many slots in one step
takes some milliseconds, in which the server answers nothing."""
SHOWN: Final = 100
"""Problems that one fsck lists."""


def audit(scope: Scope) -> Iterator[list[str]]:
    """Yield problems in chunks, one sentence each; the scope may change between two chunks."""
    yield _counts(scope)
    for start in range(0, len(scope.table), CHUNK_SLOTS):
        yield [
            problem
            for slot in range(start, min(start + CHUNK_SLOTS, len(scope.table)))
            for problem in _slot(scope, slot)
        ]
    # Indexes can be compared with the slots in one step only: a change between two chunks would
    # look like a contradiction.
    if len(scope.table) <= MAX_WHOLE_SLOTS:
        yield [*_free_list(scope), *_index(scope), *_prefix_counts(scope)]
        yield [
            f"slot {slot} is live, and is in no place where eviction finds it"
            for slot in scope.lru.unreachable()
        ]


def _counts(scope: Scope) -> list[str]:
    table, unused = scope.table, scope.geometry.slots - len(scope.table)
    listed = {
        FREE: len(scope.free) - unused,
        LEASED: len(scope.leases),
        LIVE: len(scope.lru),
        QUARANTINED: scope.in_quarantine,
    }
    found = [
        f"{table.count(state)} slots are {NAMES[state]}, and {count} are in the list of those"
        for state, count in listed.items()
        if table.count(state) != count
    ]
    if unused < 0:
        found.append(f"there are {len(table)} slots in a scope of {scope.geometry.slots}")
    owned = table.count(LEASED) + table.count(LIVE)
    if len(table.by_key) != owned:
        found.append(f"{len(table.by_key)} keys own {owned} slots")
    return found


def _slot(scope: Scope, slot: int) -> Iterator[str]:
    table, log = scope.table, scope.leases.log
    state, key, lease = table.states[slot], table.keys[slot], table.leases[slot]
    if state not in (FREE, LEASED, LIVE, QUARANTINED):
        yield f"slot {slot} has the unknown state {state}"
    if state in (LEASED, LIVE):
        if not key:
            yield f"slot {slot} is {NAMES[state]} without a key"
        if not table.generations[slot] or not lease:
            yield f"slot {slot} is {NAMES[state]} without a generation or a lease"
    if state in (LEASED, LIVE) and (other := table.by_key.get(key, -1)) != slot:
        yield f"slot {slot} is {NAMES[state]} for {key!r}, which is in {other}"
    if state == LIVE:
        if 0 < scope.geometry.slot_bytes < table.lengths[slot]:
            yield f"slot {slot} of {scope.geometry.slot_bytes} bytes holds {table.lengths[slot]}"
        if log.slot(lease) != slot:
            yield f"slot {slot} is live by lease {lease}, which is not in the lease log"
    elif state == LEASED and log.slot(lease) != slot:
        yield f"slot {slot} is leased by {lease}, which is for {log.slot(lease)}"


def _free_list(scope: Scope) -> Iterator[str]:
    states, seen = scope.table.states, set[int]()
    for slot in scope.free.returned:
        if slot in seen:
            yield f"slot {slot} is twice in the list of free slots"
        elif not 0 <= slot < len(states):
            yield f"slot {slot} in the list of free slots does not exist"
        elif states[slot] != FREE:
            yield f"slot {slot} is {_named(states[slot])}, and in the list of free slots"
        seen.add(slot)


def _index(scope: Scope) -> Iterator[str]:
    states, keys = scope.table.states, scope.table.keys
    for key, slot in scope.table.by_key.items():
        if states[slot] not in (LEASED, LIVE) or keys[slot] != key:
            state = _named(states[slot])
            yield f"key {key!r} maps to slot {slot}, which is {state} for {keys[slot]!r}"


def _prefix_counts(scope: Scope) -> Iterator[str]:
    table = scope.table
    slots = [slot for slot, state in enumerate(table.states) if state == LIVE]
    # A page that names itself as its prefix counts for nothing; else it could never be evicted.
    named = Counter(
        table.prefixes[slot] for slot in slots if table.prefixes[slot] not in ("", table.keys[slot])
    )
    for slot in slots:
        if table.children[slot] != named.pop(table.keys[slot], 0):
            yield f"slot {slot} has another prefix reference count than {table.children[slot]}"
    if scope.prefix_refs.pending != named:
        yield (
            f"{len(scope.prefix_refs.pending)} prefixes that are not live are counted, and "
            f"{len(named)} are named"
        )


def _named(state: int) -> str:
    return NAMES[state] if state < len(NAMES) else f"in state {state}"
