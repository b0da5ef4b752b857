"""Device pools, on any torch device: layer by layer as kernels want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.pools.access import check_size
from hicache_storage.pools.slots import SlotAllocator
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.pools.host import PagedHostPool
    from hicache_storage.pools.shapes import PoolGeometry


class DevicePages:
    """Pages of memory that keeps each layer in tensors of its own, as copies see them.

    Args:
        layers: for each layer its tensors (slots, ...): K and V, one of latent rows, or the parts
            of a state.
        page_size: slots per page.
        rows_per_page: how many steps along the tensors' first axis are a page; None means
            `page_size`.

    Raises:
        InvalidPoolError: the tensors differ in their number of slots, or it is not a whole number
            of pages.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[torch.Tensor]],
        page_size: int,
        *,
        rows_per_page: int | None = None,
    ) -> None:
        rows = page_size if rows_per_page is None else rows_per_page
        counts = {tensor.shape[0] for tensors in layers for tensor in tensors}
        if len(counts) != 1 or min(counts) % rows:
            raise InvalidPoolError(
                f"every tensor must have the same number of slots, a multiple of {rows}; got "
                f"{sorted(counts)}"
            )
        self.layers = [tuple(tensors) for tensors in layers]
        """Each layer's tensors as they were passed."""
        self.page_size = page_size
        self.page_num = counts.pop() // rows
        """Pages in the pool."""
        self.size = self.page_num * page_size
        """Slots in the pool."""
        self._views = [
            # `view` and not `reshape`: a copy in its place would never reach the pool.
            tuple(tensor.view(-1, rows, *tensor.shape[1:]) for tensor in tensors)
            for tensors in self.layers
        ]

    @property
    def layer_num(self) -> int:
        return len(self.layers)

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """A layer's share of all pages: one view (pages, rows per page, ...) for each part."""
        return self._views[layer]

    def check_host_pool(self, pool: PagedHostPool) -> None:
        """Refuse a host pool whose pages are not made of the same rows.

        Raises:
            InvalidPoolError: the message names the field in which it differs.
        """
        sides = self, pool
        compared: dict[str, list[object]] = {
            "page_size": [pages.page_size for pages in sides],
            "layer_num": [pages.layer_num for pages in sides],
        }
        for layer in range(min(pages.layer_num for pages in sides)):
            compared[f"element type and shape of the rows of layer {layer}"] = [
                [(str(part.dtype), tuple(part.shape[1:])) for part in pages.layer(layer)]
                for pages in sides
            ]
        for field, (here, there) in compared.items():
            if here != there:
                raise InvalidPoolError(
                    f"{field} is {there} in the host pool and {here} in the device pages; make "
                    "them equal"
                )


class DevicePool(DevicePages, SlotAllocator):
    """A pool in device memory whose slots are handed out in pages.

    A page is `page_size` consecutive slots from a multiple of `page_size` on. All slots can be
    handed out; an engine that wants a padding page counts it into the size. `alloc` and `free` are
    thread-safe. They know nothing of copies: a page that was freed may be handed out while a copy
    reads it, so that code which overwrites a page first calls `before_overwrite` of the transfer
    engine.

    Layers are counted in the pool; `shape.layers` has a hybrid model's own numbers.
    """

    parts: list[torch.Tensor]
    """What a layer consists of, all layers (layers, slots, ...) together, as the shape has it.

    A part may have no elements; it is never copied.
    """

    def __init__(
        self,
        shape: PoolGeometry,
        *,
        size: int,
        page_size: int = 1,
        device: torch.device | str = "cuda",
    ) -> None:
        """Allocate the pool.

        Args:
            shape: of the state that it holds.
            size: slots (tokens, or states), a multiple of `page_size`.
            page_size: slots per page; 1 for states.
            device: where.

        Raises:
            InvalidPoolError: an argument is out of range, or there is not that much memory.
        """
        check_size(size, page_size)
        self.shape = shape
        self.device = torch.device(device)
        parts = shape.parts(page_size)
        rows = [size // page_size * part.rows for part in parts]
        try:
            # Unwritten slots must not be NaN to a kernel that reads whole pages.
            self.parts = [
                torch.zeros(
                    (shape.layer_num, count, *part.shape), dtype=part.dtype, device=self.device
                )
                for count, part in zip(rows, parts, strict=True)
            ]
        except RuntimeError as error:
            size_bytes = size // page_size * shape.page_bytes(page_size)
            raise InvalidPoolError(
                f"cannot allocate {size_bytes} bytes on {device} ({error}); pass a smaller size"
            ) from error
        if self.device.type == "cuda":
            # The zeros come on the current stream, which no stream of a model or a copy waits for.
            torch.cuda.current_stream(self.device).synchronize()
        # A part without elements has no rows that could be copied.
        filled = [part.unbind() for part in self.parts if part.numel()]
        layers = list(zip(*filled, strict=True))
        DevicePages.__init__(self, layers, page_size, rows_per_page=parts[0].rows)
        SlotAllocator.__init__(self, size, page_size)
