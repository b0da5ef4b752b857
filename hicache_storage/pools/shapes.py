"""Shape of each kind of state: its device pool, its host pool and its identity are made of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from hicache_storage.pools.shards import layout_rows
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

SCALE_BYTES = 4
"""An index key's scales are float32."""
TOKEN_ROWS = {"layer_first": "lpr", "page_first": "prl", "page_first_direct": "plr"}
"""By layout the order of a host tensor's axes: layers, pages, rows of a page; a row's follow."""
WHOLE_ROWS = TOKEN_ROWS | {"page_first": "plr"}


class Part(NamedTuple):
    """One tensor of each layer: K, V, latent rows, or a part of a state."""

    rows: int
    """In a page: one for each slot, or one for all."""
    shape: tuple[int, ...]
    """Of a row."""
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of a page of one layer."""
        return self.rows * math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class PoolGeometry(ABC):
    """One kind of state, and the layers of the model that have it.

    Raises:
        InvalidPoolError: a field is out of range; the message names it.
    """

    ORDERS: ClassVar[dict[str, str]] = TOKEN_ROWS
    """Layouts that host pools support, each with the order of axes. `h` is the first of a row's."""
    is_layer_major: ClassVar[bool] = False
    """Whether `layer_first` has all parts of a layer beside each other, not all layers of a part."""

    layers: Sequence[int]
    """Layers of the model, counted from the rank's first layer, ascending."""

    def __post_init__(self) -> None:
        # Here as well as by the copies: before a pool takes memory.
        found = tuple(self.layers)
        if not found:
            raise InvalidPoolError("layers must name at least one layer")
        if list(found) != sorted(set(found)) or found[0] < 0:
            raise InvalidPoolError(f"layers must be ascending numbers from 0 on, got {found}")
        object.__setattr__(self, "layers", found)
        self._check()

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that host pools support."""
        return tuple(self.ORDERS)

    @property
    def layer_num(self) -> int:
        return len(self.layers)

    @abstractmethod
    def parts(self, page_size: int) -> tuple[Part, ...]:
        """Return what a layer consists of.

        Raises:
            InvalidPoolError: there are no such pages.
        """

    @property
    @abstractmethod
    def element_type(self) -> str:
        """Name of the element type or types, part of the namespace."""

    def head_rows(self, layout: str, page_size: int) -> int:
        """Return the rows of KV heads in each component of a page; 0 for a pool without heads."""
        return 0

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page of so many slots, all layers together."""
        return self.layer_num * sum(part.bytes for part in self.parts(page_size))

    @abstractmethod
    def _check(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class AttentionGeometry(PoolGeometry):
    """Multi-head attention and its grouped-query and multi-query kinds: K and V of every layer.

    In a device pool each layer's K and V are tensors (slots, heads, elements of a head). With S
    slots in N pages of P, L layers, H heads and D elements a head, each has the shape in a host pool

    | layout | shape | components of a page |
    |---|---|---|
    | `layer_first` | (L, S, H, D) | K, V of layer 0, K, V of layer 1, ...: P * H * D elements each |
    | `page_first` | (S, L, H, D) | K, V: P * L * H * D elements each |
    | `page_first_direct` | (N, L, P, H, D) | the same |
    | `page_head` | (N, H, P, L, D) | the same |

    and they are the halves of one tensor (2, ...). Where the heads of V are longer or shorter than
    those of K, they are two tensors.
    """

    ORDERS = TOKEN_ROWS | {"page_head": "phrl"}
    is_layer_major = True

    head_num: int
    """KV heads held by this rank."""
    head_dim: int
    """Elements per head of K."""
    dtype: torch.dtype
    """Element type as stored, `torch.uint8` or a float8 type for quantized KV."""
    v_head_dim: int | None = None
    """Elements per head of V; None means as many as K."""
    replicated: bool = False
    """Whether all TP ranks hold the same heads, as with a single one; then one of them writes."""

    def _check(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        check_counts(self, "head_num", "head_dim", "v_head_dim")
        check_dtypes(self, "dtype")

    def parts(self, page_size: int) -> tuple[Part, ...]:
        return tuple(
            Part(page_size, (self.head_num, dim or self.head_dim), self.dtype)
            for dim in (self.head_dim, self.v_head_dim)
        )

    @property
    def element_type(self) -> str:
        return type_name(self.dtype)

    def head_rows(self, layout: str, page_size: int) -> int:
        return layout_rows(layout, page_size, self.layer_num)


@dataclass(frozen=True, kw_only=True)
class MLAGeometry(PoolGeometry):
    """Multi-head latent attention: a row per token and layer, equal on all TP ranks.

    In a device pool each layer is a tensor (slots, 1, elements of a row). With S slots in N pages of
    P, L layers and D elements a row, the part has the shape in a host pool

    | layout | shape | components of a page |
    |---|---|---|
    | `layer_first` | (L, S, 1, D) | one for each layer: P * D elements |
    | `page_first` | (S, L, 1, D) | one: P * L * D elements |
    | `page_first_direct` | (N, L, P, 1, D) | one: P * L * D elements |
    """

    kv_lora_rank: int
    """Elements of the latent part of a row, or of a packed row."""
    dtype: torch.dtype
    qk_rope_head_dim: int = 0
    """Elements of its part with positions; may be 0."""

    def _check(self) -> None:
        check_counts(self, "kv_lora_rank")
        if self.qk_rope_head_dim < 0:
            raise InvalidPoolError(
                f"qk_rope_head_dim must not be negative, got {self.qk_rope_head_dim}"
            )
        check_dtypes(self, "dtype")

    @property
    def replicated(self) -> bool:
        """True: all TP ranks hold the same rows."""
        return True

    def parts(self, page_size: int) -> tuple[Part, ...]:
        return (Part(page_size, (1, self.kv_lora_rank + self.qk_rope_head_dim), self.dtype),)

    @property
    def element_type(self) -> str:
        return type_name(self.dtype)


@dataclass(frozen=True, kw_only=True)
class MambaGeometry(PoolGeometry):
    """Recurrent states: Mamba, gated delta nets and other linear attention. A slot is a page.

    The parts are a temporal (SSM) state and convolution windows. With S slots and L layers each has
    the shape in a host pool

    | layout | shape | components of a page |
    |---|---|---|
    | `layer_first` | (L, S, *state) | temporal of layer 0, 1, ..., then the first window of layer 0, 1, ..., and so on |
    | `page_first`, `page_first_direct` | (S, L, 1, *state) | temporal, first window, second window, ... |

    A model without a temporal state has one with a 0 in its shape; it is no component.
    """

    ORDERS = WHOLE_ROWS

    temporal_shape: Sequence[int]
    """Of one layer's temporal state; a 0 in it says that there is none."""
    conv_shapes: Sequence[Sequence[int]]
    """Of one layer's convolution windows."""
    temporal_dtype: torch.dtype
    conv_dtype: torch.dtype
    state_chunk: int = 1
    """Tokens after which the state kernel has a state to give."""

    def _check(self) -> None:
        object.__setattr__(self, "temporal_shape", tuple(self.temporal_shape))
        object.__setattr__(self, "conv_shapes", tuple(map(tuple, self.conv_shapes)))
        check_counts(self, "state_chunk")
        check_dtypes(self, "temporal_dtype", "conv_dtype")
        if not self.conv_shapes and 0 in self.temporal_shape:
            raise InvalidPoolError(
                "conv_shapes is empty and temporal_shape holds a 0: a page would have no bytes"
            )
        if any(count < 0 for count in self.temporal_shape):
            raise InvalidPoolError(
                f"temporal_shape must not hold negative numbers, got {self.temporal_shape}"
            )
        for number, shape in enumerate(self.conv_shapes):
            if any(count < 1 for count in shape):
                raise InvalidPoolError(
                    f"conv_shapes[{number}] must hold positive numbers, got {shape}"
                )

    def parts(self, page_size: int) -> tuple[Part, ...]:
        if page_size != 1:
            raise InvalidPoolError(f"page_size of a state pool must be 1, got {page_size}")
        temporal = Part(1, tuple(self.temporal_shape), self.temporal_dtype)
        return temporal, *(Part(1, tuple(shape), self.conv_dtype) for shape in self.conv_shapes)

    @property
    def element_type(self) -> str:
        return f"{type_name(self.temporal_dtype)}+{type_name(self.conv_dtype)}"


@dataclass(frozen=True, kw_only=True)
class IndexerGeometry(PoolGeometry):
    """Quantized keys that sparse attention selects tokens by, in the slots of KV.

    Keys and their scales are packed as bytes page by page and layer by layer. A page of one layer is
    `page_stride` = P * (D + D / B * 4) bytes, for D one-byte elements a token with one float32 scale
    for each B of them; how keys and scales lie inside it is the engine's business. With N pages and
    L layers the part (uint8) has the shape in a host pool

    | layout | shape | components of a page |
    |---|---|---|
    | `layer_first` | (L, N, page_stride) | one for each layer: page_stride bytes |
    | `page_first`, `page_first_direct` | (N, L, 1, page_stride) | one: L * page_stride bytes |

    A device pool has the slots of the KV pool that it follows; indices derived from that pool's need
    no `alloc`.
    """

    ORDERS = WHOLE_ROWS

    index_head_dim: int = 128
    """One-byte elements per token and layer."""
    quant_block_size: int = 128
    """Elements per float32 scale; divides `index_head_dim`."""

    def _check(self) -> None:
        check_counts(self, "index_head_dim", "quant_block_size")
        if self.index_head_dim % self.quant_block_size:
            raise InvalidPoolError(
                f"quant_block_size ({self.quant_block_size}) must divide index_head_dim "
                f"({self.index_head_dim})"
            )

    def page_stride(self, page_size: int) -> int:
        """Return the bytes of one page of one layer: the keys, and a scale for each block."""
        scales = self.index_head_dim // self.quant_block_size * SCALE_BYTES
        return page_size * (self.index_head_dim + scales)

    def parts(self, page_size: int) -> tuple[Part, ...]:
        return (Part(1, (self.page_stride(page_size),), torch.uint8),)

    @property
    def element_type(self) -> str:
        return "uint8"


def type_name(dtype: torch.dtype) -> str:
    """Return the name of an element type without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")


def check_counts(owner: object, *names: str) -> None:
    """Refuse an attribute below 1.

    Raises:
        InvalidPoolError: the message names the attribute.
    """
    for name in names:
        if getattr(owner, name) < 1:
            raise InvalidPoolError(f"{name} must be at least 1, got {getattr(owner, name)}")


def check_dtypes(owner: object, *names: str) -> None:
    """Refuse an attribute that is no `torch.dtype`.

    Raises:
        InvalidPoolError: the message names the attribute.
    """
    for name in names:
        if not isinstance(getattr(owner, name), torch.dtype):
            raise InvalidPoolError(
                f"{name} must be a torch.dtype such as torch.bfloat16, got {getattr(owner, name)!r}"
            )
