"""The preallocated files, opened when first needed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_backends.hf3fs.slots.geometry import SlotGeometry
    from hicache_backends.posix.descriptors import Handle

SUFFIX: Final = ".slots"
# A link in its place would lead the pages of all tenants to wherever its maker wants them.
FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
LOOK_SECONDS: Final = 0.3
"""How often it is asked whether somebody has removed an open file."""


class SlotFile:
    """One file of slots. Safe for many threads.

    Args:
        path: made if it is missing.
        geometry: a file that is shorter is made longer, none is made shorter.
        adopt: makes a handle of a descriptor.
        about: whose pages these are, for people; it is told in a small file beside this one.
        preallocates: ask the file system for all of its room at once.
    """

    def __init__(
        self,
        path: str,
        geometry: SlotGeometry,
        adopt: Callable[[int], Handle],
        about: Mapping[str, object],
        *,
        preallocates: bool,
    ) -> None:
        self.path = path
        self._about = about
        self.geometry = geometry
        self._adopt = adopt
        self._preallocates = preallocates
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._look_at = 0.0
        self._untouched = False
        """This process has made it, and has not handed it out yet."""

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return slot * self.geometry.slot_bytes

    def is_written(self) -> bool:
        """Whether anybody may have written to it, or be writing; makes it if it is missing, so that others see that it is there."""
        with self._lock:
            if self._untouched:
                return False
            try:
                os.close(os.open(self.path, FLAGS | os.O_EXCL, 0o666))
            except OSError:
                # It exists, or that cannot be found out.
                return True
            self._untouched = True
            return False

    def borrow(self) -> Handle:
        """The open file, which stays open as long as the handle is referenced.

        Raises:
            OSError: it cannot be opened or made long enough.
        """
        with self._lock:
            self._untouched = False
            handle, now = self._handle, time.monotonic()
            if handle is not None and now < self._look_at:
                return handle
            self._look_at = now + LOOK_SECONDS
            if handle is not None and os.fstat(handle.descriptor).st_nlink:
                return handle
            # New, or somebody has removed it: what is written there from now on would be seen by nobody else.
            self._handle = None
            handle = self._adopt(os.open(self.path, FLAGS, 0o666))
            self._lengthen(handle.descriptor)
            self._describe()
            self._handle = handle
            return handle

    def forget(self, handle: Handle) -> None:
        """Open the file anew the next time: what is open may belong to a mount that has died."""
        with self._lock:
            if self._handle is handle:
                self._handle = None

    def remove(self) -> None:
        """Remove it and what tells of it; who has it open makes it anew."""
        self.close()
        for path in (self.path, f"{self.path.removesuffix(SUFFIX)}.json"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """Close it, when nobody uses it any more."""
        with self._lock:
            self._handle = None

    def _lengthen(self, descriptor: int) -> None:
        length = os.fstat(descriptor).st_size
        if length >= self.geometry.file_bytes:
            return
        if self._preallocates:
            os.posix_fallocate(descriptor, length, self.geometry.file_bytes - length)
        else:
            # Another process may have made it longer meanwhile, but to the same length.
            os.ftruncate(descriptor, self.geometry.file_bytes)

    def _describe(self) -> None:
        """A name is a fingerprint, which tells nobody what can be removed. Who comes first tells; a failure harms no page."""
        with contextlib.suppress(OSError), open(f"{self.path.removesuffix(SUFFIX)}.json", "xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self._about), indent=2) + b"\n")


class SlotFiles:
    """The files of one store's directory."""

    def __init__(self, directory: str, adopt: Callable[[int], Handle], *, preallocates: bool) -> None:
        self._directory, self._adopt = directory, adopt
        self._preallocates = preallocates
        self._files: dict[str, SlotFile] = {}
        self._lock = threading.Lock()

    def get(self, name: str, geometry: SlotGeometry, about: Mapping[str, object]) -> SlotFile:
        """The file of one scope; it is opened when it is borrowed."""
        with self._lock:
            file = self._files.get(name)
            if file is None:
                path = os.path.join(self._directory, name + SUFFIX)
                file = self._files[name] = SlotFile(path, geometry, self._adopt, about, preallocates=self._preallocates)
            return file

    def close(self) -> None:
        """Close all."""
        with self._lock:
            files, self._files = list(self._files.values()), {}
        for file in files:
            with contextlib.suppress(OSError):
                file.close()
