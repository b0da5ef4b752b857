"""Memory of transfers: registered regions of host pools, and blocks for envelopes."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hicache_storage.objects import ENVELOPE_BYTES
from hicache_storage.pools.adapter import LentPages
from hicache_storage.pools.engine import end_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_storage.pools.access import PageAccess

BLOCK_ENVELOPES: Final = 256
"""Maximum number of objects in one call of the library."""
BLOCK_BYTES: Final = BLOCK_ENVELOPES * ENVELOPE_BYTES


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def regions_of(access: PageAccess) -> list[tuple[int, int]]:
    """Return start and size of a pool's memory regions; empty for a pool whose pages are copied.

    All pages must have the same layout of components, so that the first and the last page bound
    the regions.
    """
    if not isinstance(access, LentPages):
        # Imported here, because the module needs torch, which an engine's pool has loaded anyway.
        from hicache_storage.pools.addressed import AddressedPages

        if not isinstance(access, AddressedPages):
            return []
    pages = access.targets(end_pages(access.geometry))
    spans = sorted(
        (min(places), max(places) + len(views[0]))
        for views in zip(*pages, strict=True)
        for places in [[address_of(view) for view in views]]
    )
    merged = list[tuple[int, int]]()
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return [(start, end - start) for start, end in merged]


class Block:
    """Memory for one call: for envelopes, and for small pages that are sent in one part."""

    __slots__ = ("address", "unsafe", "view")

    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size))
        self.address = address_of(self.view)
        self.unsafe = False
        """The library has given up a read into the block, whose bytes may still arrive."""


_unsafe: Final = list[Block]()
"""Blocks that stay mapped until the process ends."""


class Blocks:
    """A pool of reusable blocks; unsafe ones are not reused. Safe for many threads.

    Args:
        register: called with address and size of each new block.
        size: of each block, in bytes.
    """

    def __init__(self, register: Callable[[int, int], None], size: int = BLOCK_BYTES) -> None:
        self._register = register
        self._size = size
        self._lock = threading.Lock()
        self._spare = list[Block]()

    @contextmanager
    def lend(self) -> Generator[Block]:
        """Lend a block for one call, until that returns from the library."""
        with self._lock:
            block = self._spare.pop() if self._spare else None
        if block is None:
            block = Block(self._size)
            # Outside the lock: pinning memory takes long, and other calls only need a spare block.
            self._register(block.address, self._size)
        try:
            yield block
        finally:
            with self._lock:
                (_unsafe if block.unsafe else self._spare).append(block)
