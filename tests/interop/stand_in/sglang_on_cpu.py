"""A plugin of SGLang, in its own entry point group, that gives HiCache on a CPU what it otherwise has from CUDA alone.

That is the copies between the device pool and the host pool, here between two pools in main memory, and the locking of host
memory, which there is nothing to lock it for. Scheduler, radix tree, cache controller and storage threads stay SGLang's own.
"""

from __future__ import annotations

import ctypes

import torch


def install() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = lambda *_: None
    mha.transfer_kv_all_layer_lf_pf = all_layers_to_host
    mha.transfer_kv_per_layer_pf_lf = layer_to_device


def all_layers_to_host(
    *, src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
) -> None:
    """Tokens of all layers, given by their buffers' addresses, into a host pool of layout `page_first`."""
    for addresses, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        rows = as_bytes(host, num_layers, item_size)
        for layer, address in enumerate(addresses.tolist()):
            rows[dst_indices, layer] = tokens_at(address, int(src_indices.max()) + 1, item_size)[src_indices]


def layer_to_device(*, src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim) -> None:
    """Tokens of one layer from a host pool of layout `page_first` into the layer's buffers."""
    for host, device in ((src_k, dst_k), (src_v, dst_v)):
        rows = as_bytes(host, src_layout_dim // item_size, item_size)
        as_bytes(device, 1, item_size)[dst_indices, 0] = rows[src_indices, layer_id]


def as_bytes(buffer: torch.Tensor, layers: int, item_size: int) -> torch.Tensor:
    """A buffer's tokens as (token, layer, byte); it is a view, so what is written goes to the buffer."""
    return buffer.view(torch.uint8).view(-1, layers, item_size)


def tokens_at(address: int, count: int, item_size: int) -> torch.Tensor:
    """The first tokens of a layer's buffer as (token, byte), without a copy."""
    memory = (ctypes.c_uint8 * (count * item_size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, item_size)
