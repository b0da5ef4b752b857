"""Host pools that a driver's own tests rarely cover."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.harness.pools import EngineHostPool, GuardedPool
from hicache_storage.pools import (
    AttentionGeometry,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
    PagedHostPool,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.spec import HostPool

PAGES, PAGE_SIZE = 8, 2


class ReadOnlyPool(GuardedPool):
    """Lends views that cannot be written."""

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return [[view.toreadonly() for view in page] for page in super().page_buffers(first_slots)]


class StridedPool(GuardedPool):
    """Lends every second byte of its memory, so that no view is contiguous."""

    def __init__(self) -> None:
        super().__init__(components=(64, 64))
        self._stored = self.geometry.component_bytes
        self.geometry = replace(self.geometry, component_bytes=(32, 32))
        self.page_bytes = self.geometry.page_bytes

    def read(self, page: int) -> bytes:
        return b"".join(view.tobytes() for view in self._page(page))

    def _page(self, page: int) -> list[memoryview]:
        return [view[::2] for view in self.components_at(page, self._stored)]


class WrongLengthPool(GuardedPool):
    """Lends views one byte shorter than its geometry says."""

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return [[view[:-1] for view in page] for page in super().page_buffers(first_slots)]


class FailingPool(EngineHostPool):
    """An engine's pool that raises while `fails` is set.

    So does one on a device when a kernel before has failed.
    """

    fails = False

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        self._check()
        return super().get_data_page(index, flat)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self._check()
        super().set_from_flat_data_page(index, data_page)

    def _check(self) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def sdk_pool(kind: str, layout: str) -> HostPool:
    """A pool of the SDK, by the names in `SDK_POOLS`."""
    import torch

    common: Any = {"layout": layout, "pin_memory": False}
    paged: Any = {"size": PAGES * PAGE_SIZE, "page_size": PAGE_SIZE, **common}
    heads: Any = {"layers": range(3), "head_num": 2, "head_dim": 8}
    match kind:
        case "mha":
            return PagedHostPool(AttentionGeometry(**heads, dtype=torch.bfloat16), **paged)
        case "mha-uneven-heads":
            uneven = AttentionGeometry(**heads, v_head_dim=5, dtype=torch.uint8)
            return PagedHostPool(uneven, **paged)
        case "mla":
            rows = MLAGeometry(layers=range(3), kv_lora_rank=36, dtype=torch.bfloat16)
            return PagedHostPool(rows, **paged)
        case "mamba":
            states = MambaGeometry(
                layers=range(2),
                temporal_shape=(3, 4),
                conv_shapes=((5, 3), (7,)),
                temporal_dtype=torch.float32,
                conv_dtype=torch.bfloat16,
            )
            return PagedHostPool(states, size=PAGES, **common)
        case _:
            return PagedHostPool(IndexerGeometry(layers=range(2)), **paged)


SDK_POOLS: Final = [
    ("mha-uneven-heads", "layer_first"),
    *(
        (kind, layout)
        for kind, shape in (
            ("mha", AttentionGeometry),
            ("mla", MLAGeometry),
            ("mamba", MambaGeometry),
            ("indexer", IndexerGeometry),
        )
        for layout in shape.ORDERS
    ),
]
"""Kinds and layouts."""
