"""Every pool of the SDK in every layout, with what its documentation says about the bytes of a
page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from hicache_storage.pools import (
    AttentionGeometry,
    HostPoolBase,
    IndexerGeometry,
    IndexerHostPool,
    MambaGeometry,
    MambaHostPool,
    MHAHostPool,
    MLAGeometry,
    MLAHostPool,
)

PAGES, P, L, H, D, DV = 5, 4, 3, 2, 6, 10
S = PAGES * P
STRIDE = P * (32 + 32 // 16 * 4)
TEMPORAL, CONVS = (2, 3), ((5,), (3, 2))
Parts = Callable[[HostPoolBase, int], list[torch.Tensor]]


@dataclass(frozen=True)
class PoolCase:
    name: str
    build: Callable[[], HostPoolBase]
    shapes: dict[str, tuple[int, ...] | list[tuple[int, ...]]]
    """Shape of each public buffer."""
    components: Parts
    """The components of the page that begins at a slot, by the documented axes."""
    flat: Parts
    """The parts of the flat page."""
    viewable: bool = True
    """Whether `get_data_page(flat=False)` is a view."""


def mha_shape(layout: str, dim: int) -> tuple[int, ...]:
    return {
        "layer_first": (L, S, H, dim),
        "page_first": (S, L, H, dim),
        "page_first_direct": (PAGES, L, P, H, dim),
        "page_head": (PAGES, H, P, L, dim),
    }[layout]


def mha_case(layout: str, v_dim: int | None, dtype: torch.dtype) -> PoolCase:
    def build() -> MHAHostPool:
        return MHAHostPool(
            AttentionGeometry(
                layers=range(L), head_num=H, head_dim=D, v_head_dim=v_dim, dtype=dtype
            ),
            size=S,
            page_size=P,
            layout=layout,
        )

    def halves(pool: MHAHostPool, slot: int) -> list[torch.Tensor]:
        buffers = (pool.k_buffer, pool.v_buffer)
        if layout == "layer_first":
            return [buffer[:, slot : slot + P] for buffer in buffers]
        if layout == "page_first":
            return [buffer[slot : slot + P] for buffer in buffers]
        return [buffer[slot // P] for buffer in buffers]

    def components(pool: MHAHostPool, slot: int) -> list[torch.Tensor]:
        k, v = halves(pool, slot)
        return (
            [half[layer] for layer in range(L) for half in (k, v)]
            if layout == "layer_first"
            else [k, v]
        )

    shapes = {"k_buffer": mha_shape(layout, D), "v_buffer": mha_shape(layout, v_dim or D)}
    name = f"mha-{layout}-{'asymmetric' if v_dim else 'symmetric'}"
    return PoolCase(name, build, shapes, components, halves, viewable=v_dim is None)


def mla_case(layout: str, dtype: torch.dtype) -> PoolCase:
    def build() -> MLAHostPool:
        return MLAHostPool(
            MLAGeometry(layers=range(L), kv_lora_rank=D, dtype=dtype),
            size=S,
            page_size=P,
            layout=layout,
        )

    def components(pool: MLAHostPool, slot: int) -> list[torch.Tensor]:
        if layout == "layer_first":
            return [pool.kv_buffer[layer, slot : slot + P] for layer in range(L)]
        return [
            pool.kv_buffer[slot : slot + P] if layout == "page_first" else pool.kv_buffer[slot // P]
        ]

    shape = {
        "layer_first": (L, S, 1, D),
        "page_first": (S, L, 1, D),
        "page_first_direct": (PAGES, L, P, 1, D),
    }[layout]
    return PoolCase(f"mla-{layout}", build, {"kv_buffer": shape}, components, components)


def mamba_case(layout: str, temporal: tuple[int, ...]) -> PoolCase:
    def build() -> MambaHostPool:
        return MambaHostPool(
            MambaGeometry(
                layers=range(L),
                temporal_shape=temporal,
                conv_shapes=CONVS,
                temporal_dtype=torch.float32,
                conv_dtype=torch.bfloat16,
            ),
            size=S,
            layout=layout,
        )

    def components(pool: MambaHostPool, slot: int) -> list[torch.Tensor]:
        states = [state for state in (pool.temporal_buffer, *pool.conv_buffers) if state.numel()]
        if layout == "layer_first":
            return [state[layer, slot] for state in states for layer in range(L)]
        return [state[slot] for state in states]

    leading = (L, S) if layout == "layer_first" else (S, L, 1)
    shapes: dict[str, tuple[int, ...] | list[tuple[int, ...]]] = {
        "temporal_buffer": (*leading, *temporal),
        "conv_buffers": [(*leading, *shape) for shape in CONVS],
    }
    name = f"mamba-{layout}{'' if 0 not in temporal else '-conv_only'}"
    return PoolCase(name, build, shapes, components, components, viewable=False)


def indexer_case(layout: str) -> PoolCase:
    def build() -> IndexerHostPool:
        return IndexerHostPool(
            IndexerGeometry(layers=range(L), index_head_dim=32, quant_block_size=16),
            size=S,
            page_size=P,
            layout=layout,
        )

    def components(pool: IndexerHostPool, slot: int) -> list[torch.Tensor]:
        page = slot // P
        if layout == "layer_first":
            return [pool.index_buffer[layer, page] for layer in range(L)]
        return [pool.index_buffer[page]]

    shape = (L, PAGES, STRIDE) if layout == "layer_first" else (PAGES, L, 1, STRIDE)
    return PoolCase(f"indexer-{layout}", build, {"index_buffer": shape}, components, components)


CASES = [
    *(
        mha_case(layout, v_dim, torch.bfloat16)
        for layout in MHAHostPool.LAYOUTS
        for v_dim in (None, DV)
    ),
    *(mla_case(layout, torch.float8_e4m3fn) for layout in MLAHostPool.LAYOUTS),
    *(
        mamba_case(layout, temporal)
        for layout in MambaHostPool.LAYOUTS
        for temporal in (TEMPORAL, (0, 3))
    ),
    *(indexer_case(layout) for layout in IndexerHostPool.LAYOUTS),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> PoolCase:
    return request.param


@pytest.fixture
def pool(case: PoolCase) -> HostPoolBase:
    """The case's pool, full of random bytes."""
    pool = case.build()
    generator = torch.Generator().manual_seed(7)
    for buffer in pool.buffers:
        size = buffer.numel() * buffer.element_size()
        buffer.view(-1).view(torch.uint8).copy_(
            torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        )
    return pool
