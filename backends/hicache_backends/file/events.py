"""Events: the changes that each writer announces, in cursor names and in event logs.

Beside its cursor a writer has, for each namespace, an append-only log of all its events. A reader
that is further behind than the cursor's name reaches reads it. The log is a cache: a reader that
finds a gap, a torn block or no file lists the namespace instead, so nothing has to be synced, and
any of these files may be deleted at any time.

```
<namespace>/events/<writer>-<segment>.events     SEGMENT_EVENTS consecutive events of one writer

block   a header of 32 bytes, and a body in MessagePack: for each event its text, as in a cursor's
        name; the keys, separated by NUL, and the envelopes of its bundle, if there are few
  0   4   magic "HCEV"
  4   4   length of the body, little endian like all numbers here
  8   8   number of the first event
  16  4   how many there are
  20  4   reserved, 0
  24  8   xxh3_64 of the header up to here and of the body
```

With the indexes storages learn of many small bundles, also when they open the store, by reading a
few logs instead of opening each bundle.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import xxhash

from hicache_backends.file.bundle import BundleId, BundleIndex, BundleName, is_plausible
from hicache_backends.file.paths import HEX, NAMESPACE_PATTERN, WRITER_PATTERN
from hicache_storage.objects import ENVELOPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hicache_backends.file.paths import StorePaths

SEGMENT_EVENTS = 4096
"""Events in one file: about 1 MiB of one-page bundles."""

MAX_LOGGED_PAGES = 16
"""Pages of the bundles whose index is in the log. The index of a larger bundle is read from the
bundle itself, which costs less for each page than a small one."""

_MAGIC = b"HCEV"
_HEADER = struct.Struct("<4sIQII")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

MAX_CURSOR_BYTES = 240
"""Names of 255 bytes are legal nearly everywhere; a few are left to file systems that add to
them."""

SHORT_CURSOR_BYTES = 143
"""What encrypted names leave of that (eCryptfs, Synology); all others of the driver are shorter."""


# A lookup may read thousands of events; `gc=False` keeps them from the garbage collector.


class Added(msgspec.Struct, frozen=True, gc=False):
    """A bundle has been published."""

    bundle: BundleName
    index: BundleIndex | None = None
    """For the event log; a cursor's name has no room for it."""

    def __str__(self) -> str:
        return f"a{self.bundle.numbers}"


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A bundle goes: evicted, cleared, or rewritten as another. Announced before it is unlinked."""

    bundle: BundleId

    def __str__(self) -> str:
        return f"r{self.bundle}"


class Found(Added, frozen=True, gc=False):
    """A bundle of any writer is in place, and was unannounced or announced as removed.

    Its writer may have been killed before the announcement, or an unlink has failed.
    """

    def __str__(self) -> str:
        return f"f{self.bundle.id}-{self.bundle.numbers}"


class Unlisted(msgspec.Struct, frozen=True, gc=False):
    """Unknown changes were made: every reader of this event lists the namespace."""

    def __str__(self) -> str:
        return "u"


Event = Added | Removed | Unlisted

_ID = f"({WRITER_PATTERN})-({HEX})"
_ADDED = re.compile(f"(?:a|f{_ID}-)({HEX})-({HEX})-({HEX})")
_REMOVED = re.compile(f"r{_ID}")


def parse_event(text: str, writer: str, number: int, index: BundleIndex | None = None) -> Event:
    """Parse an event of a writer; one that makes no sense stands for unknown changes."""
    if match := _ADDED.fullmatch(text):
        if match[1]:
            writer, number = match[1], int(match[2], 16)
        name = BundleName(writer, number, int(match[3], 16), int(match[4], 16), int(match[5], 16))
        if not is_plausible(name):
            return Unlisted()
        return Found(name) if match[1] else Added(name, index)
    if match := _REMOVED.fullmatch(text):
        return Removed(BundleId(match[1], int(match[2], 16)))
    return Unlisted()


@dataclass(frozen=True, slots=True)
class WriterCursor:
    """A writer's position in one namespace, and its last events.

    The event numbered `sequence` is the last one in `events`, the one before it has the number
    before, and so on. A reader that is further behind reads the event log.
    """

    namespace: str
    writer: str
    sequence: int
    events: tuple[str, ...]
    """As spelled in the name, and parsed on demand: few are ever read."""
    tag: int = 0
    """Tag of the counter value that follows this cursor."""

    def __str__(self) -> str:
        return (
            f"{self.namespace}.{self.writer}.{self.sequence:x}.{self.tag:x}.{','.join(self.events)}"
        )

    def after(self, events: Sequence[Event], tag: int, *, short: bool = False) -> WriterCursor:
        """The cursor after more events, with as many of the newest as fit into a name."""
        texts = (*self.events, *map(str, events[-MAX_CURSOR_BYTES:]))
        room = SHORT_CURSOR_BYTES if short else MAX_CURSOR_BYTES
        room -= len(f"{self.namespace}.{self.writer}...") + 16 + 6
        kept = 0
        for text in reversed(texts):
            room -= len(text) + 1
            if room < 0:
                break
            kept += 1
        return WriterCursor(
            self.namespace,
            self.writer,
            self.sequence + len(events),
            texts[len(texts) - kept :],
            tag,
        )

    @property
    def removing(self) -> set[BundleId]:
        """The bundles whose removal the cursor ends with: their files may still be there."""
        bundles = set[BundleId]()
        for text in reversed(self.events):
            event = parse_event(text, self.writer, 0)
            if not isinstance(event, Removed):
                break
            bundles.add(event.bundle)
        return bundles

    def since(self, sequence: int) -> list[Event] | None:
        """The events after the one numbered `sequence`; None if the name has dropped some."""
        first = self.sequence - len(self.events) + 1
        if sequence + 1 < first:
            return None
        return [
            parse_event(self.events[number - first], self.writer, number)
            for number in range(sequence + 1, self.sequence + 1)
        ]


_CURSOR = re.compile(
    f"({NAMESPACE_PATTERN})\\.({WRITER_PATTERN})\\.({HEX})\\.({HEX})\\.([a-z0-9,-]*)"
)


def parse_cursor(text: str) -> WriterCursor | None:
    """Parse the name of a cursor; None for a name that the driver did not make."""
    match = _CURSOR.fullmatch(text)
    if match is None:
        return None
    namespace, writer, last, tag, listed = match.groups()
    events = tuple(listed.split(",")) if listed else ()
    sequence = int(last, 16)
    return (
        WriterCursor(namespace, writer, sequence, events, int(tag, 16))
        if len(events) <= sequence
        else None
    )


class _Entry(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One event. Its number follows from its place."""

    text: str
    keys: str = ""
    envelopes: bytes = b""

    @property
    def index(self) -> BundleIndex | None:
        """The index; None if there is none, or an inconsistent one."""
        if not self.keys:
            return None
        keys = tuple(self.keys.split("\0"))
        whole = len(self.envelopes) == len(keys) * ENVELOPE_BYTES
        return BundleIndex(keys, self.envelopes) if whole else None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Entry]).decode
_SEGMENT = re.compile(f"({WRITER_PATTERN})-(0|[1-9a-f][0-9a-f]*)\\.events")


class EventLogs:
    """The event logs of one store.

    Reading is safe for many threads; one thread at a time appends.
    """

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths
        self._ends: dict[str, tuple[int, int]] = {}
        """By namespace: the segment that was last appended to, and its length."""
        self._positions: dict[tuple[str, str], tuple[int, int, int]] = {}
        """By namespace and writer: a segment, where the last block begins that was read of it, and
        that one's first event."""

    def append(self, namespace: str, writer: str, first: int, events: Sequence[Event]) -> None:
        """Append a writer's events, numbered from `first`.

        Raises:
            OSError: some are missing; a reader that finds the gap lists the bundles instead.
        """
        while events:
            segment = _segment_of(first)
            some = events[: (segment + 1) * SEGMENT_EVENTS + 1 - first]
            self._append(namespace, writer, segment, _block(first, some))
            first, events = first + len(some), events[len(some) :]

    def since(self, namespace: str, writer: str, seen: int, last: int) -> list[Event] | None:
        """The events numbered `seen + 1` to `last`; None if the log has a gap."""
        events, reader = list[Event](), (namespace, writer)
        position = self._positions.pop(reader, None)
        for segment in range(_segment_of(seen + 1), _segment_of(last) + 1):
            start = 0
            if position is not None and position[0] == segment and position[2] <= seen + 1:
                start = position[1]
            for at, first, entries in _blocks(self._read(namespace, writer, segment, start), seen):
                if first > seen + 1:
                    return None
                events += [
                    parse_event(entries[n].text, writer, first + n, entries[n].index)
                    for n in range(seen + 1 - first, len(entries))
                ]
                seen, position = first + len(entries) - 1, (segment, start + at, first)
                if seen >= last:
                    break
        if seen < last or position is None:
            return None
        self._positions[reader] = position
        return events[: len(events) - (seen - last)]

    def indexes(
        self, namespace: str, wanted: Iterable[BundleName], segment: tuple[str, int]
    ) -> dict[BundleName, BundleIndex]:
        """The indexes of bundles in one segment."""
        names, found = {name.sequence: name for name in wanted}, dict[BundleName, BundleIndex]()
        for _, first, entries in _blocks(self._read(namespace, *segment), 0):
            for number, entry in enumerate(entries, start=first):
                name = names.get(number)
                if name is not None and entry.text == f"a{name.numbers}":
                    index = entry.index
                    if index is not None:
                        found[name] = index
        return found

    def segments(self, namespace: str) -> set[tuple[str, int]]:
        """All segments of a namespace, as writer and number."""
        with contextlib.suppress(OSError):
            matches = map(_SEGMENT.fullmatch, os.listdir(self._paths.events(namespace)))
            return {(match[1], int(match[2], 16)) for match in matches if match is not None}
        return set()

    def collect(
        self, namespace: str, needed: Iterable[BundleId], current: Mapping[str, int]
    ) -> None:
        """Remove the segments without an event of a present bundle.

        Args:
            needed: the bundles that are present.
            current: by writer, the number of its last event: the segment that it appends to stays.
        """
        segments = self.segments(namespace)
        if not segments:
            return
        kept = {(id.writer, _segment_of(id.sequence)) for id in needed}
        kept.update((writer, _segment_of(sequence)) for writer, sequence in current.items())
        for segment in segments - kept:
            with contextlib.suppress(OSError):
                os.unlink(self._path(namespace, *segment))

    def _append(self, namespace: str, writer: str, segment: int, block: bytes) -> None:
        path = self._path(namespace, writer, segment)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
        try:
            known, end = self._ends.get(namespace, (segment, 0))
            # Bytes that a failed append has left behind the end are overwritten.
            end = end if known == segment else 0
            if os.fstat(descriptor).st_size < end:
                # Truncated, or made anew: blocks after a torn one would never be read.
                os.ftruncate(descriptor, 0)
                end = 0
            if os.pwrite(descriptor, block, end) != len(block):
                raise OSError("short write")
        finally:
            # On a network mount this sends the bytes to the server, before the cursor that makes
            # others ask for them.
            os.close(descriptor)
        self._ends[namespace] = segment, end + len(block)

    def _read(self, namespace: str, writer: str, segment: int, start: int = 0) -> bytes:
        path = self._path(namespace, writer, segment)
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            file.seek(start)
            return file.read()
        return b""

    def _path(self, namespace: str, writer: str, segment: int) -> str:
        return f"{self._paths.events(namespace)}/{writer}-{segment:x}.events"


def segment_of(bundle: BundleId) -> tuple[str, int]:
    """The segment with the event that added a bundle."""
    return bundle.writer, _segment_of(bundle.sequence)


def _segment_of(number: int) -> int:
    return (number - 1) // SEGMENT_EVENTS


def _block(first: int, events: Sequence[Event]) -> bytes:
    body = _encode([_entry(event) for event in events])
    header = _HEADER.pack(_MAGIC, len(body), first, len(events), 0)
    return header + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header + body)) + body


def _blocks(content: bytes, seen: int) -> Iterator[tuple[int, int, list[_Entry]]]:
    """The blocks with events after `seen`, up to the first torn one.

    Yields:
        Offset, number of the first event, entries.
    """
    at = 0
    while at + HEADER_BYTES <= len(content):
        header = content[at : at + _HEADER.size]
        magic, length, first, count, _ = _HEADER.unpack(header)
        body = content[at + HEADER_BYTES : at + HEADER_BYTES + length]
        if magic != _MAGIC or len(body) != length:
            return
        if first + count > seen + 1:
            (checksum,) = _CHECKSUM.unpack_from(content, at + _HEADER.size)
            if xxhash.xxh3_64_intdigest(header + body) != checksum:
                return
            try:
                entries = _decode(body)
            except msgspec.MsgspecError:
                return
            yield at, first, entries
        at += HEADER_BYTES + length


def _entry(event: Event) -> _Entry:
    index = event.index if isinstance(event, Added) else None
    if index is None or len(index.keys) > MAX_LOGGED_PAGES:
        return _Entry(str(event))
    return _Entry(str(event), "\0".join(index.keys), index.envelopes)
