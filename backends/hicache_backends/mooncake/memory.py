"""Memory of transfers: its addresses, and the regions of host pools to be registered."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from hicache_storage.objects import ENVELOPE_BYTES
from hicache_storage.pools.access import end_pages
from hicache_storage.pools.adapter import LentPages

if TYPE_CHECKING:
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
        from hicache_storage.pools.engine import AddressedPages

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
