"""Stores that have no room, and get room again: a small file system of a test's own, and a Redis
out of memory."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = 4096


class SmallDisk:
    """A tmpfs of a few megabytes, filled by one file."""

    def __init__(self, path: Path) -> None:
        self.path, self._filler = path, path / "filler"

    def fill(self, *, leave: int = 0) -> None:
        """Take all room but so many bytes."""
        with self._filler.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(PAGE)):
                    pass
            except OSError:
                size = file.tell()
            file.truncate(max(size // PAGE * PAGE - leave, 0))

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink()


@contextmanager
def small_disk(directory: Path, size: str = "3m") -> Iterator[SmallDisk]:
    """A mounted one."""
    point = directory / "small"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point)], check=True)
    try:
        yield SmallDisk(point)
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)
