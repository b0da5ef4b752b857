"""Files of a store: their disk usage, and pages in sparse ones."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def store_files(config: Mapping[str, object], home: Path) -> dict[str, int]:
    """Lengths of the files under the directories that options name, by their paths below `home`.

    Empty where none names a directory there, so that the store is somewhere else.
    """
    named = {
        value for value in config.values() if isinstance(value, str) and value.startswith(str(home))
    }
    found = dict[str, int]()
    for directory in named:
        for parent, _, names in os.walk(directory):
            for name in names:
                path = Path(parent, name)
                # One may be removed while we look. The length and not the blocks: a driver limits
                # what it writes, and file systems round.
                with suppress(FileNotFoundError):
                    found[os.path.relpath(path, home)] = path.lstat().st_size
    return found


def disk_usage(config: Mapping[str, object], home: Path) -> int:
    """Bytes of all these files."""
    return sum(store_files(config, home).values())


PIECE_BYTES: Final = 4 << 20
"""In memory at a time."""


def extents(descriptor: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each part of a file that is no hole.

    The whole file where the file system does not tell.
    """
    end = 0
    while True:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            # From here on there is nothing but a hole, or nothing at all.
            return
        yield begin, end


def find_all(descriptor: int, wanted: Sequence[bytes]) -> list[int]:
    """Find the first offset of each byte string in a file; -1 where it is missing.

    All are of one length, and none is zeros.
    """
    places = [-1] * len(wanted)
    for begin, end in extents(descriptor):
        for at in range(begin, end, PIECE_BYTES):
            # Each piece overlaps the next, so that nothing is cut in two.
            piece = os.pread(descriptor, min(PIECE_BYTES + len(wanted[0]) - 1, end - at), at)
            for number, content in enumerate(wanted):
                if places[number] < 0 and (found := piece.find(content)) >= 0:
                    places[number] = at + found
    return places
