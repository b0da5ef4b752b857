"""Host pool over memory of an engine: rows of vLLM's CPU tier, LMCache's L1 arena, or a byte for
each page where side pools have the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.spec import PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence


class EnginePool:
    """A host pool whose pages are the places in an engine's memory where one may begin.

    A page is one slot by default, however long it is: the engine hands out places that do not
    overlap.

    Args:
        memory: the engine's, as bytes.
        stride: distance of two pages.
        page_bytes: length of each page, without a pad at its end.
        layout: name of the layout of the KV cache.
        page_size: slots of a page.
    """

    def __init__(
        self,
        memory: memoryview,
        *,
        stride: int,
        page_bytes: int,
        layout: str,
        page_size: int = 1,
    ) -> None:
        self._memory = memory
        self._stride = stride
        self.geometry = PageGeometry(
            layout=layout,
            dtype="uint8",
            page_size=page_size,
            # The last page ends with the memory.
            size=max(0, (len(memory) - page_bytes) // stride + 1) * page_size,
            component_bytes=(page_bytes,),
        )

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Return the bytes of each page."""
        length, page_size = self.geometry.page_bytes, self.geometry.page_size
        starts = (slot // page_size * self._stride for slot in first_slots)
        return [[self._memory[start : start + length]] for start in starts]

    def release(self) -> None:
        """Release the memory, which the engine unmaps next; the storage is closed.

        Raises:
            BufferError: a call that has not ended still has a page of it.
        """
        self._memory.release()
