"""Store paths: validation, creation, and the file system that they lie on."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs", "ramfs", "overlay"}
)
_MEMORY = frozenset({"tmpfs", "ramfs"})
_PREALLOCATES = frozenset({"ext4", "xfs"})


def check_path(path: str) -> None:
    """Refuse a path that begins with `~`, which only a shell expands.

    Raises:
        ValueError: it does.
    """
    if path.startswith("~"):
        raise ValueError(
            f"path {path!r} begins with '~', which only a shell expands; write the whole path"
        )


def make_last(path: str) -> None:
    """Make a directory in an existing one.

    Raises:
        FileNotFoundError: its parent does not exist: it may be on a file system that is not
            mounted.
        OSError: it cannot be made.
    """
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        raise FileNotFoundError(
            f"there is no directory {above!r}: mount what belongs there, or make it"
        )
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system of a path."""

    kind: str
    """The kernel's name for it, empty if unknown."""

    @property
    def is_local(self) -> bool:
        """`True` if it is local; an unknown one may be across a network."""
        return self.kind in _LOCAL

    @property
    def is_memory(self) -> bool:
        """`True` if no device is below it that could stall."""
        return self.kind in _MEMORY

    @property
    def favours_direct_reads(self) -> bool:
        """`True` if reading past the page cache is faster.

        FUSE reads 1 MiB a request so, and 128 KiB through the cache, which it drops at every open.
        """
        return self.kind.startswith("fuse")

    @property
    def preallocates(self) -> bool:
        """`True` if `fallocate` is a system call there, and worth it.

        glibc emulates it elsewhere by writing a byte into every block.
        """
        return self.kind in _PREALLOCATES


def mount_of(path: str) -> Mount:
    """The file system under an existing path."""
    real = os.path.realpath(path)
    best, kind = -1, ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                mount, _, source = line.partition(" - ")
                point = _unescape(mount.split()[4])
                # The last of equally long ones is mounted on top.
                if len(point) >= best and _is_below(real, point):
                    best, kind = len(point), source.split(maxsplit=1)[0]
    except (OSError, IndexError):
        return Mount("")
    return Mount(kind)


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(text: str) -> str:
    # The kernel writes white space and backslashes of a path in octal.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
