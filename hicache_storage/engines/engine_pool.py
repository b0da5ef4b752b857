"""Host pool over memory of an engine: rows of vLLM's CPU tier, LMCache's L1 arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.spec import PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence


class EnginePool:
    """A host pool whose slots are the places in an engine's memory where a page may begin.

    A page is one slot, however long it is: the engine hands out places that do not overlap.

    Args:
        memory: the engine's, as bytes.
        stride: distance of two slots.
        page_bytes: length of each page, without a pad at its end.
        layout: name of the layout of the KV cache.
    """

    def __init__(self, memory: memoryview, *, stride: int, page_bytes: int, layout: str) -> None:
        self._memory = memory
        self._stride = stride
        self.geometry = PageGeometry(
            layout=layout,
            dtype="uint8",
            page_size=1,
            # The last one is where a page that ends with the memory begins.
            size=max(0, (len(memory) - page_bytes) // stride + 1),
            component_bytes=(page_bytes,),
        )

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Return the bytes of each page."""
        length = self.geometry.page_bytes
        starts = (slot * self._stride for slot in first_slots)
        return [[self._memory[start : start + length]] for start in starts]

    def release(self) -> None:
        """Release the memory, which the engine unmaps next; the storage is closed.

        Raises:
            BufferError: a call that has not ended still has a page of it.
        """
        self._memory.release()
