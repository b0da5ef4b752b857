"""Damage to the files of a store, while nobody looks."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_conformance.sparse import find_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random


class Decay(StrEnum):
    """What happens to the files that hold pages."""

    FLIPPED = "one bit flipped"
    """In each page, one bit of its bytes."""
    TORN = "cut short"
    """Each file ends in the middle of the page in it."""
    EMPTIED = "emptied"
    """As a file system may leave a file that was new when the power failed."""
    GONE = "gone"


def let_rot(directory: Path, pages: Sequence[bytes], decay: Decay, random: Random) -> int:
    """Damage the files that hold pages.

    Args:
        directory: of the store.
        pages: their bytes, all of one length.
        decay: what happens to them.
        random: where exactly.

    Returns:
        Number of pages that were found and damaged.
    """
    return sum(_rot(path, pages, decay, random) for path in _files(directory))


def _rot(path: Path, pages: Sequence[bytes], decay: Decay, random: Random) -> int:
    with path.open("rb") as file:
        places = [place for place in find_all(file.fileno(), pages) if place >= 0]
    if places:
        _damage(path, places, len(pages[0]), decay, random)
    return len(places)


def _damage(path: Path, places: Sequence[int], length: int, decay: Decay, random: Random) -> None:
    if decay is Decay.GONE:
        path.unlink()
        return
    # In place: a damaged file is still the same file.
    with path.open("r+b", buffering=0) as file:
        match decay:
            case Decay.FLIPPED:
                for place in places:
                    _flip(file.fileno(), place + random.randrange(length), random.randrange(8))
            case Decay.TORN:
                file.truncate(min(places) + random.randrange(1, length))
            case Decay.EMPTIED:
                file.truncate(0)


def _flip(descriptor: int, at: int, bit: int) -> None:
    [byte] = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte ^ 1 << bit]), at)


def _files(directory: Path) -> Iterator[Path]:
    for home, _, names in os.walk(directory):
        for name in sorted(names):
            path = Path(home, name)
            if path.is_file() and not path.is_symlink():
                yield path
