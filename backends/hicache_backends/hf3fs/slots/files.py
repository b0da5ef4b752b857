"""Slot files and their scopes. A file is created and opened at its first use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_backends.posix.faults import detached
from hicache_metadata_server.protocol import ScopeGeometry

if TYPE_CHECKING:
    from collections.abc import Callable

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


class SlotFile:
    """One namespace: its file of slots, and its scope on the metadata server.

    Slot i begins at byte `i * slot_bytes`. It holds the page's components, its envelope and
    padding. Safe for many threads.

    Args:
        directory: of the file, which is created if missing.
        store_id: of the directory.
        namespace: whose pages are in the slots.
        file_bytes: maximum length. A shorter file is extended; no file is truncated.
        adopt: wraps a descriptor in a handle.

    Raises:
        ValueError: no slot fits.
    """

    def __init__(
        self,
        directory: str,
        store_id: str,
        namespace: Namespace,
        file_bytes: int,
        adopt: Callable[[int], Handle],
    ) -> None:
        unit = BLOCK if namespace.object_bytes >= LARGE else SECTOR
        self.slot_bytes = -(-namespace.object_bytes // unit) * unit
        self.slots = file_bytes // self.slot_bytes
        if not self.slots:
            raise ValueError(
                f"file_size {file_bytes} is less than a page of pool {namespace.pool} takes: "
                f"{self.slot_bytes} bytes"
            )
        self.namespace = namespace
        # The map is named by the store's id, and so is the file. Under a name without it, a map made
        # after the directory was emptied would give out slots of the file that the engines of the
        # former map make again.
        name = f"{namespace.pool}-{namespace.name}-{store_id}"
        self.scope = f"0:{name}"
        """Name on the server. The rank is 0: ranks with different bytes have different
        fingerprints."""
        self.path = os.path.join(directory, name + SUFFIX)
        self._adopt = adopt
        self._lock = threading.Lock()
        # The lock guards all that follows.
        self._handle: Handle | None = None
        self._is_ready = False
        """The handle is open for writing, and the file has its length."""
        self._next_check = 0.0

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.slot_bytes * self.slots

    @property
    def geometry(self) -> ScopeGeometry:
        """Slots, bytes and identity, equal for all clients."""
        page = self.namespace.geometry
        described = {
            "layout": page.layout,
            "dtype": page.dtype,
            "page_size": page.page_size,
            "bytes": page.component_bytes,
        }
        return ScopeGeometry(
            scope=self.scope,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            geometry=hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:32],
            identity=self.namespace.name,
        )

    def offset(self, slot: int) -> int:
        """Byte offset of a slot."""
        return slot * self.slot_bytes

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
            if os.fstat(descriptor).st_size < self.file_bytes:
                # A concurrent process can only have extended it to the same length.
                os.ftruncate(descriptor, self.file_bytes)
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

    def _describe(self) -> None:
        """Write the description, if there is none.

        A fingerprint alone says nothing to an operator.
        """
        with (
            contextlib.suppress(OSError),
            open(f"{self.path.removesuffix(SUFFIX)}.json", "xb") as file,
        ):
            file.write(
                msgspec.json.format(msgspec.json.encode(self.namespace.describe()), indent=2)
                + b"\n"
            )
