"""A page of our pools is, byte for byte and component for component, a page of SGLang's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace

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


@pytest.fixture(params=LENDING.values(), ids=LENDING.keys())
def lending(request: pytest.FixtureRequest) -> Twins:
    return request.param()


@pytest.fixture(params=COPYING.values(), ids=COPYING.keys())
def copying(request: pytest.FixtureRequest) -> Twins:
    return request.param()


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


class TestPoolsThatLend:
    def test_they_have_the_same_tensors_sizes_and_geometry(self, lending: Twins) -> None:
        for theirs, ours in lending.tensors:
            assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
        slot_bytes = lending.ours.geometry.page_bytes // lending.ours.page_size
        assert slot_bytes == lending.theirs.size_per_token
        assert lending.ours.size == lending.theirs.size
        access = page_access(lending.theirs)
        assert isinstance(access, AddressedPages)
        assert access.geometry == lending.ours.geometry

    def test_components_are_the_same_bytes_in_the_same_order(self, lending: Twins) -> None:
        slots = lending.pages()
        for slot, ours in zip(slots, lending.ours.page_buffers(slots), strict=True):
            assert [bytes(buffer) for buffer in ours] == told(
                lending.theirs, slot, lending.ours.page_size
            )

    def test_a_page_goes_in_and_out(self, lending: Twins) -> None:
        access = page_access(lending.theirs)
        pages = lending.pages()
        target = pages[2]
        before = {slot: told(lending.theirs, slot, lending.ours.page_size) for slot in pages}
        page = new_page(access.geometry.page_bytes)
        targets, start = access.targets([target]), 0
        for buffer in targets[0]:
            buffer[:] = page[start : start + len(buffer)]
            start += len(buffer)
        access.deliver([target], targets, [True])
        assert b"".join(access.sources([target])[0]) == page
        after = {slot: told(lending.theirs, slot, lending.ours.page_size) for slot in pages}
        assert b"".join(after.pop(target)) == page
        assert after == {slot: before[slot] for slot in pages if slot != target}

    def test_what_one_stores_the_other_loads(self, lending: Twins) -> None:
        source, target = lending.pages()[1], lending.pages()[3]
        targets = page_access(lending.theirs).targets([target])[0]
        for ours, theirs in zip(lending.ours.page_buffers([source])[0], targets, strict=True):
            theirs[:] = ours
        read, written = lending.ours.page_buffers([source, target])
        for origin, to in zip(read, written, strict=True):
            to[:] = origin
        for theirs, ours in lending.tensors:
            assert raw(theirs) == raw(ours)


class TestPoolsThatCopy:
    def test_a_page_goes_in_and_out(self, copying: Twins) -> None:
        access = page_access(copying.theirs)
        assert isinstance(access, StagedPages)
        slots = copying.pages()[1:4]
        before = [bytes(buffer) for (buffer,) in access.sources(slots)]
        page = new_page(access.geometry.page_bytes)
        targets = access.targets(slots)
        for (buffer,) in targets:
            buffer[:] = page
        access.deliver(slots, targets, [True, False, True])
        assert [bytes(buffer) for (buffer,) in access.sources(slots)] == [page, before[1], page]
        assert raw(copying.theirs.get_data_page(slots[0], flat=True)) == page

    def test_pages_of_the_indexer_have_our_bytes(self) -> None:
        twins = indexer("layer_first")
        sources = page_access(twins.theirs).sources(twins.pages())
        ours = [b"".join(page) for page in twins.ours.page_buffers(twins.pages())]
        assert [bytes(buffer) for (buffer,) in sources] == ours


class TestPoolsThatCannotBeServed:
    def test_logical_anchor(self) -> None:
        with pytest.raises(InvalidPoolError, match="LogicalHostPool has no memory of its own"):
            page_access(LogicalHostPool(size=S, page_size=P))

    def test_pool_without_memory(self) -> None:
        allocation = MLAHostAllocation(
            dtype=torch.bfloat16,
            kv_lora_rank=D - 2,
            qk_rope_head_dim=2,
            kv_cache_dim=D,
            size_per_token=L * D * 2,
        )
        pool = MLATokenToKVPoolHost(allocation, 1.0, 0, P, "page_first", target_layer_num=L, **HOST)
        with pytest.raises(InvalidPoolError, match="has no memory of its own"):
            page_access(pool)

    @pytest.mark.parametrize("layout", ["layer_first", "page_first"])
    def test_indexer_without_memory(self, layout: str) -> None:
        twins = indexer(layout)
        twins.theirs.index_k_with_scale_buffer = None
        with pytest.raises(InvalidPoolError, match="DSAIndexerPoolHost"):
            page_access(twins.theirs)
