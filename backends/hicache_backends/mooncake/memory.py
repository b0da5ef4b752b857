"""Where the bytes of pages lie: addresses of pools for the transports, and blocks for what a page has no room for."""

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
"""Most objects of one call of the library."""
BLOCK_BYTES: Final = BLOCK_ENVELOPES * ENVELOPE_BYTES


def address_of(view: memoryview) -> int:
    """Address of the first byte of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def regions_of(access: PageAccess) -> list[tuple[int, int]]:
    """Start and size of the memory that a pool's pages lie in; empty for a pool whose pages are copied.

    Components are taken to be laid out alike in all pages, so that the first and the last page tell where the others are.
    """
    if not isinstance(access, LentPages):
        # Its module needs torch, which an engine's pool has long loaded.
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
    """Memory for one call: for envelopes, and for small pages that are gathered before they are sent."""

    __slots__ = ("address", "spoilt", "view")

    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size))
        self.address = address_of(self.view)
        self.spoilt = False
        """The library has given up a read into it, which may still arrive."""


_spoilt: Final = list[Block]()
"""Kept mapped for as long as the process lives."""


class Blocks:
    """Blocks that are used again, except spoilt ones. Safe for many threads.

    Args:
        register: told address and size of each new block.
        size: bytes of each.
    """

    def __init__(self, register: Callable[[int, int], None], size: int = BLOCK_BYTES) -> None:
        self._register, self._size = register, size
        self._lock = threading.Lock()
        self._spare = list[Block]()

    @contextmanager
    def lend(self) -> Generator[Block]:
        """A block for one call; it comes back with it, however late."""
        with self._lock:
            block = self._spare.pop() if self._spare else None
        if block is None:
            block = Block(self._size)
            self._register(block.address, self._size)
        try:
            yield block
        finally:
            with self._lock:
                (_spoilt if block.spoilt else self._spare).append(block)
