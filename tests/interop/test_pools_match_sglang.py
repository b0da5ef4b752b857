"""A page of our pools is, byte for byte and component for component, a page of SGLang's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo

from hicache_storage.pools import (
    AttentionGeometry,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
    PagedHostPool,
    page_access,
)
from hicache_storage.pools.engine import AddressedPages
from tests.interop.engine import PAGE_SIZE, PAGES, mamba_pool, mha_pools, mla_pools

pytestmark = pytest.mark.interop

LAYERS, INDEX_BYTES = range(3), 132


def twin(theirs, tensors, geometry):
    """SGLang's pool and ours, of one geometry, with the same random bytes; its tensors may have
    padding pages at the end of an axis."""
    ours = PagedHostPool(
        geometry, size=theirs.size, page_size=theirs.page_size, layout=theirs.layout
    )
    generator = torch.Generator().manual_seed(3)
    for one, other in zip(tensors, ours.parts, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        other.view(torch.uint8).random_(0, 256, generator=generator)
        one.copy_(other)
    return theirs, ours


def mha(layout, v_dim=16):
    theirs = mha_pools(layout, v_head_dim=v_dim).kv
    geometry = AttentionGeometry(
        layers=LAYERS, head_num=2, head_dim=16, v_head_dim=v_dim, dtype=torch.bfloat16
    )
    return twin(theirs, [theirs.k_buffer, theirs.v_buffer], geometry)


def mla(layout):
    theirs = mla_pools(layout).kv
    geometry = MLAGeometry(layers=LAYERS, kv_lora_rank=16, qk_rope_head_dim=8, dtype=torch.bfloat16)
    return twin(theirs, [theirs.kv_buffer], geometry)


def mamba(layout, temporal=(4, 8)):
    theirs = mamba_pool(layout, temporal=temporal)
    geometry = MambaGeometry(
        layers=range(2),
        temporal_shape=temporal,
        conv_shapes=((6, 3), (5, 3)),
        temporal_dtype=torch.float32,
        conv_dtype=torch.bfloat16,
    )
    return twin(theirs, [theirs.temporal_buffer, *theirs.conv_buffer], geometry)


def indexer(layout):
    anchor = mla_pools(layout)
    device_pool = SimpleNamespace(
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=len(LAYERS),
        layer_num=len(LAYERS),
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=[
            torch.zeros(PAGES, INDEX_BYTES * PAGE_SIZE, dtype=torch.uint8) for _ in LAYERS
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
    theirs = DSAIndexerPoolHost(decl, anchor.kv, pin_memory=False)
    buffer, pages = theirs.index_k_with_scale_buffer, theirs.size // PAGE_SIZE
    used = buffer[:, :pages] if layout == "layer_first" else buffer[:pages]
    return twin(theirs, [used], IndexerGeometry(layers=LAYERS))


PAGED = ("page_first", "page_first_direct")
LENDING = [
    *((mha, layout) for layout in ("layer_first", *PAGED, "page_head")),
    *((mha, layout, 8) for layout in PAGED),
    *((mla, layout) for layout in ("layer_first", *PAGED)),
    *((mamba, layout) for layout in PAGED),
    *((mamba, layout, (0,)) for layout in PAGED),
    *((indexer, layout) for layout in PAGED),
]


def told(pool, slot):
    """The components behind the addresses that SGLang's pool tells."""
    places = pool.get_page_buffer_meta(torch.arange(slot, slot + pool.page_size))
    return [ctypes.string_at(address, length) for address, length in zip(*places, strict=True)]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [(make, arguments) for make, *arguments in LENDING],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(map(str, value)),
)
def test_pages_of_pools_that_lend_are_ours(make, arguments):
    """Sizes; components, in the same order; a page that goes in, and out."""
    theirs, ours = make(*arguments)
    assert ours.geometry.page_bytes // ours.page_size == theirs.size_per_token
    access = page_access(theirs)
    assert isinstance(access, AddressedPages)
    assert access.geometry == ours.geometry
    pages = range(0, ours.size, ours.page_size)
    before = {slot: told(theirs, slot) for slot in pages}
    assert [list(map(bytes, page)) for page in ours.page_buffers(pages)] == [*before.values()]
    target, start = pages[2], 0
    page = bytes((at * 7 + 1) % 256 for at in range(access.geometry.page_bytes))
    targets = access.targets([target])
    for buffer in targets[0]:
        buffer[:] = page[start : start + len(buffer)]
        start += len(buffer)
    access.deliver([target], targets)
    assert b"".join(access.sources([target])[0]) == page
    assert b"".join(before.pop(target)) != b"".join(told(theirs, target)) == page
    assert {slot: told(theirs, slot) for slot in before} == before


def test_pages_of_an_indexer_that_copies_are_ours():
    """In layout `layer_first` a page of it has no addresses."""
    theirs, ours = indexer("layer_first")
    slots = range(PAGE_SIZE, 4 * PAGE_SIZE, PAGE_SIZE)
    ours = [b"".join(page) for page in ours.page_buffers(slots)]
    assert [bytes(buffer) for (buffer,) in page_access(theirs).sources(slots)] == ours
