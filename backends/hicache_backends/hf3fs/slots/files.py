"""Slot files, created and opened at their first use, and their geometry."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_backends.posix.faults import detached

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_backends.posix.files import Handle
    from hicache_storage.objects import Namespace

logger = logging.getLogger(__name__)

SUFFIX: Final = ".slots"
# O_NOFOLLOW: a symbolic link would redirect the pages of all tenants to a target of its creator.
FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
POLL_SECONDS: Final = 0.3
"""Interval of the check whether an open file was removed."""


SECTOR: Final = 512
BLOCK: Final = 4096
LARGE: Final = 256 << 10
"""Objects of this size and larger end on a block: padding takes less than 2 %."""


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """Number and length of slots.

    Slot i begins at byte `i * slot_bytes`. It holds the page's components, its envelope and
    padding.
    """

    slot_bytes: int
    slots: int

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.slot_bytes * self.slots

    @classmethod
    def of(cls, namespace: Namespace, file_bytes: int) -> SlotGeometry:
        """Compute the slots for pages of a namespace that fit into `file_bytes`.

        Raises:
            ValueError: no slot fits.
        """
        unit = BLOCK if namespace.object_bytes >= LARGE else SECTOR
        slot_bytes = -(-namespace.object_bytes // unit) * unit
        if file_bytes < slot_bytes:
            raise ValueError(
                f"file_size {file_bytes} is less than a page of pool {namespace.pool} takes: "
                f"{slot_bytes} bytes"
            )
        return cls(slot_bytes, file_bytes // slot_bytes)


class SlotFile:
    """One file of slots. Safe for many threads.

    Args:
        path: created if missing.
        geometry: a shorter file is extended; no file is truncated.
        adopt: wraps a descriptor in a handle.
        about: description of the namespace for operators, written to a JSON file beside this one.
    """

    def __init__(
        self,
        path: str,
        geometry: SlotGeometry,
        adopt: Callable[[int], Handle],
        about: Mapping[str, object],
    ) -> None:
        self.path = path
        self._about = about
        self.geometry = geometry
        self._adopt = adopt
        self._lock = threading.Lock()
        # The lock guards all that follows.
        self._handle: Handle | None = None
        self._is_ready = False
        """The handle is open for writing, and the file has its length."""
        self._next_check = 0.0

    def offset(self, slot: int) -> int:
        """Byte offset of a slot."""
        return slot * self.geometry.slot_bytes

    def is_written(self) -> bool:
        """True if any process may write to the file. Creates the file if it is missing.

        A writer gives the file its length before it asks for a lease, so nobody writes to an empty
        file, whichever of several clients has created it.
        """
        try:
            descriptor, _ = self._open()
        except OSError:
            # Its state is unknown.
            return True
        try:
            return os.fstat(descriptor).st_size > 0
        finally:
            os.close(descriptor)

    def borrow(self, *, writes: bool = False) -> Handle:
        """Return the open file, which stays open as long as the handle is referenced.

        Args:
            writes: for writing. A file that may only be read, or cannot be extended, is read all
                the same.

        Raises:
            OSError: the file cannot be opened; or for writing, or extended.
        """
        with self._lock:
            handle, now = self._handle, time.monotonic()
            if handle is not None and now >= self._next_check:
                self._next_check = now + POLL_SECONDS
                if not os.fstat(handle.descriptor).st_nlink:
                    # Other processes would not see writes to it.
                    logger.warning("hf3fs: %s was removed, and is made anew", self.path)
                    self._handle = handle = None
            if handle is None or (writes and not self._is_ready):
                handle = self._make_ready(writes=writes)
            return handle

    def forget(self, handle: Handle) -> None:
        """Open the file again at its next use: the descriptor may belong to a dead mount."""
        with self._lock:
            if self._handle is handle:
                self._handle = None

    def remove(self) -> None:
        """Remove the file and its description. Processes that have it open create it again."""
        self.close()
        for path in (self.path, f"{self.path.removesuffix(SUFFIX)}.json"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """Drop the handle; the file closes with the last reference."""
        with self._lock:
            self._handle = None

    def _open(self) -> tuple[int, OSError | None]:
        """Open the file; for reading alone where more is refused, with the refusal."""
        try:
            return os.open(self.path, FLAGS, 0o666), None
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            with contextlib.suppress(OSError):
                return os.open(self.path, READ_FLAGS), detached(error)
            raise

    def _make_ready(self, *, writes: bool) -> Handle:
        """Open the file, and extend it."""
        descriptor, refusal = self._open()
        handle = self._adopt(descriptor)
        try:
            if refusal is not None:
                raise refusal
            self._lengthen(descriptor)
        except OSError:
            # Writes try again, so that they go on when there is room, or permission.
            if writes:
                raise
            self._is_ready = False
        else:
            self._describe()
            self._is_ready = True
        self._next_check = time.monotonic() + POLL_SECONDS
        self._handle = handle
        return handle

    def _lengthen(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size < self.geometry.file_bytes:
            # A concurrent process can only have extended it to the same length.
            os.ftruncate(descriptor, self.geometry.file_bytes)

    def _describe(self) -> None:
        """Write the description, if there is none.

        A fingerprint alone says nothing to an operator.
        """
        with (
            contextlib.suppress(OSError),
            open(f"{self.path.removesuffix(SUFFIX)}.json", "xb") as file,
        ):
            file.write(msgspec.json.format(msgspec.json.encode(self._about), indent=2) + b"\n")


def refusals(directory: str, files: Sequence[SlotFile]) -> list[str]:
    """Return the reasons that can be known before a set for which it would be refused."""
    status = os.statvfs(directory)
    paths = [file.path for file in files if os.path.exists(file.path)] or [directory]
    sparse = not files or any(
        os.stat(path).st_blocks * 512 < os.stat(path).st_size for path in paths
    )
    reasons = {
        "the file system is mounted read-only": status.f_flag & os.ST_RDONLY,
        f"{directory} is not writable for this user": not all(
            os.access(path, os.W_OK) for path in paths
        ),
        # Some file systems have no fixed number, and report 0.
        "the file system is full": status.f_blocks and not status.f_bavail and sparse,
    }
    return [reason for reason, applies in reasons.items() if applies]
