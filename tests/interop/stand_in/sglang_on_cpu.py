"""A plugin of SGLang, in its own entry point group, that gives HiCache on a CPU what it otherwise
has from CUDA alone.

That is the copies between the device pools and the host pools, here between pools in main memory,
and the locking of host memory, which there is nothing to lock it for. Scheduler, radix tree, cache
controller and storage threads stay SGLang's own.

Parameters have the names by which SGLang gives them. Indices are of tokens, (token,); a device pool
has a buffer for each layer, (token, head, dim), or (slot, ...) of Mamba states; those that are
given by their addresses are read as bytes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def install() -> None:
    """Called by SGLang in each of its processes."""
    # SGLang spawns its scheduler and its detokenizer, and each then imports for eight seconds what
    # the server has imported already; CUDA is why it may not fork them.
    multiprocessing.set_start_method = lambda *_, **__: None
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.mem_cache.pool_host import common, mamba, mha, mla

    common._cuda_host_register = lambda *_: None
    mha.transfer_kv_all_layer_lf_pf = keys_and_values_to_host
    mha.transfer_kv_per_layer_pf_lf = keys_and_values_to_device
    mha.transfer_kv_all_layer_lf_ph = keys_and_values_to_heads
    mha.transfer_kv_per_layer_ph_lf = keys_and_values_from_heads
    mla.transfer_kv_all_layer_mla_lf_pf = to_host
    mla.transfer_kv_per_layer_mla_pf_lf = to_device
    mamba.transfer_kv_mamba_lf_pf = states_to_host
    mamba.transfer_kv_mamba_pf_lf = to_device
    mha.transfer_kv_all_layer_direct_lf_pf = to_pages
    mha.transfer_kv_per_layer_direct_pf_lf = from_pages
    flat_page = mha.MHATokenToKVPoolHost.get_dummy_flat_data_page
    mha.MHATokenToKVPoolHost.get_dummy_flat_data_page = lambda pool: unlocked(pool, flat_page)
    # It has a branch for CPUs, and takes it on those alone that have AMX.
    layernorm_gated._use_cpu = True


def unlocked(pool, flat_page) -> torch.Tensor:
    """A page of its own that one of SGLang's backends reads into; PyTorch locks no memory without
    CUDA."""
    pool.pin_memory = False
    return flat_page(pool)


def keys_and_values_to_host(*, src_k_layers, dst_k, src_v_layers, dst_v, **places) -> None:
    """Tokens of all layers into a host pool of MHA in layout `page_first`."""
    to_host(src_layers=src_k_layers, dst=dst_k, **places)
    to_host(src_layers=src_v_layers, dst=dst_v, **places)


def keys_and_values_to_device(*, src_k, dst_k, src_v, dst_v, **places) -> None:
    """Tokens of one layer from a host pool of MHA in layout `page_first`."""
    to_device(src=src_k, dst=dst_k, **places)
    to_device(src=src_v, dst=dst_v, **places)


def to_host(
    *, src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
) -> None:
    """Tokens of all layers, given by their buffers' addresses, into a buffer of layout
    `page_first`, (token, layer, ...)."""
    rows = as_bytes(dst, num_layers, item_size)
    for layer, address in enumerate(src_layers.tolist()):
        rows[dst_indices, layer] = tokens_at(address, int(src_indices.max()) + 1, item_size)[
            src_indices
        ]


def to_device(*, src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim) -> None:
    """Tokens of one layer from a buffer of layout `page_first` into the layer's buffer."""
    rows = as_bytes(src, src_layout_dim // item_size, item_size)
    as_bytes(dst, 1, item_size)[dst_indices, 0] = rows[src_indices, layer_id]


def states_to_host(*, src_ptrs, **places) -> None:
    """Mamba states of all layers into a buffer of layout `page_first`: the conv states of a slot
    are a token, or its temporal ones."""
    to_host(src_layers=src_ptrs, **places)


def keys_and_values_to_heads(*, src_k_layers, dst_k, src_v_layers, dst_v, **places) -> None:
    """Tokens of all layers into a host pool of layout `page_head`."""
    to_heads(src_layers=src_k_layers, dst=dst_k, **places)
    to_heads(src_layers=src_v_layers, dst=dst_v, **places)


def keys_and_values_from_heads(*, src_k, dst_k, src_v, dst_v, **places) -> None:
    """Tokens of one layer from a host pool of layout `page_head`."""
    from_heads(src=src_k, dst=dst_k, **places)
    from_heads(src=src_v, dst=dst_v, **places)


def to_heads(
    *,
    src_layers,
    dst,
    src_indices,
    dst_indices,
    item_size,
    dst_layout_dim,
    num_layers,
    page_size,
    head_num,
) -> None:
    """Tokens of all layers into a buffer of layout `page_head`, (page, head, token of the page,
    layer, dim)."""
    page, token = dst_indices // page_size, dst_indices % page_size
    host = dst.view(torch.uint8)
    for layer, address in enumerate(src_layers.tolist()):
        tokens = tokens_at(address, int(src_indices.max()) + 1, item_size)[src_indices]
        host[page, :, token, layer] = tokens.view(len(tokens), head_num, -1)


def from_heads(
    *, src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, page_size, head_num
) -> None:
    """Tokens of one layer from a buffer of layout `page_head` into the layer's buffer."""
    dst[dst_indices] = src[src_indices // page_size, :, src_indices % page_size, layer_id]


def to_pages(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices,
    dst_indices,
    page_size,
) -> None:
    """Tokens of all layers, first those of K and then those of V, into buffers of layout
    `page_first_direct`.

    They are (page, layer, token of the page, head, dim), one of K and one of V.
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    page, token = dst_indices // page_size, dst_indices % page_size
    for number, source in enumerate(src_ptrs):
        dst_ptrs[number // layers][page, number % layers, token] = source[src_indices]


def from_pages(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices,
    dst_indices,
    layer_id,
    page_size,
) -> None:
    """Tokens of one layer from buffers of layout `page_first_direct` into the layer's buffers."""
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[src_indices // page_size, layer_id, src_indices % page_size]


def as_bytes(buffer: torch.Tensor, layers: int, item_size: int) -> torch.Tensor:
    """A buffer's tokens as (token, layer, byte); it is a view, so what is written goes to the
    buffer."""
    return buffer.view(torch.uint8).view(-1, layers, item_size)


def tokens_at(address: int, count: int, item_size: int) -> torch.Tensor:
    """The first tokens of a layer's buffer as (token, byte), without a copy."""
    memory = (ctypes.c_uint8 * (count * item_size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, item_size)
