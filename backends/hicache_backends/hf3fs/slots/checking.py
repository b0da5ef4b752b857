"""Read-only check that slots hold the pages that a metadata server lists."""

from __future__ import annotations

import os
import threading
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_backends.hf3fs.slots.io_requests import IO_BYTES
from hicache_backends.hf3fs.slots.scopes import ESCAPE
from hicache_backends.posix.files import read_into
from hicache_storage.objects import ENVELOPE_BYTES, running_checksum
from hicache_storage.objects.namespace import (
    belongs,
    envelope_prefix,
    key_digest,
    stored_checksum,
)

if TYPE_CHECKING:
    from hicache_metadata_server.protocol import ScopeGeometry


class SlotVerdict(StrEnum):
    """Result of the check of one slot; the value completes a sentence about it."""

    WHOLE = "holds its page"
    UNKNOWN = "was written without a checksum"
    LENGTH = "has a length that no page of its scope has"
    MISSING = "has no data file"
    SHORT = "lies behind the end of its file"
    OTHER = "holds another page"
    DAMAGED = "holds bytes that are not those of its checksum"
    UNREADABLE = "cannot be read"


DEFECTS: Final = frozenset(
    {
        SlotVerdict.LENGTH,
        SlotVerdict.MISSING,
        SlotVerdict.SHORT,
        SlotVerdict.OTHER,
        SlotVerdict.DAMAGED,
    }
)
"""Verdicts on slots that a reader would not take for hits."""


class ExpectedPage(NamedTuple):
    """The page that a metadata server lists for a slot."""

    slot: int
    key: str
    length: int
    checksum: int


class CheckedFile:
    """A slot file, opened read-only at the first check. Safe for many threads."""

    def __init__(self, path: str, scope: ScopeGeometry, fingerprint: bytes) -> None:
        self._path = path
        self._scope = scope
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._descriptor = -1

    def verdict(self, page: ExpectedPage) -> SlotVerdict:
        """Read a slot in chunks of bounded size, and compare it with the listed page."""
        if not page.length:
            return SlotVerdict.UNKNOWN
        if not ENVELOPE_BYTES < page.length <= self._scope.slot_bytes:
            return SlotVerdict.LENGTH
        try:
            return self._read(self._opened(), page)
        except FileNotFoundError:
            return SlotVerdict.MISSING
        except OSError:
            return SlotVerdict.UNREADABLE

    def close(self) -> None:
        """Close the file. The next check opens it again."""
        with self._lock:
            descriptor = self._descriptor
            self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def _opened(self) -> int:
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptor

    def _read(self, descriptor: int, page: ExpectedPage) -> SlotVerdict:
        page_bytes, offset = page.length - ENVELOPE_BYTES, page.slot * self._scope.slot_bytes
        # The envelope first: a slot that holds another page is found without reading all of it.
        envelope = bytearray(ENVELOPE_BYTES)
        if not read_into(descriptor, [memoryview(envelope)], offset + page_bytes):
            return SlotVerdict.SHORT
        # The digest of the original key cannot be computed from an escaped key.
        digest = bytes(envelope[32:48]) if page.key.startswith(ESCAPE) else key_digest(page.key)
        prefix = envelope_prefix(page_bytes, self._fingerprint)
        if not belongs(envelope, prefix, digest) or stored_checksum(envelope) != page.checksum:
            return SlotVerdict.OTHER
        running, buffer = running_checksum(), memoryview(bytearray(min(IO_BYTES, page_bytes)))
        for start in range(0, page_bytes, IO_BYTES):
            some = buffer[: min(IO_BYTES, page_bytes - start)]
            if not read_into(descriptor, [some], offset + start):
                return SlotVerdict.SHORT
            running.update(some)
        return SlotVerdict.WHOLE if running.intdigest() == page.checksum else SlotVerdict.DAMAGED
