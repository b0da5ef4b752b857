"""Options of the file driver."""

from __future__ import annotations

from typing import Annotated, Literal

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
        ValueError: the capacity is no size.
    """

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Directory of the store; made if it is missing, but only in a directory "
            "that exists: a mount point is not made.",
        ),
    ]
    capacity: Annotated[
        int | str | None,
        Meta(
            description="Most bytes that the directory may hold, such as '500GiB': all namespaces "
            "and processes together. "
            "The least recently used pages are evicted to keep it. Unlimited by default."
        ),
    ] = None
    fsync: Annotated[
        bool,
        Meta(
            description="Pages survive a loss of power before a set answers True. Writes wait for "
            "the disk."
        ),
    ] = False
    direct_io: Annotated[
        bool | None,
        Meta(
            description="Read past the page cache (O_DIRECT) where file system and buffers allow "
            "it; for stores much larger "
            "than memory. By default only on FUSE mounts, where it takes an eighth of the requests."
        ),
    ] = None
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Most threads that move the bytes of one call. By default 4, or the number "
            "of cores if less, "
            "on a local disk; 8 on a network mount and where direct_io is set.",
        ),
    ] = None
    hung_reads: Annotated[
        Literal["auto", "wait", "bounce_buffer"],
        Meta(
            description="What a get does about a read that does not come back before the deadline. "
            "'bounce_buffer': it returns; pages "
            "are read into buffers of the driver's own (at most 16 MiB) and copied from there. "
            "'wait': it waits; pages are read "
            "straight into the host pool, and of a disk that stalls a get does not come back. By "
            "default as 'bounce_buffer', but that "
            "on a local disk what is in the page cache is read straight into the host pool, which "
            "never waits for the disk."
        ),
    ] = "auto"
    verify_checksums: Annotated[
        bool,
        Meta(
            description="Verify the checksum of each page that is read. Length, identity and key "
            "are verified anyway."
        ),
    ] = True
    metrics: Annotated[
        bool, Meta(description="Count pages, bytes and latencies. Faults are always counted.")
    ] = True
    abandoned_seconds: Annotated[
        float,
        Meta(
            ge=1,
            description="Seconds after which what a process of another machine, or one that /proc "
            "hides, was writing or replacing counts as left behind by "
            "one that was killed; what one of this machine has left is noticed at once. Until then "
            "the pages are read as ever, "
            "and not removed or evicted; others are evicted instead.",
        ),
    ] = 3600.0
    open_files: Annotated[
        int,
        Meta(
            ge=0,
            description="Files kept open between calls. Each keeps the room of an evicted bundle "
            "(64 MiB at most) until "
            "the next call.",
        ),
    ] = 64

    def __post_init__(self) -> None:
        try:
            size = self.capacity_bytes
        except ValueError as error:
            raise ValueError(f"capacity: {error}") from error
        if size == 0:
            raise ValueError("capacity must not be 0; leave it out for no limit")
        if size is not None and size < (
            MIN_TEXT_BYTES
            if str(self.capacity).strip().isdigit() and isinstance(self.capacity, str)
            else MIN_BYTES
        ):
            raise ValueError(
                f"capacity {self.capacity!r} is {size} bytes, which no page fits into; a unit is "
                f"missing, as in '500GiB'"
            )
        check_path(self.path)

    @property
    def capacity_bytes(self) -> int | None:
        """The capacity as a number."""
        return None if self.capacity is None else parse_bytes(self.capacity)
