"""Parts of a snapshot.

A snapshot is a stream: for each scope a `ScopeHeader` and then its slots, in chunks, as `Pages` and
`EmptySlots`; at the end `Counters`. Each slot that was ever used is in it once, in any order; all
others are free and of generation 0. Not part of a snapshot: leases, pins, answers of idempotency
keys, hits and misses.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash

from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.protocol import ScopeGeometry  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_PAGE: Final = struct.Struct("<QQQQ")
_GENERATION: Final = struct.Struct("<?QQ")
DIGESTS: Final = 1 << 128


class ScopeHeader(msgspec.Struct, frozen=True, tag="scope"):
    """Begin of a scope: its geometry, epoch, tenant and model."""

    geometry: ScopeGeometry
    epoch: int = 0
    tenant: str = ""
    model: str = ""


class Pages(msgspec.Struct, frozen=True, tag="pages"):
    """Live pages, as columns of equal length."""

    slots: list[int]
    generations: list[int]
    uses: list[int]
    """Position in the order of use, unique in the scope: at least 1, less than the counter `lease`,
    and greater the later a page was used."""
    lengths: list[int]
    """Bytes; 0 if the writer has not stated them."""
    checksums: list[int]
    keys: list[str]
    prefixes: list[str]

    def __len__(self) -> int:
        return len(self.slots)

    def partition(self, keeps: Callable[[int], bool]) -> tuple[Pages, Pages]:
        """Split into the pages at indexes for which `keeps` is true, and the others."""
        kept, gone = list[int](), list[int]()
        for place in range(len(self.slots)):
            (kept if keeps(place) else gone).append(place)
        # Nearly always all pages stay, so they are not copied then.
        return (self if not gone else self.at(kept)), self.at(gone)

    def at(self, places: list[int]) -> Pages:
        """Return the pages at these indexes."""
        return Pages(
            *([column[place] for place in places] for column in msgspec.structs.astuple(self))
        )


def joined(batches: Iterable[Pages]) -> Pages:
    """Concatenate batches."""
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [], [])
    for batch in batches:
        for column, more in zip(columns, msgspec.structs.astuple(batch), strict=True):
            column += more
    return Pages(*columns)


class EmptySlots(msgspec.Struct, frozen=True, tag="rests"):
    """Used slots without a page; their next page gets a greater generation."""

    slots: list[int]
    generations: list[int]
    until: list[float]
    """End of the quarantine, in seconds since 1970; 0 for a free slot."""

    def __len__(self) -> int:
        return len(self.slots)


class Counters(msgspec.Struct, frozen=True, tag="counters"):
    """First numbers of leases and pins that were never given."""

    lease: int = 1
    pin: int = 1


SnapshotPart = ScopeHeader | Pages | EmptySlots | Counters


def pages_digest(pages: Pages) -> int:
    """Return a digest of 128 bits of pages, without their generations and order of use."""
    # A sum, so that the digests of batches add up in any order, modulo 2**128: a store returns
    # slots in another order and in other batches than it was given.
    digest, whole = xxhash.xxh3_128_intdigest, 0
    for slot, _, _, length, checksum, key, prefix in zip(
        *msgspec.structs.astuple(pages), strict=True
    ):
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


@dataclass(slots=True)
class ScopeCount:
    """Numbers of one scope in a snapshot."""

    slots: int
    pages: int = 0
    empty: int = 0
    """Used slots without a page."""
    digest: int = 0
    """Digest of the pages (`pages_digest`)."""


@dataclass(slots=True)
class Tally:
    """Summary of a snapshot, by which two snapshots are compared."""

    scopes: dict[str, ScopeCount] = field(default_factory=dict[str, ScopeCount])

    @property
    def pages(self) -> int:
        """Pages of all scopes."""
        return sum(count.pages for count in self.scopes.values())

    def over(self, parts: Iterable[SnapshotPart]) -> Iterator[SnapshotPart]:
        """Yield a stream unchanged, and count it on the way.

        Raises:
            SnapshotError: a scope is in the stream twice, or slots precede every scope.
        """
        count: ScopeCount | None = None
        for part in parts:
            match part:
                case ScopeHeader():
                    name = part.geometry.scope
                    if name in self.scopes:
                        raise SnapshotError(f"scope {name} is in the snapshot twice")
                    count = self.scopes[name] = ScopeCount(part.geometry.slots)
                case Pages() | EmptySlots():
                    if count is None:
                        raise SnapshotError("slots come before any scope")
                    _add(count, part)
                case Counters():
                    pass
            yield part

    def differences(self, other: Tally) -> list[str]:
        """Return the differences to another tally, one message for each scope."""
        # Empty slots are left out: a store may add quarantined slots of its own, or release some.
        found = list[str]()
        for name in sorted(self.scopes.keys() | other.scopes.keys()):
            mine, its = self.scopes.get(name), other.scopes.get(name)
            if mine is None or its is None:
                found.append(f"scope {name} is only on one side")
            elif (mine.slots, mine.pages) != (its.slots, its.pages):
                found.append(
                    f"scope {name} has {mine.pages:,} pages in {mine.slots:,} slots, and "
                    f"{its.pages:,} in {its.slots:,}"
                )
            elif mine.digest != its.digest:
                found.append(
                    f"scope {name} has {mine.pages:,} pages on both sides, and they are not the "
                    f"same"
                )
        return found


def _add(count: ScopeCount, part: Pages | EmptySlots) -> None:
    if isinstance(part, EmptySlots):
        count.empty += len(part)
        return
    count.pages += len(part)
    count.digest = (count.digest + pages_digest(part)) % DIGESTS
