"""Geometry of each kind of state; it makes the device pool and the host pool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hicache_storage.pools import (
    IndexerDevicePool,
    IndexerHostPool,
    MambaDevicePool,
    MambaHostPool,
    MHADevicePool,
    MHAHostPool,
    MLADevicePool,
    MLAHostPool,
)
from hicache_storage.pools.arguments import (
    check_counts,
    check_quantization,
    check_state_shapes,
    dtype_name,
    index_page_bytes,
)
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.pools import DevicePoolBase, HostPoolBase


class PoolGeometry(Protocol):
    """One kind of state, and the layers of the model that have it."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model, counted from the rank's first layer, ascending."""
        ...

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that the host pool supports."""
        ...

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page of so many slots, all layers together."""
        ...

    def device_pool(self, size: int, page_size: int, device: torch.device) -> DevicePoolBase:
        """Make a device pool of so many slots."""
        ...

    def host_pool(
        self, size: int, page_size: int, layout: str, *, pin_memory: bool
    ) -> HostPoolBase:
        """Make a host pool of so many slots."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGeometry:
    """Multi-head attention and its grouped-query and multi-query kinds.

    Raises:
        InvalidPoolError: a field is out of range; the message names it.
    """

    layers: tuple[int, ...]
    """Counted from the rank's first layer on, ascending; so for all geometries."""
    head_num: int
    """KV heads held by this rank."""
    head_dim: int
    """Elements per head of K."""
    dtype: torch.dtype
    v_head_dim: int | None = None
    """Elements per head of V; None means as many as K."""
    replicated: bool = False
    """Whether all TP ranks hold the same heads, as with a single one; then one of them writes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        check_counts(head_num=self.head_num, head_dim=self.head_dim, v_head_dim=self._v_head_dim)
        dtype_name(self.dtype)

    @property
    def layouts(self) -> tuple[str, ...]:
        return MHAHostPool.LAYOUTS

    def page_bytes(self, page_size: int) -> int:
        row = self.head_num * (self.head_dim + self._v_head_dim) * self.dtype.itemsize
        return page_size * len(self.layers) * row

    def device_pool(self, size: int, page_size: int, device: torch.device) -> MHADevicePool:
        return MHADevicePool(
            size=size,
            page_size=page_size,
            layer_num=len(self.layers),
            head_num=self.head_num,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.dtype,
            device=device,
        )

    def host_pool(self, size: int, page_size: int, layout: str, *, pin_memory: bool) -> MHAHostPool:
        return MHAHostPool(
            size=size,
            page_size=page_size,
            layer_num=len(self.layers),
            head_num=self.head_num,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.dtype,
            layout=layout,
            pin_memory=pin_memory,
        )

    @property
    def _v_head_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAGeometry:
    """Multi-head latent attention: a row per token and layer, equal on all TP ranks.

    Raises:
        InvalidPoolError: a field is out of range; the message names it.
    """

    layers: tuple[int, ...]
    kv_lora_rank: int
    """Elements of the latent part of a row."""
    qk_rope_head_dim: int
    """Elements of its part with positions; may be 0."""
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        check_counts(kv_lora_rank=self.kv_lora_rank)
        if self.qk_rope_head_dim < 0:
            raise InvalidPoolError(
                f"qk_rope_head_dim must not be negative, got {self.qk_rope_head_dim}"
            )
        dtype_name(self.dtype)

    @property
    def replicated(self) -> bool:
        """True: all TP ranks hold the same rows."""
        return True

    @property
    def kv_cache_dim(self) -> int:
        """Elements of a row: the latent part, then the part with positions."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def layouts(self) -> tuple[str, ...]:
        return MLAHostPool.LAYOUTS

    def page_bytes(self, page_size: int) -> int:
        return page_size * len(self.layers) * self.kv_cache_dim * self.dtype.itemsize

    def device_pool(self, size: int, page_size: int, device: torch.device) -> MLADevicePool:
        return MLADevicePool(
            size=size,
            page_size=page_size,
            layer_num=len(self.layers),
            kv_cache_dim=self.kv_cache_dim,
            dtype=self.dtype,
            device=device,
        )

    def host_pool(self, size: int, page_size: int, layout: str, *, pin_memory: bool) -> MLAHostPool:
        return MLAHostPool(
            size=size,
            page_size=page_size,
            layer_num=len(self.layers),
            kv_cache_dim=self.kv_cache_dim,
            dtype=self.dtype,
            layout=layout,
            pin_memory=pin_memory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaGeometry:
    """Recurrent states: Mamba, gated delta nets and other linear attention.

    A slot is a page.

    Raises:
        InvalidPoolError: a field is out of range; the message names it.
    """

    layers: tuple[int, ...]
    temporal_shape: tuple[int, ...]
    """Of one layer's temporal state; a 0 in it says that there is none."""
    conv_shapes: tuple[tuple[int, ...], ...]
    """Of one layer's convolution windows."""
    temporal_dtype: torch.dtype
    conv_dtype: torch.dtype
    state_chunk: int = 1
    """Tokens after which the state kernel has a state to give."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        object.__setattr__(self, "temporal_shape", tuple(self.temporal_shape))
        object.__setattr__(self, "conv_shapes", tuple(map(tuple, self.conv_shapes)))
        check_counts(state_chunk=self.state_chunk)
        check_state_shapes(self.temporal_shape, self.conv_shapes)
        dtype_name(self.temporal_dtype, "temporal_dtype")
        dtype_name(self.conv_dtype, "conv_dtype")

    @property
    def layouts(self) -> tuple[str, ...]:
        return MambaHostPool.LAYOUTS

    def page_bytes(self, page_size: int) -> int:
        temporal = math.prod(self.temporal_shape) * self.temporal_dtype.itemsize
        windows = sum(map(math.prod, self.conv_shapes)) * self.conv_dtype.itemsize
        return page_size * len(self.layers) * (temporal + windows)

    def device_pool(self, size: int, page_size: int, device: torch.device) -> MambaDevicePool:
        _check_state_page_size(page_size)
        return MambaDevicePool(
            size=size,
            layer_num=len(self.layers),
            temporal_shape=self.temporal_shape,
            conv_shapes=self.conv_shapes,
            temporal_dtype=self.temporal_dtype,
            conv_dtype=self.conv_dtype,
            device=device,
        )

    def host_pool(
        self, size: int, page_size: int, layout: str, *, pin_memory: bool
    ) -> MambaHostPool:
        _check_state_page_size(page_size)
        return MambaHostPool(
            size=size,
            layer_num=len(self.layers),
            temporal_shape=self.temporal_shape,
            conv_shapes=self.conv_shapes,
            temporal_dtype=self.temporal_dtype,
            conv_dtype=self.conv_dtype,
            layout=layout,
            pin_memory=pin_memory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerGeometry:
    """Quantized keys that sparse attention selects tokens by, in the slots of KV.

    Raises:
        InvalidPoolError: a field is out of range; the message names it.
    """

    layers: tuple[int, ...]
    """Those with an indexer of their own."""
    index_head_dim: int = 128
    """One-byte elements per token and layer."""
    quant_block_size: int = 128
    """Elements per float32 scale; divides `index_head_dim`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        check_quantization(self.index_head_dim, self.quant_block_size)

    @property
    def layouts(self) -> tuple[str, ...]:
        return IndexerHostPool.LAYOUTS

    def page_bytes(self, page_size: int) -> int:
        return len(self.layers) * index_page_bytes(
            page_size, self.index_head_dim, self.quant_block_size
        )

    def device_pool(self, size: int, page_size: int, device: torch.device) -> IndexerDevicePool:
        return IndexerDevicePool(
            size=size,
            page_size=page_size,
            layer_num=len(self.layers),
            index_head_dim=self.index_head_dim,
            quant_block_size=self.quant_block_size,
            device=device,
        )

    def host_pool(
        self, size: int, page_size: int, layout: str, *, pin_memory: bool
    ) -> IndexerHostPool:
        return IndexerHostPool(
            size=size,
            page_size=page_size,
            layer_num=len(self.layers),
            index_head_dim=self.index_head_dim,
            quant_block_size=self.quant_block_size,
            layout=layout,
            pin_memory=pin_memory,
        )


def _checked_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """Return a pool's layers; at least one, as no pool is empty."""
    # Here as well as by the copies: before a pool takes memory.
    found = tuple(layers)
    if not found:
        raise InvalidPoolError("layers must name at least one layer")
    if list(found) != sorted(set(found)) or found[0] < 0:
        raise InvalidPoolError(f"layers must be ascending numbers from 0 on, got {found}")
    return found


def _check_state_page_size(page_size: int) -> None:
    if page_size != 1:
        raise InvalidPoolError(f"page_size of a state pool must be 1, got {page_size}")
