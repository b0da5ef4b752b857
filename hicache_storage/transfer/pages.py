"""Pages as copies see them: layer by layer, in the shape that a kernel reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from hicache_storage.spec import InvalidPoolError, InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class LayeredPages(Protocol):
    """Memory whose pages can be copied one layer at a time, on the device or on the host."""

    @property
    def page_size(self) -> int:
        """Slots per page."""
        ...

    @property
    def layer_num(self) -> int: ...

    def page_layer(self, first_slot: int, layer: int) -> Sequence[torch.Tensor]:
        """A layer's share of a page, as views of the memory: one tensor (slots, ...) for each kind of row, K before V."""
        ...


class DevicePages:
    """Pages of a device pool that keeps each layer in tensors of its own, as kernels want them.

    Args:
        layers: for each layer its tensors (slots, ...): K and V, or one of latent rows.
        page_size: slots per page.

    Raises:
        InvalidPoolError: the tensors differ in their number of slots, or it is not a whole number of pages.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], page_size: int) -> None:
        slots = {tensor.shape[0] for tensors in layers for tensor in tensors}
        if len(slots) != 1 or min(slots) % page_size:
            raise InvalidPoolError(
                f"every tensor must have the same number of slots, a multiple of {page_size}; got {sorted(slots)}"
            )
        self.layers = [tuple(tensors) for tensors in layers]
        self.page_size = page_size
        self.size = slots.pop()
        """Slots in the pool."""

    @property
    def layer_num(self) -> int:
        return len(self.layers)

    def page_layer(self, first_slot: int, layer: int) -> list[torch.Tensor]:
        return [tensor[first_slot : first_slot + self.page_size] for tensor in self.layers[layer]]


class HostPages:
    """Pages of one of the SDK's attention host pools, in any of its layouts.

    Args:
        pool: an `MHAHostPool` or an `MLAHostPool`.

    Raises:
        InvalidPoolError: it is neither, or has a layout that this does not know.
    """

    def __init__(self, pool: object) -> None:
        from hicache_storage.pools import MHAHostPool, MLAHostPool

        if isinstance(pool, MHAHostPool):
            self._buffers: tuple[torch.Tensor, ...] = (pool.k_buffer, pool.v_buffer)
        elif isinstance(pool, MLAHostPool):
            self._buffers = (pool.kv_buffer,)
        else:
            raise InvalidPoolError(f"copies know the layers of MHAHostPool and MLAHostPool, not of {type(pool).__name__}")
        if pool.layout not in ("layer_first", "page_first", "page_first_direct", "page_head"):
            raise InvalidPoolError(f"copies do not know the layout {pool.layout!r}")
        self.page_size, self.layer_num, self._layout = pool.page_size, pool.layer_num, pool.layout

    def page_layer(self, first_slot: int, layer: int) -> list[torch.Tensor]:
        slots, page = slice(first_slot, first_slot + self.page_size), first_slot // self.page_size
        match self._layout:
            case "layer_first":
                return [buffer[layer, slots] for buffer in self._buffers]
            case "page_first":
                return [buffer[slots, layer] for buffer in self._buffers]
            case "page_first_direct":
                return [buffer[page, layer] for buffer in self._buffers]
            case _:
                return [buffer[page, :, :, layer].transpose(0, 1) for buffer in self._buffers]


def first_slots(indices: torch.Tensor, page_size: int) -> list[int]:
    """The first slot of each page in `indices`: int64, whole pages of consecutive slots.

    Raises:
        InvalidTransferError: they are not whole pages.
    """
    slots = cast("list[int]", indices.tolist())
    starts = slots[::page_size]
    if slots != [start + offset for start in starts for offset in range(page_size)] or any(start % page_size for start in starts):
        raise InvalidTransferError(f"indices must be whole pages of {page_size} consecutive slots, got {slots[:8]}...")
    return starts
