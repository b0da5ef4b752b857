"""Corruption below the API.

Objects written through a driver's `write_objects`, and files of a store changed at rest.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from hicache_conformance.harness.store_files import find_all
from hicache_storage.layers import innermost
from hicache_storage.objects import (
    Call,
    LookupBatch,
    Namespace,
    ObjectStorage,
    ObjectWrite,
    WriteBatch,
)
from hicache_storage.spec import HiCacheStorage, PoolName

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random


class ObjectCorruption(StrEnum):
    """Kinds of corrupt objects."""

    SHORT = "short"
    """Its last component is too short."""
    LONG = "long"
    """Its last component is too long."""
    FLIPPED_BIT = "flipped bit"
    """One bit of its bytes differs from what was sealed."""
    OTHER_KEY = "other key"
    """It is another key's page, whole and sealed."""
    OTHER_IDENTITY = "other identity"
    """It is a page of this key and another identity, whole and sealed."""


WRONG_LENGTHS: Final = (ObjectCorruption.SHORT, ObjectCorruption.LONG)


class FileCorruption(StrEnum):
    """Kinds of damage to files that hold pages."""

    FLIPPED = "one bit flipped"
    """In each page, one bit of its bytes."""
    TORN = "cut short"
    """Each file ends in the middle of the page in it."""
    EMPTIED = "emptied"
    """As a file system may leave a file that was new when the power failed."""
    GONE = "gone"


@runtime_checkable
class Damages(Protocol):
    """A storage that damages its own pages: an adapter of a foreign interface."""

    def can_corrupt(self) -> bool:
        """Return whether `corrupt` may succeed."""
        ...

    def corrupt(self, pool: str, key: str, damage: ObjectCorruption) -> bool:
        """Put a damaged page in the place of a page; return whether it is there."""
        ...


def can_corrupt(storage: HiCacheStorage) -> bool:
    """Return whether `corrupt_object` can damage pages of this storage."""
    driver = innermost(storage)
    return (
        driver.can_corrupt() if isinstance(driver, Damages) else isinstance(driver, ObjectStorage)
    )


def corrupt_object(storage: HiCacheStorage, pool: str, key: str, damage: ObjectCorruption) -> bool:
    """Put a damaged object in the place of a page, whether there is one or not.

    Returns:
        Whether the object is there now. A driver that refuses to store an object of the wrong
        length cannot hold one.
    """
    driver = innermost(storage)
    if isinstance(driver, Damages):
        return driver.corrupt(pool, key, damage)
    assert isinstance(driver, ObjectStorage)
    namespace = driver.pools[PoolName(pool)].namespace
    if driver.capabilities.deletes:
        # A driver that looks before it replaces an object keeps a whole one.
        with suppress(Exception):
            driver.delete_objects([LookupBatch(namespace, [key])], Call())
    try:
        written = driver.write_objects(
            [WriteBatch(namespace, [_damaged(namespace, key, damage)])], Call()
        )
    except Exception:  # noqa: BLE001 - whatever a driver says to an impossible object, it does not hold it
        return False
    return written == [[True]]


def _damaged(namespace: Namespace, key: str, damage: ObjectCorruption) -> ObjectWrite:
    *front, last = [
        memoryview(bytearray(b"\x5a" * length)) for length in namespace.geometry.component_bytes
    ]
    honest = ObjectWrite(namespace, key, [*front, last], replaces=True)
    # The wrong bytes go with the envelope of the honest object: a driver that reads nothing but the
    # envelope delivers them.
    envelope = bytearray(honest.envelope)
    match damage:
        case ObjectCorruption.SHORT:
            last = last[: len(last) // 2]
        case ObjectCorruption.LONG:
            # At the front, so that a store that cuts objects to length is not left with the honest
            # page.
            last = memoryview(b"more" + bytes(last))
        case ObjectCorruption.FLIPPED_BIT:
            last[len(last) // 2] ^= 1
        case ObjectCorruption.OTHER_KEY:
            envelope[:] = ObjectWrite(namespace, f"{key}'", [*front, last]).envelope
        case ObjectCorruption.OTHER_IDENTITY:
            # The fingerprint of the namespace, by the format that docs/spec.md gives.
            envelope[16:32] = bytes(byte ^ 0xFF for byte in envelope[16:32])
    return Forgery(honest, [*front, last], bytes(envelope))


class Forgery(ObjectWrite):
    """A write of other bytes than the honest one's, whose envelope does not say so."""

    __slots__ = ()

    def __init__(self, honest: ObjectWrite, buffers: list[memoryview], envelope: bytes) -> None:
        super().__init__(honest.namespace, honest.key, buffers, replaces=honest.replaces)
        self._envelope = envelope

    def seal(self, computed: int) -> None:
        """Leave the envelope as it is.

        The checksum that a driver has computed is that of the wrong bytes.
        """


def corrupt_files(
    directory: Path, pages: Sequence[bytes], decay: FileCorruption, random: Random
) -> int:
    """Damage the files that hold pages.

    Args:
        pages: their bytes, all of one length.

    Returns:
        Number of pages that were found and damaged.
    """
    damaged = 0
    for path, found in _places(directory, pages):
        # Only files that hold a page as it is: elsewhere it is not known whose bytes would be
        # damaged.
        places = [place for place in found if place >= 0]
        if places:
            _corrupt_file(path, places, len(pages[0]), decay, random)
        damaged += len(places)
    return damaged


def _corrupt_file(
    path: Path, places: Sequence[int], length: int, decay: FileCorruption, random: Random
) -> None:
    if decay is FileCorruption.GONE:
        path.unlink()
        return
    # In place: a damaged file is still the same file.
    with path.open("r+b", buffering=0) as file:
        match decay:
            case FileCorruption.FLIPPED:
                for place in places:
                    at = place + random.randrange(length)
                    [byte] = os.pread(file.fileno(), 1, at)
                    os.pwrite(file.fileno(), bytes([byte ^ 1 << random.randrange(8)]), at)
            case FileCorruption.TORN:
                # Inside the first page, so that at least one is cut, and those behind it are gone.
                file.truncate(min(places) + random.randrange(1, length))
            case FileCorruption.EMPTIED:
                file.truncate(0)


def corrupt_page(directory: Path, page: bytes, other: bytes, damage: ObjectCorruption) -> bool:
    """Damage the files of a store that hold a page.

    Args:
        other: bytes of a page of another key, or another identity.

    Returns:
        Whether one of them holds it as it is, and another one `other` where that is asked for.
    """
    found = dict(_places(directory, [page, other]))
    # Whole files change place: what else a store writes beside the page comes with it.
    strangers = [path for path, (place, at) in found.items() if place < 0 <= at]
    swapped = damage in (ObjectCorruption.OTHER_KEY, ObjectCorruption.OTHER_IDENTITY)
    held = [path for path, (place, _) in found.items() if place >= 0]
    if not held or (swapped and not strangers):
        return False
    for path in held:
        content, place = bytearray(path.read_bytes()), found[path][0]
        match damage:
            case ObjectCorruption.SHORT:
                del content[place + len(page) // 2 :]
            case ObjectCorruption.LONG:
                content[place:place] = b"more"
            case ObjectCorruption.FLIPPED_BIT:
                content[place + len(page) // 2] ^= 1
            case ObjectCorruption.OTHER_KEY | ObjectCorruption.OTHER_IDENTITY:
                content[:] = strangers[0].read_bytes()
        # In place: a damaged file is still the same file.
        with path.open("r+b") as file:
            file.write(content)
            file.truncate()
    return True


def _places(directory: Path, pages: Sequence[bytes]) -> Iterator[tuple[Path, list[int]]]:
    """Each file of a directory, and where in it each page is; -1 for one that is not."""
    for home, _, names in os.walk(directory):
        for name in sorted(names):
            path = Path(home, name)
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    places = find_all(file.fileno(), pages)
                yield path, places
