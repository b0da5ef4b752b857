"""Options of the file driver."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

from hicache_backends.posix.directories import check_path
from hicache_storage.spec import DriverConfig, parse_bytes

MIN_BYTES = 4096
MIN_TEXT_BYTES = 1 << 20
"""Of a number in text, which is most likely one whose unit was forgotten."""


class FileConfig(DriverConfig, frozen=True, kw_only=True):
    """Options of the file driver.

    All processes that share a directory should be given the same.

    Raises:
        ValueError: `capacity` or `min_free` is no size.
    """

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Directory of the store. It is created in an existing directory; a "
            "missing mount point is not created.",
        ),
    ]
    capacity: Annotated[
        int | str | None,
        Meta(
            description="Maximum size of the directory, such as '500GiB', for all namespaces and "
            "processes together. The least recently used pages are evicted. Unlimited by default."
        ),
    ] = None
    min_free: Annotated[
        int | str,
        Meta(
            description="Room left to others on the file system, such as '50GiB' or '5%'. Where "
            "less is free, the least recently used pages are evicted, then sets are refused."
        ),
    ] = "5%"
    fsync: Annotated[
        bool,
        Meta(
            description="Sync pages to the disk before a set answers True, so that they survive a "
            "loss of power."
        ),
    ] = False
    direct_io: Annotated[
        bool | None,
        Meta(
            description="Read with O_DIRECT, past the page cache, where file system and buffers "
            "allow it; for stores much larger than memory. By default on FUSE mounts only, where "
            "it needs fewer requests."
        ),
    ] = None
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum number of threads that move the bytes of one call. By default 4, "
            "or the number of cores if less, on a local disk; 8 on a network mount and with "
            "direct_io.",
        ),
    ] = None
    verify_checksums: Annotated[
        bool,
        Meta(
            description="Verify the checksum of each page that is read. Length, identity and key "
            "are always verified."
        ),
    ] = True

    def __post_init__(self) -> None:
        if self.capacity is not None and not _checked_size("capacity", self.capacity, "500GiB"):
            raise ValueError("capacity must not be 0; leave it out for no limit")
        if self._min_free_share is None:
            _checked_size("min_free", self.min_free, "5%")
        elif not 0 <= self._min_free_share < 100:
            raise ValueError(f"min_free {self.min_free!r} must be at least 0% and less than 100%")
        check_path(self.path)

    @property
    def capacity_bytes(self) -> int | None:
        """The capacity as a number."""
        return None if self.capacity is None else parse_bytes(self.capacity)

    @property
    def leaves_room(self) -> bool:
        """Whether some of the file system is left to others."""
        return self.min_free_bytes(sys.maxsize) > 0

    @property
    def _min_free_share(self) -> float | None:
        """`min_free` in percent; None where it is a size."""
        text = str(self.min_free).strip()
        try:
            return float(text[:-1]) if text.endswith("%") else None
        except ValueError as error:
            raise ValueError(f"min_free {text!r} is no percentage; write '5%'") from error

    def min_free_bytes(self, total: int) -> int:
        """Return `min_free` of a file system of `total` bytes, in bytes."""
        share = self._min_free_share
        return parse_bytes(self.min_free) if share is None else int(total * share / 100)


def _checked_size(name: str, value: int | str, example: str) -> int:
    """The bytes of a size; one that is too small for a page, and not 0, lacks its unit."""
    try:
        size = parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    bare = isinstance(value, str) and value.strip().isdigit()
    if 0 < size < (MIN_TEXT_BYTES if bare else MIN_BYTES):
        raise ValueError(
            f"{name} {value!r} is {size} bytes, which no page fits into; a unit is missing, as in "
            f"{example!r}"
        )
    return size
