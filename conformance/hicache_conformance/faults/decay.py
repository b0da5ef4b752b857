"""Damage to the files of a store, while nobody looks."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

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
    content = bytearray(path.read_bytes())
    places = [place for page in pages if (place := content.find(page)) >= 0]
    if not places:
        return 0
    length = len(pages[0])
    match decay:
        case Decay.FLIPPED:
            for place in places:
                content[place + random.randrange(length)] ^= 1 << random.randrange(8)
            _write(path, bytes(content))
        case Decay.TORN:
            _write(path, bytes(content[: min(places) + random.randrange(1, length)]))
        case Decay.EMPTIED:
            _write(path, b"")
        case Decay.GONE:
            path.unlink()
    return len(places)


def _write(path: Path, content: bytes | bytearray) -> None:
    # In place: a damaged file is still the same file.
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def _files(directory: Path) -> Iterator[Path]:
    for home, _, names in os.walk(directory):
        for name in sorted(names):
            path = Path(home, name)
            if path.is_file() and not path.is_symlink():
                yield path
