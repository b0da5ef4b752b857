"""Names of the files that the driver makes. What does not match exactly is a stranger's and is left alone.

Numbers are hexadecimal without leading zeros, so that every name has one spelling.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_backends.file.bundle import Index

WRITER_PATTERN = "[a-z2-7]{10}"
NAMESPACE_PATTERN = "[0-9a-f]{32}"
PLACE_PATTERN = "[a-z2-7]{8}"
_HEX = "(?:0|[1-9a-f][0-9a-f]{0,15})"

MAX_MARKER_BYTES = 240
"""Names of 255 bytes are legal nearly everywhere; a few are left to file systems that add to them."""

MAX_FILE_BYTES = 1 << 44
"""A name that claims a longer file is a stranger's: no file system holds one, and system calls refuse its offsets."""

MAX_CREATED_US = 1 << 53
"""A later moment, in the year 2255, does not fit into the nanoseconds that system calls take."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def random_writer() -> str:
    """A name for a writer that no other has: 50 random bits."""
    return "".join(_ALPHABET[byte % 32] for byte in os.urandom(10))


def random_birth() -> str:
    """A name that tells a store from one that was deleted and made again in its place."""
    return f"{random_writer()}.birth"


_BIRTH = re.compile(f"{WRITER_PATTERN}\\.birth")


def is_birth(text: str) -> bool:
    """Whether that is a name that `random_birth` makes."""
    return _BIRTH.fullmatch(text) is not None


class Owner(NamedTuple):
    """A process, told apart from every other one of any machine at any time."""

    place: str
    """Stands for a machine since it was booted, and a PID namespace on it: where `pid` means something."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process: a PID is used again, the two together are not."""


class BundleId(NamedTuple):
    """What tells a bundle from all others of its namespace; never used twice."""

    writer: str
    sequence: int


class Claim(NamedTuple):
    """Who is about to replace a bundle, and by which other one: from that one's appearance on the claimed bundle is void."""

    owner: Owner
    replacement: BundleId


class BundleName(msgspec.Struct, frozen=True, gc=False):
    """A bundle's file name tells its length and age, so that a listing of names is enough to know what is used.

    There is one for each file of a store: the garbage collector need not go through them.
    """

    writer: str
    sequence: int
    size: int
    """Length of the file, in bytes."""
    created_us: int
    """Microseconds since 1970 by the writer's clock, no two batches of a writer the same; kept when the bundle is rewritten."""
    checksum: int
    """Half of the one that ends the file: what is read from here and ends otherwise is another file's."""
    claim: Claim | None = None
    """Who replaces it. Until that is done the bundle stays what it is, under this longer name."""

    @property
    def id(self) -> BundleId:
        return BundleId(self.writer, self.sequence)

    @property
    def plain(self) -> BundleName:
        """The name without a claim: a name that differs in anything else is another file's."""
        return self if self.claim is None else msgspec.structs.replace(self, claim=None)

    def __str__(self) -> str:
        plain = f"{self.writer}-{self.sequence:x}-{self.size:x}-{self.created_us:x}-{self.checksum:x}.bundle"
        if self.claim is None:
            return plain
        (place, pid, started), (writer, sequence) = self.claim
        return f"{plain}.{place}-{pid:x}-{started:x}-{writer}-{sequence:x}.claimed"


_BUNDLE = re.compile(
    f"({WRITER_PATTERN})-({_HEX})-({_HEX})-({_HEX})-({_HEX})\\.bundle"
    f"(?:\\.({PLACE_PATTERN})-({_HEX})-({_HEX})-({WRITER_PATTERN})-({_HEX})\\.claimed)?"
)


def parse_bundle(text: str) -> BundleName | None:
    """The bundle of that file name, None for a name that the driver did not make."""
    match = _BUNDLE.fullmatch(text)
    if match is None:
        return None
    writer, sequence, size, created, checksum, place, pid, started, claimant, number = match.groups()
    claim = None if place is None else Claim(Owner(place, int(pid, 16), int(started, 16)), BundleId(claimant, int(number, 16)))
    name = BundleName(writer, int(sequence, 16), int(size, 16), int(created, 16), int(checksum, 16), claim)
    return name if _is_sane(name) else None


# Thousands of these may come with a lookup; the garbage collector need not know of them.


class Added(msgspec.Struct, frozen=True, gc=False):
    """A bundle has been published."""

    bundle: BundleName
    index: Index | None = None
    """For the event log; a marker's name has no room for it."""

    def __str__(self) -> str:
        return f"a{self.bundle.size:x}-{self.bundle.created_us:x}-{self.bundle.checksum:x}"


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A bundle is gone: evicted, cleared, or rewritten as another."""

    bundle: BundleId

    def __str__(self) -> str:
        return f"r{self.bundle.writer}-{self.bundle.sequence:x}"


class Found(msgspec.Struct, frozen=True, gc=False):
    """Another writer's bundle is there, of which it has not told; it may have been killed before it could."""

    bundle: BundleName

    def __str__(self) -> str:
        name = self.bundle
        return f"f{name.writer}-{name.sequence:x}-{name.size:x}-{name.created_us:x}-{name.checksum:x}"


class Unlisted(msgspec.Struct, frozen=True, gc=False):
    """More has changed than can be told: all who read this list the namespace."""

    def __str__(self) -> str:
        return "u"


Event = Added | Removed | Found | Unlisted

_ADDED = re.compile(f"a({_HEX})-({_HEX})-({_HEX})")
_REMOVED = re.compile(f"r({WRITER_PATTERN})-({_HEX})")
_FOUND = re.compile(f"f({WRITER_PATTERN})-({_HEX})-({_HEX})-({_HEX})-({_HEX})")


@dataclass(frozen=True, slots=True)
class Marker:
    """How far a writer's events in one namespace go, and the last of them.

    The event numbered `sequence` is the last one in `events`, the one before it has the number before, and so on. Who
    is behind by more than these has to list the bundles.
    """

    namespace: str
    writer: str
    sequence: int
    events: tuple[str, ...]
    """Spelled as in the name: few are ever read."""
    tag: int = 0
    """Of the stamp's value that follows this marker."""

    def __str__(self) -> str:
        return f"{self.namespace}.{self.writer}.{self.sequence:x}.{self.tag:x}.{','.join(self.events)}"

    def after(self, events: Sequence[Event], tag: int) -> Marker:
        """The marker after more events: all that fit into a name, the newest first to stay."""
        texts = (*self.events, *map(str, events[-MAX_MARKER_BYTES:]))
        room = MAX_MARKER_BYTES - len(f"{self.namespace}.{self.writer}...") - 16 - 6
        kept = 0
        for text in reversed(texts):
            room -= len(text) + 1
            if room < 0:
                break
            kept += 1
        return Marker(self.namespace, self.writer, self.sequence + len(events), texts[len(texts) - kept :], tag)

    def since(self, sequence: int) -> list[Event] | None:
        """The events after the one numbered `sequence`; None where they are no longer all known."""
        missed = self.sequence - sequence
        if missed > len(self.events):
            return None
        first, events = self.sequence - len(self.events) + 1, list[Event]()
        for number in range(sequence + 1, self.sequence + 1):
            event = _parse_event(self.events[number - first], self.writer, number)
            if event is None:
                return None
            events.append(event)
        return events


_MARKER = re.compile(f"({NAMESPACE_PATTERN})\\.({WRITER_PATTERN})\\.({_HEX})\\.({_HEX})\\.([a-z0-9,-]*)")


def parse_marker(text: str) -> Marker | None:
    """The marker of that file name, None for a name that the driver did not make."""
    match = _MARKER.fullmatch(text)
    if match is None:
        return None
    namespace, writer, last, tag, listed = match.groups()
    events = tuple(listed.split(",")) if listed else ()
    sequence = int(last, 16)
    return Marker(namespace, writer, sequence, events, int(tag, 16)) if len(events) <= sequence else None


def _parse_event(text: str, writer: str, number: int) -> Event | None:
    if match := _ADDED.fullmatch(text):
        name = BundleName(writer, number, int(match[1], 16), int(match[2], 16), int(match[3], 16))
        return Added(name) if _is_sane(name) else None
    if match := _REMOVED.fullmatch(text):
        return Removed(BundleId(match[1], int(match[2], 16)))
    if match := _FOUND.fullmatch(text):
        name = BundleName(match[1], int(match[2], 16), int(match[3], 16), int(match[4], 16), int(match[5], 16))
        return Found(name) if _is_sane(name) else None
    return None


def _is_sane(name: BundleName) -> bool:
    return name.size <= MAX_FILE_BYTES and name.created_us <= MAX_CREATED_US


class TemporaryName(NamedTuple):
    """A file that is being written. Its length is part of the name: it reserves room before the first byte is there."""

    owner: Owner
    writer: str
    number: int
    size: int

    def __str__(self) -> str:
        place, pid, started = self.owner
        return f"{place}-{pid:x}-{started:x}-{self.writer}-{self.number:x}-{self.size:x}.temporary"


_TEMPORARY = re.compile(f"({PLACE_PATTERN})-({_HEX})-({_HEX})-({WRITER_PATTERN})-({_HEX})-({_HEX})\\.temporary")


def parse_temporary(text: str) -> TemporaryName | None:
    """The temporary file of that name, None for a name that the driver did not make."""
    match = _TEMPORARY.fullmatch(text)
    if match is None:
        return None
    place, pid, started, writer, number, size = match.groups()
    length = int(size, 16)
    if length > MAX_FILE_BYTES:
        return None
    return TemporaryName(Owner(place, int(pid, 16), int(started, 16)), writer, int(number, 16), length)


def bundles_among(texts: Iterable[str]) -> list[BundleName]:
    """The bundles among file names, strangers left out."""
    return [name for name in map(parse_bundle, texts) if name is not None]


_NAMESPACE = re.compile(NAMESPACE_PATTERN)


def is_namespace(text: str) -> bool:
    """Whether a directory's name is a namespace's."""
    return _NAMESPACE.fullmatch(text) is not None
