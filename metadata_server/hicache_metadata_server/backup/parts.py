"""The parts of a snapshot.

A snapshot is a stream: for each scope a `ScopeHeader` and then its slots, some at a time, as `Pages`
and `EmptySlots`; at the end `Counters`. Each slot that was ever used stands in it once, in any order;
the others are free and of generation 0. What is not in it does not travel: leases, pins, answers
kept for idempotency keys, hits and misses.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash

from hicache_metadata_server.protocol import ScopeGeometry  # noqa: TC001 - msgspec reads these types when it decodes
from hicache_metadata_server.storage.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_PAGE: Final = struct.Struct("<QQQQ")
_GENERATION: Final = struct.Struct("<?QQ")
DIGESTS: Final = 1 << 128


class SnapshotError(StoreError):
    """A snapshot cannot be taken, read or put into a store."""


class ScopeHeader(msgspec.Struct, frozen=True, tag="scope"):
    """A scope begins."""

    geometry: ScopeGeometry
    epoch: int = 0
    tenant: str = ""
    model: str = ""


class Pages(msgspec.Struct, frozen=True, tag="pages"):
    """Some live pages as columns of one length."""

    slots: list[int]
    generations: list[int]
    uses: list[int]
    """The later a page was used, the greater; at least 1, unlike any other's of the scope, and less
    than the counter `lease`."""
    lengths: list[int]
    """Bytes; 0 where the writer has not told."""
    checksums: list[int]
    keys: list[str]
    prefixes: list[str]

    def __len__(self) -> int:
        return len(self.slots)

    def partition(self, keeps: Callable[[int], bool]) -> tuple[Pages, Pages]:
        """Those at the places that are to be kept, and the others."""
        kept, gone = list[int](), list[int]()
        for place in range(len(self.slots)):
            (kept if keeps(place) else gone).append(place)
        return (self if not gone else self.at(kept)), self.at(gone)

    def at(self, places: list[int]) -> Pages:
        """Those at some places."""
        return Pages(
            *([column[place] for place in places] for column in msgspec.structs.astuple(self))
        )


def joined(batches: Iterable[Pages]) -> Pages:
    """Several batches as one."""
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [], [])
    for batch in batches:
        for column, more in zip(columns, msgspec.structs.astuple(batch), strict=True):
            column += more
    return Pages(*columns)


class EmptySlots(msgspec.Struct, frozen=True, tag="rests"):
    """Some slots that were used and hold nothing; what they are given for next has a greater
    generation."""

    slots: list[int]
    generations: list[int]
    until: list[float]
    """Seconds since 1970 before which they are given to nobody; 0 for a free slot."""

    def __len__(self) -> int:
        return len(self.slots)


class Counters(msgspec.Struct, frozen=True, tag="counters"):
    """No number from here on was given."""

    lease: int = 1
    pin: int = 1


SnapshotPart = ScopeHeader | Pages | EmptySlots | Counters


def pages_digest(pages: Pages) -> int:
    """128 bits over what some pages are, without generations and use; those of several batches add
    up, modulo 2**128, in any order."""
    digest, whole = xxhash.xxh3_128_intdigest, 0
    for slot, _, _, length, checksum, key, prefix in zip(
        *msgspec.structs.astuple(pages), strict=True
    ):
        name = key.encode()
        whole += digest(_PAGE.pack(slot, length, checksum, len(name)) + name + prefix.encode())
    return whole % DIGESTS


def generations_digest(part: Pages | EmptySlots) -> int:
    """The same over the generations of slots."""
    digest, held = xxhash.xxh3_128_intdigest, isinstance(part, Pages)
    rows = zip(part.slots, part.generations, strict=True)
    return (
        sum(digest(_GENERATION.pack(held, slot, generation)) for slot, generation in rows) % DIGESTS
    )


@dataclass(slots=True)
class ScopeCount:
    """What went by of one scope."""

    slots: int
    pages: int = 0
    empty: int = 0
    """Used slots that hold nothing."""
    digest: int = 0
    """Of the pages."""


@dataclass(slots=True)
class Tally:
    """Counts what goes by of a stream."""

    scopes: dict[str, ScopeCount] = field(default_factory=dict[str, ScopeCount])

    @property
    def pages(self) -> int:
        """Of all scopes."""
        return sum(count.pages for count in self.scopes.values())

    def over(self, parts: Iterable[SnapshotPart]) -> Iterator[SnapshotPart]:
        """The same stream, counted as it is taken.

        Raises:
            SnapshotError: a scope comes twice, or slots come before any scope.
        """
        count: ScopeCount | None = None
        for part in parts:
            match part:
                case ScopeHeader():
                    name = part.geometry.scope
                    if name in self.scopes:
                        raise SnapshotError(f"scope {name} stands in the snapshot twice")
                    count = self.scopes[name] = ScopeCount(part.geometry.slots)
                case Pages() | EmptySlots():
                    if count is None:
                        raise SnapshotError("slots come before any scope")
                    _add(count, part)
                case Counters():
                    pass
            yield part

    def differences(self, other: Tally) -> list[str]:
        """Where another tally differs from this one, a sentence for each scope."""
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
