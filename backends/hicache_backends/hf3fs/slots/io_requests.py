"""Division of pages into I/O requests: neighbouring slots together, long pages in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from hicache_backends.hf3fs.slots.engine import SlotRead, SlotWrite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IO_BYTES: Final = 512 << 10
"""Length of one I/O request: its bytes are still in the core's cache when they are checksummed."""

JobT = TypeVar("JobT", SlotRead, SlotWrite)


def extents(jobs: Sequence[JobT]) -> Iterator[list[JobT]]:
    """Group consecutive jobs of neighbouring slots up to `IO_BYTES`; longer pages stay alone."""
    extent, file, following, limit = list[JobT](), None, -1, 0
    for job in jobs:
        if job.slot != following or job.file is not file or len(extent) == limit:
            if extent:
                yield extent
            extent, file = [], job.file
            limit = max(1, IO_BYTES // file.geometry.slot_bytes)
        extent.append(job)
        following = job.slot + 1
    if extent:
        yield extent


def split_buffers(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Group consecutive buffers up to `IO_BYTES`; longer ones are cut."""
    some, room = list[memoryview](), IO_BYTES
    for buffer in buffers:
        rest = buffer
        while rest:
            if not room:
                yield some
                some, room = [], IO_BYTES
            some.append(rest[:room])
            rest = rest[room:]
            room -= len(some[-1])
    if some:
        yield some
