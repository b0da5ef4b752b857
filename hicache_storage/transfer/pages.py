"""Pages as copies see them: layer by layer, in the shape that a kernel reads and writes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, cast

from hicache_storage.pools.device.pages import DevicePages
from hicache_storage.spec import InvalidPoolError, InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["DevicePages", "HostPages", "LayeredPages", "check_pages", "page_numbers"]

NAMED_SLOTS: Final = 8
"""How many slots an error message names."""


# For each layout: the axes of slots, which are split into pages and rows where pages are not an
# axis already, and of layers; then the axes, split, in the order layer, page, row.
_AXES = {
    "layer_first": (1, 0, (0, 1, 2)),
    "page_first": (0, 1, (2, 0, 1)),
    "page_first_direct": (0, 1, (1, 0, 2)),
    "page_head": (0, 3, (3, 0, 2, 1)),
}
_SPLIT = ("layer_first", "page_first")


class HostPages:
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
        self.page_size = pool.page_size
        axis, layer_axis, order = _AXES[layout]
        views: list[torch.Tensor] = []
        for buffer in buffers:
            if layout in _SPLIT:
                # `view` and not `reshape`: a copy in its place would never reach the pool.
                buffer = buffer.view(*buffer.shape[:axis], -1, rows, *buffer.shape[axis + 1 :])
            views.append(buffer.permute(*order, *range(len(order), buffer.dim())))
        self.layer_num = buffers[0].shape[layer_axis]
        self.page_num = views[0].shape[1]
        self._layers = list(zip(*(view.unbind() for view in views), strict=True))

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """A layer's share of all pages: one view (pages, rows per page, ...) for each part."""
        return self._layers[layer]

    def page_layer(self, first_slot: int, layer: int) -> list[torch.Tensor]:
        """A layer's share of one page: one view (rows per page, ...) for each part, K before V."""
        return [part[first_slot // self.page_size] for part in self._layers[layer]]


LayeredPages = DevicePages | HostPages
"""Memory whose pages can be copied one layer at a time, on the device or on the host."""


def page_numbers(sides: Sequence[torch.Tensor], page_size: int) -> torch.Tensor:
    """The number of each page in indices of several sides: (sides, pages), int64 on the CPU.

    Indices on the device make the caller wait for its current stream.

    Args:
        sides: as many indices each, in whole pages of consecutive slots.

    Raises:
        InvalidTransferError: they are not int64, or not whole pages.
    """
    import torch

    flat: list[torch.Tensor] = []
    for indices in sides:
        if indices.dtype != torch.int64:
            raise InvalidTransferError(f"indices must be int64, got {indices.dtype}")
        slots = indices if indices.dim() == 1 and indices.is_cpu else indices.reshape(-1).cpu()
        if slots.numel() % page_size:
            raise _not_whole(slots, page_size)
        flat.append(slots)
    numbers = torch.stack([slots[::page_size] for slots in flat])
    if page_size == 1:
        return numbers
    numbers.div_(page_size, rounding_mode="floor")
    weights, of_page, of_offsets = _weights(page_size)
    # All slots of a page are compared, as copies take them from the first one.
    expected = numbers * of_page + of_offsets
    for slots, sums in zip(flat, expected, strict=True):
        pages = slots.view(-1, page_size)
        found = pages @ weights
        if not found.equal(sums):
            raise _not_whole(pages[found != sums][0], page_size)
    return numbers


def _not_whole(slots: torch.Tensor, page_size: int) -> InvalidTransferError:
    named = ", ".join(str(slot) for slot in cast("list[object]", slots[:NAMED_SLOTS].tolist()))
    return InvalidTransferError(
        f"indices must be whole pages of {page_size} consecutive slots, got {named}, ..."
    )


@functools.cache
def _weights(page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of a page's slots, and what a page's number and offsets are multiplied by.

    One product a page in the place of a comparison a slot, which takes four times as long. Weights
    are odd and far apart: another slot, or two in the other's place, change the sum modulo 2**64.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(1 << 62, (page_size,), generator=generator) | 1
    return weights, weights.sum() * page_size, (weights * torch.arange(page_size)).sum()


def check_pages(device: LayeredPages, host: LayeredPages) -> None:
    """Refuse two pools whose pages are not made of the same rows.

    Raises:
        InvalidPoolError: the message names the field in which they differ.
    """
    sides = device, host
    compared: dict[str, list[object]] = {
        "page_size": [pages.page_size for pages in sides],
        "layer_num": [pages.layer_num for pages in sides],
    }
    for layer in range(min(pages.layer_num for pages in sides)):
        compared[f"element type and shape of the rows of layer {layer}"] = [
            [(str(part.dtype), tuple(part.shape[1:])) for part in pages.layer(layer)]
            for pages in sides
        ]
    for field, (on_device, on_host) in compared.items():
        if on_device != on_host:
            raise InvalidPoolError(
                f"device and host pages differ in {field}: {on_device} and {on_host}; make them "
                "equal"
            )
