"""Pages of device memory as copies see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.pools.host.base import HostPoolBase


class DevicePages:
    """Pages of memory that keeps each layer in tensors of its own, as kernels want them.

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
        self._pages = [
            # `view` and not `reshape`: a copy in its place would never reach the pool.
            tuple(tensor.view(-1, rows, *tensor.shape[1:]) for tensor in tensors)
            for tensors in self.layers
        ]

    @property
    def layer_num(self) -> int:
        return len(self.layers)

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """A layer's share of all pages: one view (pages, rows per page, ...) for each part."""
        return self._pages[layer]

    def page_layer(self, first_slot: int, layer: int) -> list[torch.Tensor]:
        """A layer's share of one page: one view (rows per page, ...) for each part."""
        return [part[first_slot // self.page_size] for part in self._pages[layer]]

    def check_host_pool(self, pool: HostPoolBase) -> None:
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
