"""Base class of the SDK's host pools.

It has geometry, slots, and pages as buffers, pointers or tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hicache_storage.pools.arguments import check_size
from hicache_storage.pools.host.slots import SlotAllocator
from hicache_storage.pools.memory import byte_view
from hicache_storage.spec import InvalidPoolError, InvalidTransferError, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence


_AXES = {
    "layer_first": (0, 1, 2),
    "page_first": (2, 0, 1),
    "page_first_direct": (1, 0, 2),
    "page_head": (3, 0, 2),
}
"""By layout the axes of layers, pages and rows, where an axis of slots is split into the latter."""


class HostPoolBase:
    """A pool in host memory whose pages can be lent as they lie.

    To be used through one of its subclasses.

    A page is `page_size` consecutive slots from a multiple of `page_size` on. All slots can be
    handed out; an engine that wants a padding page counts it into the size. `alloc` and `free` are
    thread-safe; who owns a slot owns its bytes.
    """

    geometry: PageGeometry
    """Layout, element type and component lengths of a page."""
    layout: str
    page_size: int
    """Slots per page."""
    size: int
    """Slots in the pool."""
    page_num: int
    """Pages in the pool."""
    layer_num: int
    size_per_token: int
    """Bytes per slot, all layers together."""
    buffers: tuple[torch.Tensor, ...]
    """Every tensor of the pool, contiguous and on the CPU.

    In the order of a page's parts; for registering memory.
    """
    flat_dtype: torch.dtype
    """Element type of flat pages."""

    def __init__(
        self,
        *,
        layout: str,
        dtype: str,
        size: int,
        page_size: int,
        buffers: Sequence[torch.Tensor],
        page_axis: int,
        rows_per_page: int,
        columns: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        has_row_axis: bool,
        flat_dtype: torch.dtype,
        head_num: int = 0,
        head_rows: int = 0,
    ) -> None:
        """Describe a pool by its memory.

        Args:
            layout: name of the layout, part of the namespace.
            dtype: name of the element type or types, part of the namespace.
            size: slots in the pool, a multiple of `page_size`.
            page_size: slots per page.
            buffers: the pool's tensors; a flat page is their parts one after the other.
            page_axis: the axis of every buffer along which pages follow each other.
            rows_per_page: how many steps along that axis are a page.
            columns: one contiguous tensor for each component of a page, in the engine's pointer
                order; it holds that component of all pages and nothing else.
            parts: what a layer consists of, as in the device pool: K and V, for one.
            has_row_axis: the rows of a page are an axis of their own, behind those of pages and
                layers or heads; otherwise they follow each other along the axis of slots.
            flat_dtype: element type of flat pages.
            head_num: KV heads in a page; 0 for a pool without.
            head_rows: rows of heads in each component of a page.
        """
        check_size(size, page_size)
        self.layout = layout
        self.size = size
        self.page_size = page_size
        self.page_num = size // page_size
        self.buffers = tuple(buffers)
        self.flat_dtype = flat_dtype
        split = 1 if layout == "layer_first" else 0
        axes = _AXES["page_first_direct" if has_row_axis and layout == "page_first" else layout]
        views: list[torch.Tensor] = []
        for part in parts:
            if part.numel() and not has_row_axis:
                # `view` and not `reshape`: a copy in its place would never reach the pool.
                part = part.view(*part.shape[:split], -1, rows_per_page, *part.shape[split + 1 :])
            if part.numel():
                views.append(part.movedim(axes, (0, 1, 2)))
        self._layers = list(zip(*(view.unbind() for view in views), strict=True))
        self._page_axis = page_axis
        self._rows_per_page = rows_per_page
        # SGLang drops a temporal state of 0 elements from a page as well, so that components agree.
        filled = [column for column in columns if column.numel()]
        if not filled:
            raise InvalidPoolError("a page has no bytes; pass at least one shape without a zero")
        slot_bytes = [column.numel() * column.element_size() // size for column in filled]
        # Made once: a view takes longer than its slices, which every call takes of it.
        self._views = [
            (byte_view(column), length, length * page_size)
            for column, length in zip(filled, slot_bytes, strict=True)
        ]
        # Components and not buffers: K and V of one tensor are two of them.
        self._pointers = [
            (column.data_ptr(), length) for column, length in zip(filled, slot_bytes, strict=True)
        ]
        self.geometry = PageGeometry(
            layout,
            dtype,
            page_size,
            size,
            tuple(length * page_size for length in slot_bytes),
            head_num,
            (head_rows,) * len(slot_bytes) if head_num else (),
        )
        self.size_per_token = self.geometry.page_bytes // page_size
        self._slots = SlotAllocator(size, page_size)

    def alloc(self, count: int) -> torch.Tensor | None:
        """Take `count` slots, a positive multiple of the page size.

        int64, pages of consecutive slots. None if fewer are free.

        Raises:
            SlotError: `count` is not a positive multiple of the page size.
        """
        return self._slots.alloc(count)

    def free(self, indices: torch.Tensor) -> int:
        """Give back whole pages of slots; returns the number of slots.

        Raises:
            SlotError: a slot is out of range, not in use, given back twice, or without its page;
                nothing was freed.
        """
        return self._slots.free(indices)

    def available_size(self) -> int:
        """Number of free slots."""
        return self._slots.available_size()

    def clear(self) -> None:
        """Take back all slots. Bytes stay as they are."""
        self._slots.clear()

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """A layer's share of all pages: one view (pages, rows per page, ...) for each part."""
        return self._layers[layer]

    def page_layer(self, first_slot: int, layer: int) -> list[torch.Tensor]:
        """A layer's share of one page: one view (rows per page, ...) for each part, K before V."""
        return [part[first_slot // self.page_size] for part in self._layers[layer]]

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

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and lengths of the components of pages, in bytes.

        Page after page of those in `indices`.

        Args:
            indices: int64, `page_size` slots for each page; the first of each says which page it
                is.

        Raises:
            InvalidTransferError: `indices` is not whole pages of this pool.
        """
        if indices.numel() % self.page_size:
            raise InvalidTransferError(
                f"indices must be whole pages of {self.page_size} slots, got {indices.numel()}"
            )
        first_slots = cast("list[int]", indices.reshape(-1)[:: self.page_size].tolist())
        for slot in first_slots:
            self._check_first_slot(slot)
        pointers = [
            address + slot * slot_bytes
            for slot in first_slots
            for address, slot_bytes in self._pointers
        ]
        return pointers, list(self.geometry.component_bytes) * len(first_slots)

    def get_data_page(self, first_slot: int, flat: bool = True) -> torch.Tensor:
        """Copy of a page as a flat tensor, or, with `flat=False`, a view of it in the pool.

        The view has the buffer's axes, with the page's share of the slot or page axis. A pool of
        several buffers has no such view and answers with the flat copy.

        Raises:
            InvalidTransferError: no page begins at `first_slot`.
        """
        parts = self._parts(first_slot)
        # Only a single buffer has a view with a page of its own; several element types cannot be
        # concatenated but as bytes.
        if len(parts) == 1:
            return (
                parts[0].clone(memory_format=torch.contiguous_format).view(-1) if flat else parts[0]
            )
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]).view(
            self.flat_dtype
        )

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A new flat page of zeros.

        It has the length and element type that `set_from_flat_data_page` takes.
        """
        return torch.zeros(self.geometry.page_bytes, dtype=torch.uint8).view(self.flat_dtype)

    def set_from_flat_data_page(self, first_slot: int, data_page: torch.Tensor) -> None:
        """Copy a flat page, as `get_data_page` of the same layout gives it, into the pool.

        Raises:
            InvalidTransferError: no page begins at `first_slot`, or `data_page` has another length
                or element type.
        """
        parts = self._parts(first_slot)
        if (
            data_page.dtype != self.flat_dtype
            or data_page.numel() * data_page.element_size() != self.geometry.page_bytes
        ):
            raise InvalidTransferError(
                f"data_page must have {self.geometry.page_bytes} bytes of {self.flat_dtype}, "
                f"got {data_page.numel()} elements of {data_page.dtype}"
            )
        data = data_page.contiguous().view(-1).view(torch.uint8)
        start = 0
        for part in parts:
            end = start + part.numel() * part.element_size()
            share = data[start:end]
            if share.storage_offset() % part.element_size():
                # It begins where its element type cannot; a copy of it begins at 0.
                share = share.clone()
            part.copy_(share.view(part.dtype).view(part.shape))
            start = end

    def _parts(self, first_slot: int) -> list[torch.Tensor]:
        self._check_first_slot(first_slot)
        start = first_slot // self.page_size * self._rows_per_page
        return [
            buffer.narrow(self._page_axis, start, self._rows_per_page) for buffer in self.buffers
        ]

    def _check_first_slot(self, slot: int) -> None:
        if slot % self.page_size or not 0 <= slot < self.size:
            raise InvalidTransferError(
                f"no page begins at slot {slot}: pages begin at multiples of {self.page_size} in "
                f"[0, {self.size})"
            )
