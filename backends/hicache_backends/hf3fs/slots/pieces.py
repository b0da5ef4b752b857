"""How pages become requests: neighbouring slots are moved together, long pages are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from hicache_backends.hf3fs.slots.engine import SlotRead, SlotWrite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PIECE_BYTES: Final = 512 << 10
"""Moved at a time: what was read is still in the core's cache when its checksum is computed."""

JobT = TypeVar("JobT", SlotRead, SlotWrite)


def runs(jobs: Sequence[JobT]) -> Iterator[list[JobT]]:
    """Consecutive jobs of neighbouring slots, as many together as make a piece; longer pages alone."""
    run, file, following, most = list[JobT](), None, -1, 0
    for job in jobs:
        if job.slot != following or job.file is not file or len(run) == most:
            if run:
                yield run
            run, file = [], job.file
            most = max(1, PIECE_BYTES // file.geometry.slot_bytes)
        run.append(job)
        following = job.slot + 1
    if run:
        yield run


def pieces(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Consecutive parts of at most a piece together; longer ones are cut."""
    some, room = list[memoryview](), PIECE_BYTES
    for part in parts:
        if len(part) <= room:
            some.append(part)
            room -= len(part)
            continue
        for start, end in _cuts(len(part), room):
            if end - start > room:
                yield some
                some, room = [], PIECE_BYTES
            some.append(part[start:end])
            room -= end - start
    if some:
        yield some


def _cuts(length: int, room: int) -> Iterator[tuple[int, int]]:
    """Ends of the pieces of a part: first what still fits, then whole pieces."""
    start = 0
    while start < length:
        end = min(length, start + (room or PIECE_BYTES))
        yield start, end
        start, room = end, PIECE_BYTES
