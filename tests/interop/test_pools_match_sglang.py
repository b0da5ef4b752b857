"""A page of our pools is, byte for byte and component for component, a page of SGLang's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation, MLATokenToKVPoolHost

from hicache_storage.pools import (
    AttentionGeometry,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
    PagedHostPool,
    byte_view,
    page_access,
)
from hicache_storage.pools.addressed import AddressedPages
from hicache_storage.pools.staged import StagedPages
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.interop

L, H, D, DV, P, PAGES = 3, 2, 8, 4, 4, 5
S = P * PAGES
DEVICE_ROWS = 2 * P
INDEX_BYTES = 132
HOST = {
    "pin_memory": False,
    "device_capacity_tokens": DEVICE_ROWS,
    "start_layer": 0,
    "end_layer": L,
    "host_token_capacity": S,
}
"""Of each of SGLang's pools of tokens."""


@dataclass
class Twins:
    """SGLang's pool and ours, of one geometry, holding the same random values."""

    theirs: object
    ours: PagedHostPool
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Tensors that should agree in shape and values; theirs may have padding pages at the end of an
    axis."""

    def pages(self) -> list[int]:
        return list(range(0, self.ours.size, self.ours.page_size))

    def fill(self) -> Twins:
        generator = torch.Generator().manual_seed(3)
        for theirs, ours in self.tensors:
            size = ours.numel() * ours.element_size()
            values = (
                torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
                .view(ours.dtype)
                .view(ours.shape)
            )
            theirs.copy_(values)
            ours.copy_(values)
        return self


def pointers(buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)


def mha(layout: str, v_dim: int = D) -> Twins:
    k, v = (
        tuple(torch.zeros(DEVICE_ROWS, H, dim, dtype=torch.bfloat16) for _ in range(L))
        for dim in (D, v_dim)
    )
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD
        ),
        page_size=P,
        head_num=H,
        head_dim=D,
        v_head_dim=v_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    theirs = get_mha_host_pool_cls(info)(info, 1.0, 0, P, layout, **HOST)
    ours = PagedHostPool(
        AttentionGeometry(
            layers=range(L), head_num=H, head_dim=D, v_head_dim=v_dim, dtype=torch.bfloat16
        ),
        size=S,
        page_size=P,
        layout=layout,
    )
    return Twins(
        theirs, ours, [(theirs.k_buffer, ours.parts[0]), (theirs.v_buffer, ours.parts[1])]
    ).fill()


def mla_host(layout: str) -> MLATokenToKVPoolHost:
    rows = tuple(torch.zeros(DEVICE_ROWS, 1, D, dtype=torch.bfloat16) for _ in range(L))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=pointers(rows),
        layer_indices=tuple(range(L)),
        device_layer_num=L,
        page_size=P,
        kv_lora_rank=D - 2,
        qk_rope_head_dim=2,
        kv_cache_dim=D,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(info, 1.0, 0, P, layout, target_layer_num=L, **HOST)


def mla(layout: str) -> Twins:
    theirs = mla_host(layout)
    ours = PagedHostPool(
        MLAGeometry(layers=range(L), kv_lora_rank=D, dtype=torch.bfloat16),
        size=S,
        page_size=P,
        layout=layout,
    )
    return Twins(theirs, ours, [(theirs.kv_buffer, ours.parts[0])]).fill()


def mamba(layout: str, temporal: tuple[int, ...] = (2, 3), side_rows: int = 0) -> Twins:
    states, convs = 4, ((5,), (2, 3))
    info = MambaStateBufferInfo(
        temporal=torch.zeros(L, states, *temporal),
        conv=tuple(torch.zeros(L, states, *shape, dtype=torch.bfloat16) for shape in convs),
        extra_checkpoint_buffers=tuple(
            torch.zeros(states, 3, dtype=torch.uint8) for _ in range(side_rows)
        ),
    )
    theirs = MambaPoolHost(info, 2.0, 0, device_capacity=states, pin_memory=False, layout=layout)
    ours = PagedHostPool(
        MambaGeometry(
            layers=range(L),
            temporal_shape=temporal,
            conv_shapes=convs,
            temporal_dtype=torch.float32,
            conv_dtype=torch.bfloat16,
        ),
        size=theirs.size,
        layout=layout,
    )
    convolutions = zip(theirs.conv_buffer, ours.parts[1:], strict=True)
    return Twins(theirs, ours, [(theirs.temporal_buffer, ours.parts[0]), *convolutions]).fill()


def indexer(layout: str) -> Twins:
    device_pool = SimpleNamespace(
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=L,
        layer_num=L,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=[
            torch.zeros(2, INDEX_BYTES * P, dtype=torch.uint8) for _ in range(L)
        ],
    )
    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device_pool,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=INDEX_BYTES, dtype=torch.uint8),
        host_pool_builder=None,
    )
    theirs = DSAIndexerPoolHost(decl, mla_host(layout), pin_memory=False)
    ours = PagedHostPool(IndexerGeometry(layers=range(L)), size=S, page_size=P, layout=layout)
    buffer = theirs.index_k_with_scale_buffer
    used = buffer[:, :PAGES] if layout == "layer_first" else buffer[:PAGES]
    return Twins(theirs, ours, [(used, ours.parts[0])]).fill()


MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PAGED = ("page_first", "page_first_direct")
LENDING = {
    **{f"mha-{layout}": lambda layout=layout: mha(layout) for layout in MHA_LAYOUTS},
    **{f"mha-{layout}-asymmetric": lambda layout=layout: mha(layout, DV) for layout in PAGED},
    **{f"mla-{layout}": lambda layout=layout: mla(layout) for layout in ("layer_first", *PAGED)},
    **{f"mamba-{layout}": lambda layout=layout: mamba(layout) for layout in PAGED},
    **{f"mamba-{layout}-conv_only": lambda layout=layout: mamba(layout, (0,)) for layout in PAGED},
    **{f"indexer-{layout}": lambda layout=layout: indexer(layout) for layout in PAGED},
}
COPYING = {
    "indexer-layer_first": lambda: indexer("layer_first"),
    "mamba-side-states": lambda: mamba("page_first", side_rows=2),
}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(tensor.contiguous()))


def told(pool: object, slot: int, page_size: int) -> list[bytes]:
    """The components behind the addresses that SGLang's pool tells."""
    addresses, lengths = pool.get_page_buffer_meta(torch.arange(slot, slot + page_size))
    return [
        ctypes.string_at(address, length)
        for address, length in zip(addresses, lengths, strict=True)
    ]


def new_page(length: int) -> bytes:
    return bytes((at * 7 + 1) % 256 for at in range(length))


@pytest.mark.parametrize("make", LENDING.values(), ids=LENDING)
def test_pages_of_pools_that_lend_are_ours(make: Callable[[], Twins]) -> None:
    """Tensors and sizes; components, in the same order; a page that goes in, and out."""
    twins = make()
    theirs, ours, pages = twins.theirs, twins.ours, twins.pages()
    for one, other in twins.tensors:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert ours.geometry.page_bytes // ours.page_size == theirs.size_per_token
    assert ours.size == theirs.size
    access = page_access(theirs)
    assert isinstance(access, AddressedPages)
    assert access.geometry == ours.geometry
    before = {slot: told(theirs, slot, ours.page_size) for slot in pages}
    assert [[bytes(part) for part in page] for page in ours.page_buffers(pages)] == [
        *before.values()
    ]
    target = pages[2]
    page = new_page(access.geometry.page_bytes)
    targets, start = access.targets([target]), 0
    for buffer in targets[0]:
        buffer[:] = page[start : start + len(buffer)]
        start += len(buffer)
    access.deliver([target], targets, [True])
    assert b"".join(access.sources([target])[0]) == page
    after = {slot: told(theirs, slot, ours.page_size) for slot in pages}
    assert b"".join(after.pop(target)) == page
    assert after == {slot: before[slot] for slot in pages if slot != target}


@pytest.mark.parametrize("make", COPYING.values(), ids=COPYING)
def test_pages_of_pools_that_copy(make: Callable[[], Twins]) -> None:
    twins = make()
    access = page_access(twins.theirs)
    assert isinstance(access, StagedPages)
    slots = twins.pages()[1:4]
    before = [bytes(buffer) for (buffer,) in access.sources(slots)]
    if len(twins.tensors) == 1:
        ours = [b"".join(page) for page in twins.ours.page_buffers(slots)]
        assert before == ours
    page = new_page(access.geometry.page_bytes)
    targets = access.targets(slots)
    for (buffer,) in targets:
        buffer[:] = page
    access.deliver(slots, targets, [True, False, True])
    assert [bytes(buffer) for (buffer,) in access.sources(slots)] == [page, before[1], page]
    assert raw(twins.theirs.get_data_page(slots[0], flat=True)) == page


def without_memory() -> MLATokenToKVPoolHost:
    allocation = MLAHostAllocation(
        dtype=torch.bfloat16,
        kv_lora_rank=D - 2,
        qk_rope_head_dim=2,
        kv_cache_dim=D,
        size_per_token=L * D * 2,
    )
    return MLATokenToKVPoolHost(allocation, 1.0, 0, P, "page_first", target_layer_num=L, **HOST)


def indexer_without_memory(layout: str) -> DSAIndexerPoolHost:
    pool = indexer(layout).theirs
    pool.index_k_with_scale_buffer = None
    return pool


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LogicalHostPool(size=S, page_size=P), "LogicalHostPool has no memory of its own"),
        (without_memory, "has no memory of its own"),
        (lambda: indexer_without_memory("layer_first"), "DSAIndexerPoolHost"),
        (lambda: indexer_without_memory("page_first"), "DSAIndexerPoolHost"),
    ],
    ids=["logical", "mla", "indexer-layer_first", "indexer-page_first"],
)
def test_pools_that_cannot_be_served(make: Callable[[], object], match: str) -> None:
    pool = make()
    with pytest.raises(InvalidPoolError, match=match):
        page_access(pool)
