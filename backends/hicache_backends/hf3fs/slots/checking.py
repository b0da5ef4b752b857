"""Whether the slots of a directory hold the pages that a metadata server says they hold. Nothing is ever written."""

from __future__ import annotations

import os
import threading
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_backends.hf3fs.scopes import ESCAPE, ID_NAME
from hicache_backends.hf3fs.slots.pieces import PIECE_BYTES
from hicache_backends.posix.vectored import read_into
from hicache_storage.objects import ENVELOPE_BYTES, running_checksum
from hicache_storage.objects.envelope import belongs, envelope_prefix, stored_checksum
from hicache_storage.objects.namespace import key_digest

if TYPE_CHECKING:
    from hicache_metadata_server.protocol import ScopeGeometry

_FINGERPRINT_DIGITS: Final = 32


class Verdict(StrEnum):
    """What was found in a slot; the text completes a sentence about it."""

    WHOLE = "holds its page"
    UNKNOWN = "was written without a checksum"
    LENGTH = "has a length that no page of its scope has"
    MISSING = "has no data file"
    SHORT = "lies behind the end of its file"
    OTHER = "holds another page"
    DAMAGED = "holds bytes that are not those of its checksum"
    UNREADABLE = "cannot be read"


MISFITS: Final = frozenset({Verdict.LENGTH, Verdict.MISSING, Verdict.SHORT, Verdict.OTHER, Verdict.DAMAGED})
"""A reader would find none of these a hit."""


class Claim(NamedTuple):
    """What a metadata server says of a slot."""

    slot: int
    key: str
    length: int
    checksum: int


class SlotDirectory:
    """The directory that drivers have as their `path`.

    Raises:
        OSError: it is none, or the file system with it is not mounted.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._id = os.readlink(os.path.join(path, ID_NAME))
        except OSError as error:
            raise OSError(
                error.errno, f"{path} is no directory of the 3FS driver, or not mounted: it has no {ID_NAME}"
            ) from error  # fmt: skip

    def file_of(self, scope: ScopeGeometry) -> CheckedFile | None:
        """The file of a scope; None for a scope that is not of this directory."""
        _, _, namespace = scope.scope.partition(":")
        name, _, store_id = namespace.rpartition("-")
        _, _, fingerprint = name.rpartition("-")
        if store_id != self._id or len(fingerprint) != _FINGERPRINT_DIGITS or not scope.slot_bytes:
            return None
        try:
            return CheckedFile(os.path.join(self._path, f"{name}.slots"), scope, bytes.fromhex(fingerprint))
        except ValueError:
            return None


class CheckedFile:
    """One file of slots, opened for reading when it is first asked. Safe for many threads."""

    def __init__(self, path: str, scope: ScopeGeometry, fingerprint: bytes) -> None:
        self._path, self._scope, self._fingerprint = path, scope, fingerprint
        self._lock = threading.Lock()
        self._descriptor = -1

    def verdict(self, claim: Claim) -> Verdict:
        """Read a slot as its reader would, and compare all that is known of the page; in pieces, however long it is."""
        if not claim.length:
            return Verdict.UNKNOWN
        if not ENVELOPE_BYTES < claim.length <= self._scope.slot_bytes:
            return Verdict.LENGTH
        try:
            return self._read(self._opened(), claim)
        except FileNotFoundError:
            return Verdict.MISSING
        except OSError:
            return Verdict.UNREADABLE

    def close(self) -> None:
        """Let go of the file while nobody asks; who asks later opens it again."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _opened(self) -> int:
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptor

    def _read(self, descriptor: int, claim: Claim) -> Verdict:
        page_bytes, offset = claim.length - ENVELOPE_BYTES, claim.slot * self._scope.slot_bytes
        envelope = bytearray(ENVELOPE_BYTES)
        if not read_into(descriptor, [memoryview(envelope)], offset + page_bytes):
            return Verdict.SHORT
        # An escaped key does not tell the digest of the one that it stands for.
        digest = bytes(envelope[32:48]) if claim.key.startswith(ESCAPE) else key_digest(claim.key)
        prefix = envelope_prefix(page_bytes, self._fingerprint)
        if not belongs(envelope, prefix, digest) or stored_checksum(envelope) != claim.checksum:
            return Verdict.OTHER
        running, piece = running_checksum(), memoryview(bytearray(min(PIECE_BYTES, page_bytes)))
        for start in range(0, page_bytes, PIECE_BYTES):
            some = piece[: min(PIECE_BYTES, page_bytes - start)]
            if not read_into(descriptor, [some], offset + start):
                return Verdict.SHORT
            running.update(some)
        return Verdict.WHOLE if running.intdigest() == claim.checksum else Verdict.DAMAGED
