"""Pages as copies see them: layer by layer, in the shape that a kernel reads and writes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol, cast

from hicache_storage.pools.device.pages import DevicePages
from hicache_storage.spec import InvalidPoolError, InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = [
    "DevicePages",
    "HostPages",
    "LaidOutPages",
    "LayeredPages",
    "check_pages",
    "first_slots",
    "page_numbers",
]

NAMED_SLOTS: Final = 8
"""How many slots an error message names."""


class LayeredPages(Protocol):
    """Memory whose pages can be copied one layer at a time, on the device or on the host."""

    @property
    def page_size(self) -> int:
        """Slots per page."""
        ...

    @property
    def page_num(self) -> int:
        """Pages in the pool."""
        ...

    @property
    def layer_num(self) -> int: ...

    def layer(self, layer: int) -> Sequence[torch.Tensor]:
        """A layer's share of all pages: one view (pages, rows per page, ...) for each part.

        K before V.
        """
        ...

    def page_layer(self, first_slot: int, layer: int) -> Sequence[torch.Tensor]:
        """A layer's share of one page: one view (rows per page, ...) for each part, K before V."""
        ...


# For each layout: the axes of slots, which are split into pages and rows where pages are not an
# axis already, and of layers; then the axes, split, in the order layer, page, row.
_AXES = {
    "layer_first": (1, 0, (0, 1, 2)),
    "page_first": (0, 1, (2, 0, 1)),
    "page_first_direct": (0, 1, (1, 0, 2)),
    "page_head": (0, 3, (3, 0, 2, 1)),
}
_SPLIT = ("layer_first", "page_first")


class LaidOutPages:
    """Pages that lie in a few buffers, one for each part, in the layout of a host pool.

    On any device.

    Args:
        buffers: each part's memory, contiguous.
        layout: one of `layer_first`, `page_first`, `page_first_direct`, `page_head`, as
            `MHAHostPool` describes them.
        page_size: slots per page.
        rows_per_page: rows of a page in one layer, where they are not its slots.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], layout: str, page_size: int, rows_per_page: int
    ) -> None:
        self.page_size = page_size
        self._buffers = tuple(buffers)
        self._layout = layout
        self._rows = rows_per_page
        page_axis, layer_axis, order = _AXES[layout]
        self._page_axis = page_axis
        self._layer_axis = layer_axis
        self._steps = rows_per_page if layout in _SPLIT else 1
        self.layer_num = self._buffers[0].shape[self._layer_axis]
        self.page_num = self._buffers[0].shape[self._page_axis] // self._steps
        split = [self._split(buffer) for buffer in self._buffers]
        views = [buffer.permute(*order, *range(len(order), buffer.dim())) for buffer in split]
        self._layers = list(zip(*(view.unbind() for view in views), strict=True))
        self.parts = [view.transpose(0, 1) for view in views]
        """Whole pages: for each part one view (pages, layers, rows per page, ...)."""

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._layers[layer]

    def page_layer(self, first_slot: int, layer: int) -> list[torch.Tensor]:
        return [part[first_slot // self.page_size] for part in self._layers[layer]]

    def whole(self, first_page: int, pages: int) -> list[torch.Tensor]:
        """Adjacent pages with all their layers, one view of the memory for each part."""
        return [
            buffer.narrow(self._page_axis, first_page * self._steps, pages * self._steps)
            for buffer in self._buffers
        ]

    def alike(
        self, pages: int, layers: int, allocate: Callable[[int], torch.Tensor]
    ) -> LaidOutPages:
        """Other memory in the same layout, for fewer pages or layers.

        Args:
            allocate: makes a contiguous tensor of so many bytes.
        """
        buffers: list[torch.Tensor] = []
        for buffer in self._buffers:
            shape = list(buffer.shape)
            shape[self._page_axis] = pages * self._steps
            shape[self._layer_axis] = layers
            buffers.append(
                allocate(math.prod(shape) * buffer.element_size()).view(buffer.dtype).view(shape)
            )
        return LaidOutPages(buffers, self._layout, self.page_size, self._rows)

    def seen_by(self, mapped: Callable[[torch.Tensor], torch.Tensor]) -> LaidOutPages:
        """The same pages in other views of their memory: `mapped` makes one of each buffer."""
        return LaidOutPages(
            [mapped(buffer) for buffer in self._buffers], self._layout, self.page_size, self._rows
        )

    def _split(self, buffer: torch.Tensor) -> torch.Tensor:
        if self._layout not in _SPLIT:
            return buffer
        # `view` and not `reshape`: a copy in its place would never reach the pool.
        return buffer.view(
            *buffer.shape[: self._page_axis], -1, self._rows, *buffer.shape[self._page_axis + 1 :]
        )


class HostPages(LaidOutPages):
    """Pages of one of the SDK's host pools, in any of its layouts.

    Args:
        pool: an `MHAHostPool`, `MLAHostPool`, `MambaHostPool` or `IndexerHostPool`.

    Raises:
        InvalidPoolError: the pool is of another kind, or its layout is unknown.
    """

    def __init__(self, pool: object) -> None:
        from hicache_storage.pools import IndexerHostPool, MambaHostPool, MHAHostPool, MLAHostPool

        layout = getattr(pool, "layout", None)
        buffers: Sequence[torch.Tensor]
        if isinstance(pool, MHAHostPool):
            buffers, rows = (pool.k_buffer, pool.v_buffer), pool.page_size
        elif isinstance(pool, MLAHostPool):
            buffers, rows = (pool.kv_buffer,), pool.page_size
        elif isinstance(pool, MambaHostPool | IndexerHostPool):
            # A layer of a page is one row there, so that both page-first layouts are the same.
            layout = "page_first_direct" if layout == "page_first" else layout
            buffers, rows = tuple(buffer for buffer in pool.buffers if buffer.numel()), 1
        else:
            known = "MHAHostPool, MLAHostPool, MambaHostPool and IndexerHostPool"
            raise InvalidPoolError(
                f"copies know the layers of {known}, not of {type(pool).__name__}"
            )
        if layout not in _AXES:
            raise InvalidPoolError(f"copies do not know the layout {layout!r}")
        super().__init__(buffers, layout, pool.page_size, rows)


def page_numbers(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    """The number of each page in `indices`, int64 on the CPU: whole pages of consecutive slots.

    Indices on the device make the caller wait for its current stream.

    Raises:
        InvalidTransferError: they are not int64, or not whole pages.
    """
    import torch

    if indices.dtype != torch.int64:
        raise InvalidTransferError(f"indices must be int64, got {indices.dtype}")
    slots = indices.reshape(-1).to("cpu")
    if slots.numel() % page_size == 0:
        pages = slots.view(-1, page_size)
        # The whole page is checked below, as copies take all its slots from the first one.
        numbers = pages[:, 0] // page_size
        if bool(((pages[:, 0] % page_size) == 0).all()) and bool((pages.diff(dim=1) == 1).all()):
            return numbers
    named = ", ".join(str(slot) for slot in cast("list[object]", slots[:NAMED_SLOTS].tolist()))
    raise InvalidTransferError(
        f"indices must be whole pages of {page_size} consecutive slots, got {named}, ..."
    )


def first_slots(indices: torch.Tensor, page_size: int) -> list[int]:
    """The first slot of each page in `indices`: int64, whole pages of consecutive slots.

    Raises:
        InvalidTransferError: they are not whole pages.
    """
    return cast("list[int]", (page_numbers(indices, page_size) * page_size).tolist())


def check_pages(device: LayeredPages, host: LayeredPages) -> None:
    """Refuse two pools whose pages are not made of the same rows.

    Raises:
        InvalidPoolError: the message names the field in which they differ.
    """
    for field in ("page_size", "layer_num"):
        _check_equal(field, getattr(device, field), getattr(host, field))
    for layer in range(device.layer_num):
        rows = [
            [(str(part.dtype), tuple(part.shape[1:])) for part in pages.layer(layer)]
            for pages in (device, host)
        ]
        _check_equal(f"element type and shape of the rows of layer {layer}", *rows)


def _check_equal(field: str, device: object, host: object) -> None:
    if device != host:
        raise InvalidPoolError(
            f"device and host pages differ in {field}: {device} and {host}; make them equal"
        )
