"""Host pools: memory in one of several layouts, and pages as buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.pools.access import check_size
from hicache_storage.pools.memory import byte_view, host_tensor
from hicache_storage.pools.slots import SlotAllocator
from hicache_storage.spec import InvalidPoolError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.pools.shapes import Part, PoolGeometry


class PagedHostPool(SlotAllocator):
    """A pool in host memory whose pages can be lent as they lie.

    A page is `page_size` consecutive slots from a multiple of `page_size` on. All slots can be
    handed out; an engine that wants a padding page counts it into the size. `alloc` and `free` are
    thread-safe; who owns a slot owns its bytes.
    """

    geometry: PageGeometry
    """Layout, element type and component lengths of a page."""
    layer_num: int
    buffers: tuple[torch.Tensor, ...]
    """Every tensor of the pool, contiguous and on the CPU.

    In the order of a page's parts; for registering memory.
    """
    parts: Sequence[torch.Tensor]
    """What a layer consists of, as in the device pool: K and V, for one. Views of `buffers`."""

    def __init__(
        self,
        shape: PoolGeometry,
        *,
        size: int,
        page_size: int = 1,
        layout: str = "page_first",
        pin_memory: bool = True,
    ) -> None:
        """Allocate the pool.

        Args:
            shape: of the state that it holds.
            size: slots (tokens, or states), a multiple of `page_size`.
            page_size: slots per page; 1 for states.
            layout: one of `shape.layouts`; part of the namespace.
            pin_memory: lock the memory for CUDA copies, where CUDA is available.

        Raises:
            InvalidPoolError: an argument is out of range, or there is not that much memory.
        """
        check_size(size, page_size)
        if layout not in shape.layouts:
            raise InvalidPoolError(
                f"layout must be one of {', '.join(shape.layouts)}; got {layout!r}"
            )
        self.shape = shape
        self.layout = layout
        self.layer_num = shape.layer_num
        parts, order = [*shape.parts(page_size)], shape.ORDERS[layout]
        # Rows and pages that are beside each other are one axis, of slots.
        has_slot_axis = "pr" in order
        # One tensor where that is possible, as in SGLang: its halves are K and V.
        halves = len(parts) > 1 and shape.is_layer_major and parts[0] == parts[1]
        whole = [
            host_tensor(
                (*[2] * halves, *_lengths(order, shape.layer_num, size // page_size, part)),
                part.dtype,
                pin_memory=pin_memory,
            )
            for part in (parts[:1] if halves else parts)
        ]
        axis = order.index("p")
        self.buffers = tuple(
            tensor.flatten(axis + halves, axis + halves + 1) if has_slot_axis else tensor
            for tensor in whole
        )
        self.parts = self.buffers[0].unbind() if halves else self.buffers
        axes = [order.index(letter) for letter in "lpr"]
        views = [
            tensor.movedim(axes, (0, 1, 2))
            for tensor in (whole[0].unbind() if halves else whole)
            # A part without elements has no rows.
            if tensor.numel()
        ]
        self._layers = list(zip(*(view.unbind() for view in views), strict=True))
        columns = self._columns(shape)
        slot_bytes = [column.numel() * column.element_size() // size for column in columns]
        # Made once: a view takes longer than its slices, which every call takes of it.
        self._views = [
            (byte_view(column), length, length * page_size)
            for column, length in zip(columns, slot_bytes, strict=True)
        ]
        head_num, head_rows = getattr(shape, "head_num", 0), shape.head_rows(layout, page_size)
        self.geometry = PageGeometry(
            layout,
            shape.element_type,
            page_size,
            size,
            tuple(length * page_size for length in slot_bytes),
            head_num,
            (head_rows,) * len(slot_bytes) if head_num else (),
        )
        super().__init__(size, page_size)

    def _columns(self, shape: PoolGeometry) -> list[torch.Tensor]:
        """One contiguous tensor for each component of a page, in the engine's pointer order.

        It holds that component of all pages and nothing else.
        """
        # SGLang drops a temporal state of 0 elements from a page as well, so that components agree.
        filled = [part for part in self.parts if part.numel()]
        if self.layout != "layer_first":
            return filled
        layers = [part.unbind() for part in filled]
        # K and V of each layer in turn, as SGLang orders its pointers.
        turns = zip(*layers, strict=True) if shape.is_layer_major else layers
        return [column for turn in turns for column in turn]

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """A layer's share of all pages: one view (pages, rows per page, ...) for each part."""
        return self._layers[layer]

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Return the components of pages as writable views of the pool's memory.

        Pages are given by their first slots.

        The slots are not checked. A view keeps the memory alive.
        """
        columns = [
            [view[slot * slot_bytes : slot * slot_bytes + length] for slot in first_slots]
            for view, slot_bytes, length in self._views
        ]
        return list(map(list, zip(*columns, strict=True)))


def _lengths(order: str, layers: int, pages: int, part: Part) -> list[int]:
    """Shape of a host tensor whose axes are in some order."""
    lengths = {"l": layers, "p": pages, "r": part.rows, "h": part.shape[0]}
    rest = part.shape[1:] if "h" in order else part.shape
    return [*(lengths[letter] for letter in order), *rest]
