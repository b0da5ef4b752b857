"""Host pool over LMCache's L1 arena."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from hicache_storage.spec import PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence


def arena_view(address: int, size: int) -> memoryview:
    """Return the bytes of the arena, which outlives the adapter.

    Args:
        address: of its first byte.
        size: in bytes.
    """
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class ArenaPool:
    """A host pool whose slots are places in LMCache's arena, where an object may begin.

    An object is a page of one slot, however long it is: LMCache hands out places that do not
    overlap.

    Args:
        arena: the bytes of the arena.
        align_bytes: distance of two slots.
        page_bytes: length of each object.
    """

    def __init__(self, arena: memoryview, *, align_bytes: int, page_bytes: int) -> None:
        self._arena = arena
        self._align_bytes = align_bytes
        self.geometry = PageGeometry(
            layout="lmcache",
            dtype="uint8",
            page_size=1,
            # The last one is where an object that ends with the arena begins.
            size=max(0, (len(arena) - page_bytes) // align_bytes + 1),
            component_bytes=(page_bytes,),
        )

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Return the bytes of each object."""
        length = self.geometry.page_bytes
        starts = (slot * self._align_bytes for slot in first_slots)
        return [[self._arena[start : start + length]] for start in starts]
