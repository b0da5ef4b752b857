"""Names and paths of the files that the driver makes.

```
<path>/hicache-file-1/
    stamp/                        the change counter: an empty directory, its mtime is the value
    writers/                      a cursor for each writer and namespace: an empty file, whose name
                                  holds its last events; and the birth mark of the store
    retired/                      cursors of idle writers whose bundles are still there
    temporary/                    files being written
    <namespace>/namespace.json    a description of the pages, for people
    <namespace>/bundles/          the pages; a claimed bundle has a name that ends in .claimed
    <namespace>/events/           the event logs of its writers, a cache (`events.py`)
```

A name that does not match a pattern exactly is not the driver's, and its file is left alone.
Numbers are hexadecimal without leading zeros, so that every name has one spelling.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hicache_backends.posix.paths import make_last
from hicache_backends.posix.process_id import PID_SCOPE_PATTERN, ProcessId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.objects import Namespace

FORMAT = "hicache-file-1"
"""The layout's version is a directory, so that two versions can share a path without seeing each
other."""

WRITER_PATTERN = "[a-z2-7]{10}"
NAMESPACE_PATTERN = "[0-9a-f]{32}"
HEX = "(?:0|[1-9a-f][0-9a-f]{0,15})"

MAX_FILE_BYTES = 1 << 44
"""Names with a larger length are ignored: system calls refuse such offsets. In bytes."""

MAX_CREATED_US = 1 << 53
"""Names with a later time (the year 2255) are ignored: system calls take nanoseconds."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def random_writer() -> str:
    """A new name for a writer: 50 random bits."""
    return "".join(_ALPHABET[byte % 32] for byte in os.urandom(10))


def random_birth() -> str:
    """A new name for a birth mark, which tells a store from one made again in its place."""
    return f"{random_writer()}.birth"


_BIRTH = re.compile(f"{WRITER_PATTERN}\\.birth")


def is_birth(text: str) -> bool:
    """Return whether a name is one that `random_birth` makes."""
    return _BIRTH.fullmatch(text) is not None


class BundleId(msgspec.Struct, frozen=True, gc=False):
    """Identity of a bundle within its namespace; never used twice.

    Not tracked by the garbage collector.
    """

    writer: str
    sequence: int


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

    def __str__(self) -> str:
        plain = f"{self.writer}-{self.sequence:x}-{self.size:x}-{self.created_us:x}-{self.checksum:x}.bundle"
        if self.claim is None:
            return plain
        (pid_scope, pid, started), by = self.claim
        return f"{plain}.{pid_scope}-{pid:x}-{started:x}-{by.writer}-{by.sequence:x}.claimed"


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


class TemporaryName(NamedTuple):
    """The name of a file that is being written.

    It contains the length: that reserves room before the first byte is written.
    """

    process: ProcessId
    writer: str
    number: int
    size: int

    def __str__(self) -> str:
        pid_scope, pid, started = self.process
        return (
            f"{pid_scope}-{pid:x}-{started:x}-{self.writer}-{self.number:x}-{self.size:x}.temporary"
        )


_TEMPORARY = re.compile(
    f"({PID_SCOPE_PATTERN})-({HEX})-({HEX})-({WRITER_PATTERN})-({HEX})-({HEX})\\.temporary"
)


def parse_temporary(text: str) -> TemporaryName | None:
    """Parse the name of a temporary file; None for a name that the driver did not make."""
    match = _TEMPORARY.fullmatch(text)
    if match is None:
        return None
    pid_scope, pid, started, writer, number, size = match.groups()
    length = int(size, 16)
    if length > MAX_FILE_BYTES:
        return None
    return TemporaryName(
        ProcessId(pid_scope, int(pid, 16), int(started, 16)), writer, int(number, 16), length
    )


def bundles_among(texts: Iterable[str]) -> list[BundleName]:
    """Parse the names of bundles among file names, and skip all others."""
    return [name for name in map(parse_bundle, texts) if name is not None]


_NAMESPACE = re.compile(NAMESPACE_PATTERN)


def is_namespace(text: str) -> bool:
    """Return whether a directory's name is that of a namespace."""
    return _NAMESPACE.fullmatch(text) is not None


class StorePaths:
    """Paths below a store's directory."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.root = str(Path(path) / FORMAT)
        self.counter = f"{self.root}/stamp"
        self.writers = f"{self.root}/writers"
        self.retired = f"{self.root}/retired"
        self.temporaries = f"{self.root}/temporary"

    def create(self) -> None:
        """Make the directories that are missing; several processes may do so at once."""
        fresh = not os.path.exists(self.writers)
        make_last(self._path)
        for path in (self.writers, self.temporaries, self.counter):
            os.makedirs(path, exist_ok=True)
        if fresh:
            self.mark_birth()

    def mark_birth(self) -> None:
        """Give the store a birth mark. Several marks made at once do no harm."""
        os.close(
            os.open(
                f"{self.writers}/{random_birth()}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
        )

    def bundles(self, namespace: str) -> str:
        return f"{self.root}/{namespace}/bundles"

    def bundle(self, namespace: str, name: BundleName) -> str:
        return f"{self.root}/{namespace}/bundles/{name}"

    def events(self, namespace: str) -> str:
        return f"{self.root}/{namespace}/events"

    def temporary(self, name: TemporaryName) -> str:
        return f"{self.temporaries}/{name}"

    def namespaces(self) -> list[str]:
        """The namespaces that exist."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self.root) if is_namespace(name)]
        return []

    def create_namespace(self, namespace: str) -> None:
        """Make a namespace's directories."""
        os.makedirs(self.bundles(namespace), exist_ok=True)

    def describe_namespace(self, namespace: Namespace, pending: TemporaryName) -> None:
        """Describe a namespace's pages in a file for people. Every writer writes the same."""
        path = f"{self.root}/{namespace.name}/namespace.json"
        if os.path.exists(path):
            return
        # O_NOFOLLOW: another user who can write here must not redirect the file by a link.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.temporary(pending), flags, 0o666), "wb") as file:
            file.write(
                msgspec.json.format(msgspec.json.encode(namespace.describe()), indent=2) + b"\n"
            )
        os.rename(self.temporary(pending), path)


def sync_directory(path: str) -> None:
    """Make the names in a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
