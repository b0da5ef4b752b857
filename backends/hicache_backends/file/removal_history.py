"""What writers remember of the pages that they have removed, for people: a cache.

Each writer appends to a file of its own, a line of JSON for the pages that went with one bundle:

```
{"seconds": 1764399600.5, "reason": "evicted", "by": "process 17 on node-3", "keys": ["..."]}
```

Lines are written in the background, not more than once a second. One that is torn is skipped.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from hicache_backends.file.paths import HEX, WRITER_PATTERN
from hicache_storage.objects import ObjectRemoval
from hicache_storage.spec import RemovalReason  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.paths import StorePaths
    from hicache_backends.file.temp_files import ServerClock

FLUSH_SECONDS = 1.0
"""Seconds between two writes."""

MAX_QUEUED = 256
"""Limit of the lines that wait to be written; the oldest are dropped."""

MAX_LINE_KEYS = 1024
"""Limit of the keys of a line; the first of a larger bundle are remembered."""

MAX_FILE_BYTES = 1 << 20
"""A longer file is continued in another one, and the one before it is removed. In bytes."""

MAX_FILES = 64
"""Limit of the files of a namespace; those that were written last are kept."""

MAX_AGE_SECONDS = 7 * 24 * 3600.0
"""Time since its last line after which a file is removed."""


class RemovalLine(msgspec.Struct, frozen=True, gc=False):
    """Pages that were removed together."""

    seconds: float
    reason: RemovalReason
    by: str
    keys: tuple[str, ...]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RemovalLine).decode
_FILE = re.compile(f"({WRITER_PATTERN})-({HEX})\\.removals")


class RemovalHistory:
    """The histories of one store, for one writer. Safe for many threads.

    A history that cannot be written or read is as good as none: nothing relies on it.
    """

    def __init__(self, paths: StorePaths, writer: str) -> None:
        self._paths = paths
        self._writer = writer
        self._queue: deque[tuple[str, RemovalLine]] = deque(maxlen=MAX_QUEUED)
        """To be written, with their namespaces; each operation on it is atomic."""
        self._flush_at = 0.0
        self._flushing = threading.Lock()
        self._numbers: dict[str, int] = {}
        """By namespace, the number of the file that is written."""

    def note(self, namespace: str, line: RemovalLine) -> None:
        """Remember pages; without I/O."""
        self._queue.append((namespace, line))

    def is_due(self) -> bool:
        """Return whether there is something to be flushed, and nobody does it."""
        due = self._queue and time.monotonic() >= self._flush_at
        return bool(due) and not self._flushing.locked()

    def flush(self) -> None:
        """Write what is remembered."""
        with self._flushing:
            self._flush_at = time.monotonic() + FLUSH_SECONDS
            texts = dict[str, bytes]()
            while self._queue:
                namespace, line = self._queue.popleft()
                line = msgspec.structs.replace(line, keys=line.keys[:MAX_LINE_KEYS])
                # A newline before the line, too: it ends one that was torn.
                texts[namespace] = b"%b\n%b\n" % (texts.get(namespace, b""), _encode(line))
            for namespace, text in texts.items():
                with contextlib.suppress(OSError):
                    self._append(namespace, text)

    def recall(self, namespace: str, keys: Sequence[str]) -> list[ObjectRemoval]:
        """Return what all writers remember of these pages."""
        self.flush()
        wanted, found = set(keys), list[ObjectRemoval]()
        for path in self._files(namespace):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                for text in file:
                    with contextlib.suppress(msgspec.MsgspecError):
                        line = _decode(text)
                        found += [
                            ObjectRemoval(namespace, key, line.reason, line.seconds, line.by)
                            for key in wanted.intersection(line.keys)
                        ]
        return found

    def collect(self, namespace: str, clock: ServerClock) -> None:
        """Remove the files that are old or too many."""
        written = list[tuple[int, str]]()
        for path in self._files(namespace):
            with contextlib.suppress(OSError):
                written.append((os.stat(path).st_mtime_ns, path))
        for place, (moment, path) in enumerate(sorted(written, reverse=True)):
            if place >= MAX_FILES or clock.age_seconds(moment) > MAX_AGE_SECONDS:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _append(self, namespace: str, text: bytes) -> None:
        number, directory = self._numbers.get(namespace, 0), self._paths.removals(namespace)
        path = f"{directory}/{self._writer}-{number:x}.removals"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(FileExistsError):
            # Not what is above it: the store may have been deleted.
            os.mkdir(directory)
        descriptor = os.open(path, flags, 0o666)
        try:
            os.write(descriptor, text)
            length = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if length > MAX_FILE_BYTES:
            self._numbers[namespace] = number + 1
            with contextlib.suppress(OSError):
                os.unlink(f"{directory}/{self._writer}-{number - 1:x}.removals")

    def _files(self, namespace: str) -> list[str]:
        directory = self._paths.removals(namespace)
        with contextlib.suppress(OSError):
            return [
                f"{directory}/{name}" for name in os.listdir(directory) if _FILE.fullmatch(name)
            ]
        return []
