"""Host pool over the rows of vLLM's CPU tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.spec import PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence


class ChunkPool:
    """A host pool whose slots are the chunks of vLLM's CPU tier, in vLLM's own memory.

    Args:
        rows: vLLM's view of its region, (chunks, bytes of a row), int8.
        page_bytes: bytes of a chunk, without the pad at the end of its row.
        layout: name of the layout of the KV cache.
    """

    def __init__(self, rows: memoryview, *, page_bytes: int, layout: str) -> None:
        assert rows.shape is not None
        chunks, stride = rows.shape
        self._stride = stride
        # Sub-views of two dimensions are not implemented.
        self._bytes = rows.cast("B")
        self.geometry = PageGeometry(
            layout=layout,
            dtype="uint8",
            page_size=1,
            size=chunks,
            component_bytes=(page_bytes,),
        )

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Return the bytes of each chunk."""
        length = self.geometry.page_bytes
        starts = (slot * self._stride for slot in first_slots)
        return [[self._bytes[start : start + length]] for start in starts]

    def release(self) -> None:
        """Release the region, which vLLM unmaps next; the storage is closed.

        Raises:
            BufferError: a call that has not ended still has a page of it.
        """
        self._bytes.release()
