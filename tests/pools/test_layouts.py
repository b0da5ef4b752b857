"""Pages of every pool in every layout: the shapes, the bytes, and that a page is only itself."""

from __future__ import annotations

import ctypes
import timeit
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.pools import (
    AttentionGeometry,
    IndexerGeometry,
    IndexerHostPool,
    MambaGeometry,
    MambaHostPool,
    MHAHostPool,
    MLAGeometry,
    MLAHostPool,
)
from hicache_storage.spec import HostPool, InvalidPoolError, InvalidTransferError
from tests.support.pools import make_pool, page_layer

if TYPE_CHECKING:
    from hicache_storage.pools import HostPoolBase

    PoolCase = Any  # conftest's; test files cannot import it


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def pages(pool: HostPoolBase) -> list[int]:
    return list(range(0, pool.size, pool.page_size))


def page_bytes(pool: HostPoolBase, slot: int) -> list[bytes]:
    return [bytes(buffer) for buffer in pool.page_buffers([slot])[0]]


class TestEveryLayout:
    def test_is_a_host_pool(self, pool: HostPoolBase) -> None:
        assert isinstance(pool, HostPool)

    def test_buffers_have_the_documented_shapes(self, case: PoolCase, pool: HostPoolBase) -> None:
        for name, shape in case.shapes.items():
            buffer = getattr(pool, name)
            found = (
                [tuple(one.shape) for one in buffer]
                if isinstance(shape, list)
                else tuple(buffer.shape)
            )
            assert found == shape, name

    def test_buffers_are_contiguous_and_page_aligned(self, pool: HostPoolBase) -> None:
        for buffer in pool.buffers:
            assert buffer.is_contiguous()
            assert not buffer.numel() or buffer.data_ptr() % 4096 == 0

    def test_geometry_describes_the_components(self, case: PoolCase, pool: HostPoolBase) -> None:
        components = case.components(pool, 0)
        assert pool.geometry.component_bytes == tuple(
            len(raw(component)) for component in components
        )
        assert pool.geometry.page_bytes == pool.size_per_token * pool.page_size
        assert pool.geometry.layout == pool.layout == case.name.split("-")[1]
        assert (pool.geometry.size, pool.geometry.page_size) == (pool.size, pool.page_size)
        assert (
            sum(buffer.numel() * buffer.element_size() for buffer in pool.buffers)
            == pool.size_per_token * pool.size
        )

    def test_page_buffers_are_the_components_in_order(
        self, case: PoolCase, pool: HostPoolBase
    ) -> None:
        found = pool.page_buffers(pages(pool))
        for slot, buffers in zip(pages(pool), found, strict=True):
            assert [bytes(buffer) for buffer in buffers] == [
                raw(part) for part in case.components(pool, slot)
            ]
            assert all(buffer.format == "B" and not buffer.readonly for buffer in buffers)

    def test_page_buffers_keep_the_order_they_are_asked_in(self, pool: HostPoolBase) -> None:
        backwards = pages(pool)[::-1]
        found = [[bytes(buffer) for buffer in page] for page in pool.page_buffers(backwards)]
        assert found == [page_bytes(pool, slot) for slot in backwards]
        assert pool.page_buffers([]) == []

    def test_writing_to_a_page_shows_in_the_tensors_of_that_page_only(
        self, case: PoolCase, pool: HostPoolBase
    ) -> None:
        target = pages(pool)[2]
        before = {slot: [raw(part) for part in case.components(pool, slot)] for slot in pages(pool)}
        for number, buffer in enumerate(pool.page_buffers([target])[0]):
            buffer[:] = bytes((number + at) % 251 for at in range(len(buffer)))
        after = {slot: [raw(part) for part in case.components(pool, slot)] for slot in pages(pool)}
        written = [
            bytes((number + at) % 251 for at in range(len(part)))
            for number, part in enumerate(before[target])
        ]
        assert after == {**before, target: written}

    def test_flat_page_is_the_documented_parts(self, case: PoolCase, pool: HostPoolBase) -> None:
        for slot in pages(pool):
            page = pool.get_data_page(slot, flat=True)
            assert page.dim() == 1
            assert raw(page) == b"".join(raw(part) for part in case.flat(pool, slot))

    def test_flat_page_is_a_copy(self, pool: HostPoolBase) -> None:
        before = page_bytes(pool, 0)
        pool.get_data_page(0).view(torch.uint8).fill_(1)
        assert page_bytes(pool, 0) == before

    def test_page_view_is_the_pool_itself(self, case: PoolCase, pool: HostPoolBase) -> None:
        slot = pages(pool)[1]
        view = pool.get_data_page(slot, flat=False)
        assert raw(view) == raw(pool.get_data_page(slot))
        if case.viewable:
            assert view.dim() == pool.buffers[0].dim()
            view.zero_()
            assert not any(map(any, page_bytes(pool, slot)))

    def test_layers_of_a_page_are_its_bytes(self, pool: HostPoolBase) -> None:
        for number, slot in enumerate(pages(pool), 1):
            for layer in range(pool.layer_num):
                for part in page_layer(pool, slot, layer):
                    part.view(torch.uint8).fill_(number)
        for number, slot in enumerate(pages(pool), 1):
            assert all(set(component) == {number} for component in page_bytes(pool, slot))

    def test_flat_page_travels_to_another_pool(self, case: PoolCase, pool: HostPoolBase) -> None:
        other = case.build()
        source, target = pages(pool)[1], pages(pool)[3]
        other.set_from_flat_data_page(target, pool.get_data_page(source))
        assert page_bytes(other, target) == page_bytes(pool, source)
        assert not any(
            any(map(any, page_bytes(other, slot))) for slot in pages(pool) if slot != target
        )

    def test_flat_page_from_an_odd_place(self, pool: HostPoolBase) -> None:
        page = pool.get_data_page(0)
        longer = torch.cat([page[:1], page])
        pool.set_from_flat_data_page(pages(pool)[1], longer[1:])
        assert page_bytes(pool, pages(pool)[1]) == page_bytes(pool, 0)

    def test_dummy_page_has_the_form_of_a_flat_page(self, pool: HostPoolBase) -> None:
        dummy, page = pool.get_dummy_flat_data_page(), pool.get_data_page(0)
        assert (dummy.shape, dummy.dtype) == (page.shape, page.dtype)
        assert not any(raw(dummy))

    def test_addresses_agree_with_the_buffers(self, pool: HostPoolBase) -> None:
        slots = [pages(pool)[3], pages(pool)[1]]
        indices = torch.cat([torch.arange(slot, slot + pool.page_size) for slot in slots])
        addresses, lengths = pool.get_page_buffer_meta(indices)
        found = [
            ctypes.string_at(address, length)
            for address, length in zip(addresses, lengths, strict=True)
        ]
        assert found == [part for slot in slots for part in page_bytes(pool, slot)]
        assert pool.get_page_buffer_meta(indices[:0]) == ([], [])

    @pytest.mark.parametrize("length", [-1, 1])
    def test_flat_page_of_another_length_is_refused(self, pool: HostPoolBase, length: int) -> None:
        page = torch.zeros(
            pool.get_dummy_flat_data_page().numel() + length, dtype=torch.uint8
        ).view(torch.uint8)
        with pytest.raises(InvalidTransferError, match="data_page must have"):
            pool.set_from_flat_data_page(0, page.to(pool.flat_dtype))

    def test_flat_page_of_another_type_is_refused(self, pool: HostPoolBase) -> None:
        page = torch.zeros(pool.geometry.page_bytes, dtype=torch.uint8).view(torch.int8)
        with pytest.raises(InvalidTransferError, match="data_page must have"):
            pool.set_from_flat_data_page(0, page)

    def test_pages_that_are_none_are_refused(self, pool: HostPoolBase) -> None:
        wrong = [-pool.page_size, pool.size] + ([1] if pool.page_size > 1 else [])
        for slot in wrong:
            indices = torch.arange(slot, slot + pool.page_size)
            for ask in (
                lambda: pool.get_data_page(slot),  # noqa: B023 - called at once
                lambda: pool.set_from_flat_data_page(slot, pool.get_dummy_flat_data_page()),  # noqa: B023
                lambda: pool.get_page_buffer_meta(indices),  # noqa: B023
            ):
                with pytest.raises(InvalidTransferError, match="no page begins"):
                    ask()

    def test_slots_are_handed_out_in_pages(self, pool: HostPoolBase) -> None:
        taken = pool.alloc(2 * pool.page_size)
        assert taken is not None
        assert taken.tolist() == list(range(2 * pool.page_size))
        assert pool.available_size() == pool.size - 2 * pool.page_size
        assert pool.free(taken) == 2 * pool.page_size
        assert pool.available_size() == pool.size
        assert pool.alloc(pool.size) is not None
        pool.clear()
        assert pool.available_size() == pool.size


class TestMeaning:
    """The same values, wherever the layout puts them."""

    @pytest.mark.parametrize("layout", MHAHostPool.LAYOUTS)
    @pytest.mark.parametrize("v_head_dim", [4, 6])
    def test_mha(self, layout: str, v_head_dim: int) -> None:
        pool = MHAHostPool(
            AttentionGeometry(
                layers=range(2), head_num=3, head_dim=4, v_head_dim=v_head_dim, dtype=torch.int32
            ),
            size=12,
            page_size=4,
            layout=layout,
        )
        for half, buffer in enumerate((pool.k_buffer, pool.v_buffer)):
            dim = buffer.shape[-1]
            values = torch.arange(half * 1000, half * 1000 + 2 * 12 * 3 * dim).view(2, 12, 3, dim)
            paged = values.view(2, 3, 4, 3, dim)
            buffer.copy_(
                {
                    "layer_first": values,
                    "page_first": values.permute(1, 0, 2, 3),
                    "page_first_direct": paged.permute(1, 0, 2, 3, 4),
                    "page_head": paged.permute(1, 3, 2, 0, 4),
                }[layout]
            )
            at = 1 if half else 0
            component = pool.page_buffers([4])[0][at]
            first = int.from_bytes(component[:4], "little")
            assert first == half * 1000 + 4 * 3 * dim, (
                "layer 0, token 4, head 0, element 0 comes first in every layout"
            )
            second_token = {
                "layer_first": 3 * dim,
                "page_first": 2 * 3 * dim,
                "page_first_direct": 3 * dim,
                "page_head": 2 * dim,
            }
            at_token = second_token[layout] * 4
            assert (
                int.from_bytes(component[at_token : at_token + 4], "little")
                == half * 1000 + 5 * 3 * dim
            )

    def test_mamba_flat_pages_are_portable_between_layouts(self) -> None:
        shared = {
            "size": 3,
            "layers": range(2),
            "temporal_shape": (2, 2),
            "conv_shapes": [(3,)],
            "temporal_dtype": torch.float32,
            "conv_dtype": torch.float16,
        }
        first, other = (
            make_pool(MambaHostPool, layout="layer_first", **shared),
            make_pool(MambaHostPool, layout="page_first", **shared),
        )
        for buffer in first.buffers:
            buffer.copy_(torch.randn(buffer.shape))
        other.set_from_flat_data_page(2, first.get_data_page(1))
        assert torch.equal(other.temporal_buffer[2, :, 0], first.temporal_buffer[:, 1])
        assert torch.equal(other.conv_buffers[0][2, :, 0], first.conv_buffers[0][:, 1])

    def test_states_of_one_element_are_not_next_to_each_other(self) -> None:
        """A flattened view of such a page is a strided one, which cannot be seen as bytes."""
        pool = MambaHostPool(
            MambaGeometry(
                layers=range(3),
                temporal_shape=(1,),
                conv_shapes=[(1,)],
                temporal_dtype=torch.float32,
                conv_dtype=torch.float16,
            ),
            size=4,
            layout="layer_first",
        )
        for buffer in pool.buffers:
            buffer.copy_(torch.arange(12).view(3, 4, 1))
        assert pool.get_data_page(1).view(torch.float16)[6:].tolist() == [1, 5, 9]
        pool.set_from_flat_data_page(3, pool.get_data_page(1))
        assert page_bytes(pool, 3) == page_bytes(pool, 1)

    def test_equal_sizes_in_two_layouts_are_two_geometries(self) -> None:
        geometries = {
            MHAHostPool(
                AttentionGeometry(layers=range(2), head_num=2, head_dim=2, dtype=torch.float16),
                size=8,
                page_size=4,
                layout=layout,
            ).geometry
            for layout in MHAHostPool.LAYOUTS
        }
        assert len(geometries) == len(MHAHostPool.LAYOUTS)

    def test_equal_sizes_of_two_types_are_two_geometries(self) -> None:
        types = (torch.float16, torch.bfloat16)
        assert (
            MLAHostPool(
                MLAGeometry(layers=range(1), kv_lora_rank=2, dtype=types[0]), size=4, page_size=4
            ).geometry
            != MLAHostPool(
                MLAGeometry(layers=range(1), kv_lora_rank=2, dtype=types[1]), size=4, page_size=4
            ).geometry
        )
        pools = [
            MambaHostPool(
                MambaGeometry(
                    layers=range(1),
                    temporal_shape=(2,),
                    conv_shapes=[(2,)],
                    temporal_dtype=one,
                    conv_dtype=types[0],
                ),
                size=2,
            )
            for one in types
        ]
        assert pools[0].geometry != pools[1].geometry

    def test_the_halves_of_mha_are_one_buffer(self) -> None:
        pool = MHAHostPool(
            AttentionGeometry(layers=range(2), head_num=2, head_dim=2, dtype=torch.float16),
            size=8,
            page_size=4,
        )
        (buffer,) = pool.buffers
        assert buffer.shape == (2, 8, 2, 2, 2)
        assert pool.v_buffer.data_ptr() == buffer[1].data_ptr()

    def test_indexer_bytes(self) -> None:
        pool = IndexerHostPool(IndexerGeometry(layers=range(3)), size=128, page_size=64)
        assert pool.index_buffer.shape[-1] == 132 * 64
        assert pool.size_per_token == 132 * 3


small = st.integers(1, 4)


@st.composite
def any_pool(draw: st.DrawFn) -> HostPoolBase:
    page_size, page_num, layers = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(small)
    size = page_size * page_num
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float8_e5m2]))
    kind = draw(st.sampled_from([MHAHostPool, MLAHostPool, MambaHostPool, IndexerHostPool]))
    layout = draw(st.sampled_from(kind.LAYOUTS))
    if kind is MHAHostPool:
        return MHAHostPool(
            AttentionGeometry(
                layers=range(layers),
                head_num=draw(small),
                head_dim=draw(small),
                v_head_dim=draw(st.none() | small),
                dtype=dtype,
            ),
            size=size,
            page_size=page_size,
            layout=layout,
        )
    if kind is MLAHostPool:
        return MLAHostPool(
            MLAGeometry(layers=range(layers), kv_lora_rank=draw(small), dtype=dtype),
            size=size,
            page_size=page_size,
            layout=layout,
        )
    if kind is IndexerHostPool:
        return IndexerHostPool(
            IndexerGeometry(layers=range(layers), index_head_dim=8, quant_block_size=4),
            size=size,
            page_size=page_size,
            layout=layout,
        )
    shape = st.lists(small, min_size=1, max_size=3)
    return MambaHostPool(
        MambaGeometry(
            layers=range(layers),
            temporal_shape=draw(shape | st.just([0, 2])),
            conv_shapes=draw(st.lists(shape, min_size=1, max_size=3)),
            temporal_dtype=dtype,
            conv_dtype=draw(st.sampled_from([torch.uint8, torch.bfloat16])),
        ),
        size=size,
        layout=layout,
    )


@settings(max_examples=80, deadline=None)
@given(pool=any_pool(), data=st.data())
def test_any_geometry_partitions_its_buffers(pool: HostPoolBase, data: st.DataObject) -> None:
    """Pages cover every byte of the pool exactly once, and what goes in by one way comes out by the
    other."""
    for number, page in enumerate(pool.page_buffers(pages(pool))):
        for buffer in page:
            marks = bytes(before + number + 1 for before in buffer)
            buffer[:] = marks
    total = sum(value for buffer in pool.buffers for value in raw(buffer))
    assert total == sum((number + 1) * pool.geometry.page_bytes for number in range(pool.page_num))
    source, target = (data.draw(st.sampled_from(pages(pool))) for _ in range(2))
    pool.set_from_flat_data_page(target, pool.get_data_page(source))
    assert page_bytes(pool, target) == page_bytes(pool, source)


MHA = {
    "size": 8,
    "page_size": 4,
    "layers": range(2),
    "head_num": 2,
    "head_dim": 2,
    "dtype": torch.float16,
}
MLA = {"size": 8, "page_size": 4, "layers": range(2), "kv_lora_rank": 2, "dtype": torch.float16}
MAMBA = {
    "size": 8,
    "layers": range(2),
    "temporal_shape": (2,),
    "conv_shapes": [(2,)],
    "temporal_dtype": torch.float32,
    "conv_dtype": torch.float16,
}
INDEXER = {"size": 8, "page_size": 4, "layers": range(2)}


@pytest.mark.parametrize(
    ("kind", "good", "bad", "message"),
    [
        (
            MHAHostPool,
            MHA,
            {"size": 7},
            r"size must be a multiple of page_size \(4\), got 7; pass 8",
        ),
        (MHAHostPool, MHA, {"size": 0}, "size must be at least 1, got 0"),
        (MHAHostPool, MHA, {"page_size": 0}, "page_size must be at least 1"),
        (MHAHostPool, MHA, {"layers": range(0)}, "layers must name at least one layer"),
        (MHAHostPool, MHA, {"head_num": -1}, "head_num must be at least 1"),
        (MHAHostPool, MHA, {"head_dim": 0}, "head_dim must be at least 1"),
        (MHAHostPool, MHA, {"v_head_dim": 0}, "v_head_dim must be at least 1"),
        (
            MHAHostPool,
            MHA,
            {"layout": "page_last"},
            "layout must be one of layer_first, page_first.*got 'page_last'",
        ),
        (
            MHAHostPool,
            MHA,
            {"dtype": "float16"},
            "dtype must be a torch.dtype such as torch.bfloat16, got 'float16'",
        ),
        (MHAHostPool, MHA, {"size": 4 << 50}, "cannot map .* bytes of host memory"),
        (MLAHostPool, MLA, {"kv_lora_rank": 0}, "kv_lora_rank must be at least 1"),
        (MLAHostPool, MLA, {"layout": "page_head"}, "layout must be one of"),
        (MLAHostPool, MLA, {"dtype": None}, "dtype must be a torch.dtype"),
        (MambaHostPool, MAMBA, {"size": 0}, "size must be at least 1"),
        (MambaHostPool, MAMBA, {"layers": range(0)}, "layers must name at least one layer"),
        (MambaHostPool, MAMBA, {"temporal_dtype": 4}, "temporal_dtype must be a torch.dtype"),
        (MambaHostPool, MAMBA, {"conv_dtype": "half"}, "conv_dtype must be a torch.dtype"),
        (
            MambaHostPool,
            MAMBA,
            {"temporal_shape": (2, -1)},
            "temporal_shape must not hold negative numbers",
        ),
        (
            MambaHostPool,
            MAMBA,
            {"conv_shapes": [(2,), (0,)]},
            r"conv_shapes\[1\] must hold positive numbers",
        ),
        (
            MambaHostPool,
            MAMBA,
            {"conv_shapes": [], "temporal_shape": (0,)},
            "a page would have no bytes",
        ),
        (MambaHostPool, MAMBA, {"layout": "page_head"}, "layout must be one of"),
        (IndexerHostPool, INDEXER, {"size": 9}, "size must be a multiple of page_size"),
        (
            IndexerHostPool,
            INDEXER,
            {"index_head_dim": 100},
            r"quant_block_size \(128\) must divide index_head_dim \(100\)",
        ),
        (IndexerHostPool, INDEXER, {"quant_block_size": 0}, "quant_block_size must be at least 1"),
        (IndexerHostPool, INDEXER, {"layout": "page_head"}, "layout must be one of"),
    ],
)
def test_bad_arguments_name_the_field(
    kind: type[HostPoolBase], good: dict[str, object], bad: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidPoolError, match=message):
        make_pool(kind, **{**good, **bad})


def test_page_buffers_are_cheap() -> None:
    """0.13 us for a component was measured; an allocation or a tensor operation for each would cost
    several times that."""
    pool = MHAHostPool(
        AttentionGeometry(layers=range(2), head_num=2, head_dim=8, dtype=torch.float16),
        size=256 * 16,
        page_size=16,
    )
    slots = list(range(0, 128 * 16, 16))
    seconds = min(timeit.repeat(lambda: pool.page_buffers(slots), number=20, repeat=5)) / 20
    assert seconds / 256 < 1e-6
