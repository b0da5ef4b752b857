"""Bundles: the names of their files, and the format: the pages of a batch, an index, a footer.

```
page 0 | page 1 | ... | page n-1 | envelope 0 | ... | envelope n-1 | keys | footer

page      its components one after the other; all pages of a namespace are equally long
envelope  64 bytes (hicache_storage.objects.namespace)
keys      UTF-8, separated by NUL, in the order of the pages
footer    64 bytes:
  0   8   magic "HCBUNDLE"
  8   4   version, little endian, 1
  12  4   number of pages
  16  8   length of a page
  24  8   length of the index: envelopes and keys
  32  16  fingerprint of the namespace
  48  8   xxh3_64 of the index
  56  8   xxh3_64 of the footer up to here
```

A file that ends in a footer which fits its length holds all of its pages: the footer is written
last. The file's name contains the footer's checksum, so that a footer and an index are never taken
for those of another bundle, whatever a disk answers.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

from hicache_backends.file.paths import (
    HEX,
    MAX_CREATED_US,
    MAX_FILE_BYTES,
    PID_SCOPE_PATTERN,
    WRITER_PATTERN,
    ProcessId,
)
from hicache_storage.objects import ENVELOPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_storage.spec import RemovalReason

_MAGIC = b"HCBUNDLE"
_VERSION = 1
_FOOTER = struct.Struct("<8sIIQQ16sQ")
_CHECKSUM = struct.Struct("<Q")
FOOTER_BYTES = _FOOTER.size + _CHECKSUM.size

TAIL_BYTES = 32 << 10
"""Bytes read from the end of a bundle at first: the index of 240 pages under SHA-256 keys."""


class NotABundleError(ValueError):
    """The bytes are not a bundle of this namespace: torn, damaged, or of another format."""

    file_bytes: int = 0
    """The file's real length."""


class BundleId(msgspec.Struct, frozen=True, gc=False):
    """Identity of a bundle within its namespace; never used twice.

    Not tracked by the garbage collector.
    """

    writer: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.writer}-{self.sequence:x}"


class Claim(NamedTuple):
    """A claim to replace a bundle, in the name of that bundle.

    Once the replacement is in place the claimed bundle is void.
    """

    process: ProcessId
    replacement: BundleId


class BundleName(msgspec.Struct, frozen=True, gc=False):
    """The name of a bundle's file, with its length and age.

    A listing of names is enough to know the used bytes. There is one object for each file of a
    store; the garbage collector does not track them.
    """

    writer: str
    sequence: int
    size: int
    """Length of the file, in bytes."""
    created_us: int
    """Microseconds since 1970 by the writer's clock, no two batches of a writer the same; kept when
    the bundle is rewritten."""
    checksum: int
    """`tail_checksum` of the file: bytes with another one belong to a different file."""
    claim: Claim | None = None
    """The claim of a process that replaces it. Until that is done the bundle stays valid."""

    @property
    def id(self) -> BundleId:
        return BundleId(self.writer, self.sequence)

    @property
    def plain(self) -> BundleName:
        """The name without a claim.

        Names that differ in anything else belong to different files.
        """
        return self if self.claim is None else msgspec.structs.replace(self, claim=None)

    @property
    def numbers(self) -> str:
        return f"{self.size:x}-{self.created_us:x}-{self.checksum:x}"

    def __str__(self) -> str:
        plain = f"{self.writer}-{self.sequence:x}-{self.numbers}.bundle"
        if self.claim is None:
            return plain
        return f"{plain}.{self.claim.process}-{self.claim.replacement}.claimed"


_BUNDLE = re.compile(
    f"({WRITER_PATTERN})-({HEX})-({HEX})-({HEX})-({HEX})\\.bundle"
    f"(?:\\.({PID_SCOPE_PATTERN})-({HEX})-({HEX})-({WRITER_PATTERN})-({HEX})\\.claimed)?"
)


def parse_bundle(text: str) -> BundleName | None:
    """Parse the name of a bundle; None for a name that the driver did not make."""
    match = _BUNDLE.fullmatch(text)
    if match is None:
        return None
    writer, sequence, size, created, checksum, pid_scope, pid, started, claimant, number = (
        match.groups()
    )
    claim = (
        None
        if pid_scope is None
        else Claim(
            ProcessId(pid_scope, int(pid, 16), int(started, 16)),
            BundleId(claimant, int(number, 16)),
        )
    )
    name = BundleName(
        writer, int(sequence, 16), int(size, 16), int(created, 16), int(checksum, 16), claim
    )
    return name if is_plausible(name) else None


def is_plausible(name: BundleName) -> bool:
    return name.size <= MAX_FILE_BYTES and name.created_us <= MAX_CREATED_US


def bundles_among(texts: Iterable[str]) -> list[BundleName]:
    """Parse the names of bundles among file names, and skip all others."""
    return [name for name in map(parse_bundle, texts) if name is not None]


class BundleIndex(msgspec.Struct, frozen=True, gc=False):
    """The keys and envelopes of the pages in a bundle."""

    keys: tuple[str, ...]
    envelopes: bytes
    """64 bytes a page."""


class Bundle(msgspec.Struct, eq=False, gc=False):
    """A bundle as this process knows it.

    There is one object for each file of a store. So nothing is stored that can be computed, and the
    garbage collector does not track them: they are in no reference cycle.
    """

    namespace: str
    name: BundleName
    directory: str
    id: BundleId
    size: int
    """Bytes of the file: the number in its name, until the file is found to have another length."""
    modified: int
    """The file's mtime when last read: the uses by other processes."""
    keys: tuple[str, ...]
    """The pages, once the index has been read."""
    envelopes: bytes = b""
    touched: int = 0
    """Last use by this process, in nanoseconds since 1970."""
    gone: bool = False
    suspect: bool = False
    """Perhaps gone since before its announcement: its index is read from the file, not the log."""
    invalid: int = 0
    """How often the file was read, and had other content than a bundle's."""
    reason: RemovalReason | None = None
    """Why this storage removes it, or pages of it."""

    @property
    def path(self) -> str:
        """The path of the file, by its present name."""
        return f"{self.directory}/{self.name}"

    @property
    def recency(self) -> int:
        """Time of the last known use, in nanoseconds since 1970."""
        return 0 if self.invalid else max(self.touched, self.modified)

    def envelope(self, page: int) -> bytes:
        """The envelope of a page, once the index has been read."""
        return self.envelopes[page * ENVELOPE_BYTES : (page + 1) * ENVELOPE_BYTES]


@dataclass(frozen=True, slots=True)
class BundleFormat:
    """The format of the bundles of one namespace."""

    page_bytes: int
    fingerprint: bytes

    def bundle_bytes(self, keys: Sequence[str]) -> int:
        """Length of a bundle that holds these keys, in bytes."""
        return len(keys) * (self.page_bytes + ENVELOPE_BYTES) + len(_join(keys)) + FOOTER_BYTES

    def tail(self, index: BundleIndex) -> bytes:
        """Encode the part that follows the pages."""
        body = index.envelopes + _join(index.keys)
        footer = _FOOTER.pack(
            _MAGIC,
            _VERSION,
            len(index.keys),
            self.page_bytes,
            len(body),
            self.fingerprint,
            xxhash.xxh3_64_intdigest(body),
        )
        return body + footer + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(footer))

    def tail_bytes(self, end: bytes, size: int, checksum: int) -> int:
        """Length of a bundle's tail, from the last bytes of its file.

        Args:
            end: the last bytes.
            size: of the file, in bytes.
            checksum: the `tail_checksum` in its name.

        Raises:
            NotABundleError: the bytes do not end in a matching footer.
        """
        if len(end) < FOOTER_BYTES:
            raise NotABundleError(f"too short for a footer: {len(end)} bytes")
        if tail_checksum(end) != checksum:
            raise NotABundleError("the footer is damaged, or another bundle's")
        footer = end[-FOOTER_BYTES : -_CHECKSUM.size]
        if xxhash.xxh3_64_intdigest(footer) != _CHECKSUM.unpack(end[-_CHECKSUM.size :])[0]:
            raise NotABundleError("the footer is damaged")
        magic, version, pages, page_bytes, body_bytes, fingerprint, _ = _FOOTER.unpack(footer)
        if (magic, version, page_bytes, fingerprint) != (
            _MAGIC,
            _VERSION,
            self.page_bytes,
            self.fingerprint,
        ):
            raise NotABundleError("the footer is of another format or namespace")
        if pages * page_bytes + body_bytes + FOOTER_BYTES != size:
            raise NotABundleError(f"the footer does not fit a length of {size} bytes")
        return int(body_bytes) + FOOTER_BYTES

    def parse(self, tail: bytes) -> BundleIndex:
        """Decode what `tail()` encoded; `tail_bytes()` has accepted its footer.

        Raises:
            NotABundleError: the index is damaged.
        """
        _, _, pages, _, _, _, checksum = _FOOTER.unpack(tail[-FOOTER_BYTES : -_CHECKSUM.size])
        body = tail[:-FOOTER_BYTES]
        if xxhash.xxh3_64_intdigest(body) != checksum:
            raise NotABundleError("the index is damaged")
        envelopes, keys = body[: pages * ENVELOPE_BYTES], _split(body[pages * ENVELOPE_BYTES :])
        if len(keys) != pages:
            raise NotABundleError(f"the index names {len(keys)} of {pages} pages")
        return BundleIndex(keys, envelopes)


def tail_checksum(tail: bytes) -> int:
    """The checksum in a bundle's name: 32 bits of the footer's checksum."""
    return int.from_bytes(tail[-4:], "little")


def _join(keys: Sequence[str]) -> bytes:
    # Keys are free of NUL, and joining and splitting take a tenth of the time of a length for each.
    return "\0".join(keys).encode()


def _split(text: bytes) -> tuple[str, ...]:
    try:
        return tuple(text.decode().split("\0"))
    except UnicodeDecodeError as error:
        raise NotABundleError("a key is no text") from error
