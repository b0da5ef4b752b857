"""Copies of a scope's slots, for `fsck` with data files."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE
from hicache_metadata_server.protocol import Exported

if TYPE_CHECKING:
    from hicache_metadata_server.core.scope import Scope

_PAGE: Final = struct.Struct("<QQQQ")
_GENERATION: Final = struct.Struct("<?QQ")
DIGESTS: Final = 1 << 128
CHUNK_SLOTS: Final = 2048
"""Slots of one chunk: reading them takes about 3 ms, for which a server answers no one else."""


class Pages(NamedTuple):
    """Live pages, as columns of equal length."""

    slots: list[int]
    generations: list[int]
    uses: list[int]
    """Numbers of their leases: greater, the later a page was reserved."""
    lengths: list[int]
    """Bytes; 0 if the writer has not stated them."""
    checksums: list[int]
    keys: list[str]
    prefixes: list[str]


class EmptySlots(NamedTuple):
    """Used slots without a page; their next page gets a greater generation."""

    slots: list[int]
    generations: list[int]
    until: list[float]
    """End of the quarantine, in seconds since 1970; 0 for a free slot."""


class Counters(NamedTuple):
    """First numbers of leases and pins that were never given."""

    lease: int = 1
    pin: int = 1


def pages_digest(pages: Pages) -> int:
    """Return a digest of 128 bits of pages, without their generations and order of use."""
    # A sum, so that the digests of batches add up in any order, modulo 2**128.
    digest, whole = xxhash.xxh3_128_intdigest, 0
    for slot, _, _, length, checksum, key, prefix in zip(*pages, strict=True):
        name = key.encode()
        whole += digest(_PAGE.pack(slot, length, checksum, len(name)) + name + prefix.encode())
    return whole % DIGESTS


def generations_digest(part: Pages | EmptySlots) -> int:
    """Return a digest of the generations of slots, which adds up in the same way."""
    digest, held = xxhash.xxh3_128_intdigest, isinstance(part, Pages)
    rows = zip(part.slots, part.generations, strict=True)
    return (
        sum(digest(_GENERATION.pack(held, slot, generation)) for slot, generation in rows) % DIGESTS
    )


def export_slots(
    scope: Scope, first: int, end: int, now: float, max_lease_seconds: float
) -> tuple[Pages, EmptySlots]:
    """Copy the used slots from `first` up to `end`: live pages, and quarantined or free slots.

    A leased slot is quarantined for as long as any lease may last, because leases do not travel
    and its writer does not know of the copy. A pinned slot without a page is quarantined until its
    pins end.
    """
    table = scope.table
    live, others = list[int](), list[int]()
    for slot, state in enumerate(table.states[first:end], first):
        if state == LIVE:
            live.append(slot)
        # Generation 0 is a slot that was never used.
        elif table.generations[slot]:
            others.append(slot)
    pages = Pages(
        slots=live,
        generations=[table.generations[slot] for slot in live],
        uses=[table.leases[slot] for slot in live],
        lengths=[table.lengths[slot] for slot in live],
        checksums=[table.checksums[slot] for slot in live],
        keys=[table.keys[slot] for slot in live],
        prefixes=[table.prefixes[slot] for slot in live],
    )
    until = [_until(scope, slot, now, max_lease_seconds) for slot in others]
    return pages, EmptySlots(others, [table.generations[slot] for slot in others], until)


def _until(scope: Scope, slot: int, now: float, max_lease_seconds: float) -> float:
    state = scope.table.states[slot]
    if state == FREE:
        return 0.0
    if state == LEASED:
        return now + max_lease_seconds
    # `until` of a slot that a clear has emptied is set later, when the clear reaches the slot.
    ends = [
        scope.table.until[slot],
        scope.cleared_until,
        *scope.pins.by_slot.get(slot, {}).values(),
    ]
    return min(max(ends), now + max_lease_seconds)


def chunk_digest(pages: Pages, empty: EmptySlots) -> str:
    """Return a digest that changes when a slot gets other content or another generation."""
    # Generations too: a slot that was reused for the same page holds another writer's bytes.
    whole = pages_digest(pages) + generations_digest(pages) + generations_digest(empty)
    return f"{whole % DIGESTS:032x}"


def exported(
    pages: Pages,
    empty: EmptySlots,
    now: float,
    *,
    used: int,
    epoch: int,
    counters: Counters,
    rows: bool,
    tenant: str = "",
) -> Exported:
    """Return the answer to a request for slots; without `rows` only digest and counters."""
    digest = chunk_digest(pages, empty)
    if not rows:
        return Exported(
            used=used,
            epoch=epoch,
            next_lease=counters.lease,
            next_pin=counters.pin,
            digest=digest,
            tenant=tenant,
        )
    return Exported(
        used=used,
        epoch=epoch,
        next_lease=counters.lease,
        next_pin=counters.pin,
        digest=digest,
        tenant=tenant,
        slots=pages.slots,
        generations=pages.generations,
        leases=pages.uses,
        lengths=pages.lengths,
        checksums=pages.checksums,
        keys=pages.keys,
        prefixes=pages.prefixes,
        other_slots=empty.slots,
        other_generations=empty.generations,
        # Durations, since the clocks of two machines differ.
        other_seconds=[max(0.0, until - now) for until in empty.until],
    )


def parts_of(answer: Exported, now: float) -> tuple[Pages, EmptySlots]:
    """Decode an answer; convert its durations to times of this machine.

    Raises:
        ValueError: the columns have different lengths, or do not match the digest.
    """
    pages = Pages(
        answer.slots,
        answer.generations,
        answer.leases,
        answer.lengths,
        answer.checksums,
        answer.keys,
        answer.prefixes,
    )
    until = [now + seconds if seconds > 0 else 0.0 for seconds in answer.other_seconds]
    empty = EmptySlots(answer.other_slots, answer.other_generations, until)
    if chunk_digest(pages, empty) != answer.digest or len(until) != len(empty.slots):
        raise ValueError("the digest of a chunk is not that of its slots")
    return pages, empty
