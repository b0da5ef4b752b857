"""Self-describing pages: a wrong byte identifies the page that it comes from.

A page is a row of cells of 16 bytes, the last of which may be cut short:

```
offset  bytes  field
0       4      digest of identity and pool
4       6      digest of the key
10      2      generation: which set wrote it
12      4      offset of this cell in the page
```
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.spec import StorageIdentity

CELL_BYTES = 16
_CELL = struct.Struct("<4s6sHI")


@dataclass(frozen=True, slots=True)
class Page:
    """Description of a page: its owner, pool, key and generation."""

    identity: StorageIdentity
    pool: str
    key: str
    generation: int = 0
    start: int = 0
    """Offset of its first byte in the page that it is a part of; a multiple of the cell."""


class PagePatterns:
    """Writes pages, and reads from any bytes whose they are.

    Knows the pages that were written with it.
    """

    def __init__(self) -> None:
        self._owners: dict[bytes, tuple[StorageIdentity, str]] = {}
        self._keys = dict[bytes, str]()
        self._tags: dict[tuple[StorageIdentity, str], bytes] = {}

    def render(self, page: Page, length: int) -> bytes:
        """The bytes of a page."""
        head = self._owner_tag(page.identity, page.pool) + self._key_tag(page.key)
        cells = (
            _CELL.pack(head[:4], head[4:], page.generation, offset)
            for offset in range(page.start, page.start + length, CELL_BYTES)
        )
        return b"".join(cells)[:length]

    def explain(self, found: bytes, expected: Page) -> str:
        """Describe the content of `found` where it is not `expected`; empty where it is."""
        wanted = self.render(expected, len(found))
        if found == wanted:
            return ""
        offset = next(
            index for index, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b
        )
        start = offset // CELL_BYTES * CELL_BYTES
        wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
        return f"{self._describe(found[start : start + CELL_BYTES], start, expected)} ({wrong} of {len(found)} bytes differ)"

    def generations(self, found: bytes) -> list[int]:
        """The generations that the cells of a page name, each once; its first cell's comes first."""
        cells = _CELL.iter_unpack(found[: len(found) // CELL_BYTES * CELL_BYTES])
        return list(dict.fromkeys(int(cell[2]) for cell in cells))

    def generation(self, found: bytes, page: Page) -> int | None:
        """Return the generation of `page` that `found` is as a whole; None where it is none."""
        for generation in self.generations(found)[:1]:
            if self.render(replace(page, generation=generation), len(found)) == found:
                return generation
        return None

    def _describe(self, cell: bytes, offset: int, expected: Page) -> str:
        at = f"at byte {offset}"
        if not any(cell):
            return f"holds zeros {at}"
        if len(cell) < CELL_BYTES:
            return f"differs in its last {len(cell)} bytes"
        owner_tag, key_tag, generation, place = _CELL.unpack(cell)
        if cell.startswith(CANARY_MARK):
            return f"was not written {at}: it holds what the destination held before the call"
        if cell.startswith(SPENT_MARK):
            return f"holds, {at}, what its writer put into the host page after the set had returned"
        if owner_tag not in self._owners or key_tag not in self._keys:
            return f"holds bytes of no page of this run {at}: {cell.hex()}"
        found = Page(*self._owners[owner_tag], self._keys[key_tag], generation)
        return f"{_difference(found, expected)} {at}" + (
            "" if place == expected.start + offset else f", taken from byte {place} of that page"
        )

    def _owner_tag(self, identity: StorageIdentity, pool: str) -> bytes:
        tag = self._tags.get((identity, pool))
        if tag is None:
            # Every field, deciding or not: two identities that share pages still wrote their own
            # bytes.
            text = repr((identity, pool)).encode()
            tag = self._tags[identity, pool] = hashlib.blake2b(
                text, digest_size=4, person=b"owner"
            ).digest()
            self._owners[tag] = (identity, pool)
        return tag

    def _key_tag(self, key: str) -> bytes:
        tag = hashlib.blake2b(key.encode(), digest_size=6, person=b"key").digest()
        self._keys.setdefault(tag, key)
        return tag


CANARY_MARK = b"\xc5CANARY\xc5"
SPENT_MARK = b"\xc5SPENT!\xc5"


def canary(call: int, length: int) -> bytes:
    """Return the bytes of destinations and their neighbours before a get.

    They differ from call to call.
    """
    cell = CANARY_MARK + struct.pack("<Q", call)
    return (cell * (length // CELL_BYTES + 1))[:length]


def spent(length: int) -> bytes:
    """Return the bytes that overwrite a source page as soon as the set has returned."""
    return (SPENT_MARK * (length // len(SPENT_MARK) + 1))[:length]


def differing_fields(found: StorageIdentity, expected: StorageIdentity) -> str:
    """Name the fields in which two identities differ, each with both values."""
    return ", ".join(
        f"{field.name} {getattr(found, field.name)!r} (expected {getattr(expected, field.name)!r})"
        for field in fields(found)
        if getattr(found, field.name) != getattr(expected, field.name)
    )


def short(key: str) -> str:
    """A key as messages show it."""
    return repr(key if len(key) <= 60 else f"{key[:40]}...{key[-12:]}")


def _difference(found: Page, expected: Page) -> str:
    words = list[str]()
    if found.key != expected.key:
        words.append(f"holds bytes of key {short(found.key)}")
    if found.pool != expected.pool:
        words.append(f"holds bytes of pool {found.pool!r}")
    if found.identity != expected.identity:
        words.append(
            f"holds bytes written under {differing_fields(found.identity, expected.identity)}"
        )
    if not words and found.generation != expected.generation:
        words.append(
            f"holds the bytes of set number {found.generation} of this key, not of number "
            f"{expected.generation}"
        )
    return " and ".join(words) or "holds its own bytes in the wrong place"
