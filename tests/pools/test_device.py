"""Device pools: their tensors, their slots, and what host pools fit them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hicache_storage.pools import (
    IndexerDevicePool,
    IndexerHostPool,
    MambaDevicePool,
    MambaHostPool,
    MHADevicePool,
    MHAHostPool,
    MLADevicePool,
    MLAGeometry,
    MLAHostPool,
)
from hicache_storage.spec import InvalidPoolError, SlotError
from tests.support.pools import make_pool, page_layer

MHA = {
    "size": 8,
    "page_size": 4,
    "layers": range(3),
    "head_num": 2,
    "head_dim": 6,
    "v_head_dim": 4,
    "dtype": torch.bfloat16,
}
MLA = {
    "size": 8,
    "page_size": 4,
    "layers": range(3),
    "kv_lora_rank": 5,
    "dtype": torch.float8_e4m3fn,
}
MAMBA = {
    "size": 8,
    "layers": range(3),
    "temporal_shape": (2, 3),
    "conv_shapes": ((5,), (3, 2)),
    "temporal_dtype": torch.float32,
    "conv_dtype": torch.bfloat16,
}
INDEXER = {
    "size": 8,
    "page_size": 4,
    "layers": range(3),
    "index_head_dim": 32,
    "quant_block_size": 16,
}
KINDS = [
    (MHADevicePool, MHAHostPool, MHA, [(8, 2, 6), (8, 2, 4)], [(2, 4, 2, 6), (2, 4, 2, 4)]),
    (MLADevicePool, MLAHostPool, MLA, [(8, 1, 5)], [(2, 4, 1, 5)]),
    (
        MambaDevicePool,
        MambaHostPool,
        MAMBA,
        [(8, 2, 3), (8, 5), (8, 3, 2)],
        [(8, 1, 2, 3), (8, 1, 5), (8, 1, 3, 2)],
    ),
    (IndexerDevicePool, IndexerHostPool, INDEXER, [(2, 160)], [(2, 1, 160)]),
]
KIND = pytest.mark.parametrize(("device", "host", "arguments", "tensors", "pages"), KINDS)


@KIND
def test_each_layer_has_tensors_of_its_own(device, host, arguments, tensors, pages):
    pool = make_pool(device, **arguments, device="cpu")
    assert (pool.layer_num, pool.size, pool.page_num) == (3, 8, 8 // pool.page_size)
    for layer in range(3):
        assert [tuple(tensor.shape) for tensor in pool.layers[layer]] == tensors
        assert [tuple(part.shape) for part in pool.layer(layer)] == pages
        assert all(
            tensor.is_contiguous() and tensor.device == torch.device("cpu")
            for tensor in pool.layers[layer]
        )
        for part, page in zip(
            pool.layer(layer), page_layer(pool, 8 - pool.page_size, layer), strict=True
        ):
            assert page.data_ptr() == part[-1].data_ptr()
            assert page.shape == part[-1].shape
    memory = {tensor.data_ptr() for layer in pool.layers for tensor in layer}
    assert len(memory) == 3 * len(tensors)


@KIND
def test_slots_are_handed_out_once(device, host, arguments, tensors, pages):
    pool = make_pool(device, **arguments, device="cpu")
    slots = pool.alloc(8)
    assert sorted(slots.tolist()) == list(range(8))
    assert pool.alloc(pool.page_size) is None
    assert pool.free(slots[: pool.page_size]) == pool.page_size
    assert pool.available_size() == pool.page_size
    with pytest.raises(SlotError, match="given back twice"):
        pool.free(slots[: pool.page_size])
    pool.clear()
    assert pool.available_size() == 8


@KIND
def test_a_host_pool_of_the_same_arguments_fits(device, host, arguments, tensors, pages):
    pool = make_pool(device, **arguments, device="cpu")
    for layout in host.LAYOUTS:
        pool.check_host_pool(
            make_pool(host, **dict(arguments, size=16), layout=layout, pin_memory=False)
        )
    other = next(kind[1] for kind in KINDS if kind[1] is not host)
    with pytest.raises(
        InvalidPoolError, match=f"is backed up by {host.__name__}, not by {other.__name__}"
    ):
        pool.check_host_pool(object.__new__(other))


DIFFERENCES = [
    (MHADevicePool, MHAHostPool, MHA, {"page_size": 2}),
    (MHADevicePool, MHAHostPool, MHA, {"layers": range(4)}),
    (MHADevicePool, MHAHostPool, MHA, {"head_num": 1}),
    (MHADevicePool, MHAHostPool, MHA, {"head_dim": 8}),
    (MHADevicePool, MHAHostPool, MHA, {"v_head_dim": 6}),
    (MHADevicePool, MHAHostPool, MHA, {"dtype": torch.float16}),
    (MLADevicePool, MLAHostPool, MLA, {"kv_lora_rank": 6}),
    (MLADevicePool, MLAHostPool, MLA, {"dtype": torch.float8_e5m2}),
    (MambaDevicePool, MambaHostPool, MAMBA, {"layers": range(2)}),
    (MambaDevicePool, MambaHostPool, MAMBA, {"temporal_shape": (3, 2)}),
    (MambaDevicePool, MambaHostPool, MAMBA, {"conv_shapes": ((5,),)}),
    (MambaDevicePool, MambaHostPool, MAMBA, {"temporal_dtype": torch.float64}),
    (MambaDevicePool, MambaHostPool, MAMBA, {"conv_dtype": torch.float16}),
    (IndexerDevicePool, IndexerHostPool, INDEXER, {"index_head_dim": 16}),
    (IndexerDevicePool, IndexerHostPool, INDEXER, {"quant_block_size": 32}),
]


@pytest.mark.parametrize(("device", "host", "arguments", "difference"), DIFFERENCES)
def test_a_host_pool_that_differs_is_refused_by_field(device, host, arguments, difference):
    pool = make_pool(device, **arguments, device="cpu")
    (field,) = difference
    field = {"layers": "layer_num", "kv_lora_rank": "kv_cache_dim"}.get(field, field)
    with pytest.raises(
        InvalidPoolError, match=f"^{field} is .* in the host pool and .* in {device.__name__}"
    ):
        pool.check_host_pool(make_pool(host, **{**arguments, **difference}, pin_memory=False))


@KIND
def test_arguments_out_of_range_are_refused_by_name(device, host, arguments, tensors, pages):
    for field in arguments:
        if isinstance(arguments[field], int):
            with pytest.raises(InvalidPoolError, match=field):
                make_pool(device, **{**arguments, field: 0}, device="cpu")
        elif "dtype" in field:
            with pytest.raises(InvalidPoolError, match=field):
                make_pool(device, **{**arguments, field: "bfloat16"}, device="cpu")


def test_a_state_may_be_all_convolution():
    pool = make_pool(MambaDevicePool, **{**MAMBA, "temporal_shape": (0, 3)}, device="cpu")
    assert [tuple(part.shape) for part in pool.layer(0)] == [(8, 1, 5), (8, 1, 3, 2)]
    with pytest.raises(InvalidPoolError, match="conv_shapes is empty"):
        make_pool(
            MambaDevicePool, **{**MAMBA, "temporal_shape": (0, 3), "conv_shapes": ()}, device="cpu"
        )


def test_more_memory_than_there_is_is_refused():
    with pytest.raises(InvalidPoolError, match="cannot allocate"):
        make_pool(MLADevicePool, **{**MLA, "size": 1 << 50}, device="cpu")


def test_the_zeros_are_there_before_any_stream_writes(monkeypatch):
    """No stream of a model or a copy waits for the one on which they come."""
    waited, zeros = [], torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda shape, *, dtype, device=None: zeros(shape, dtype=dtype)
    )
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(synchronize=lambda: waited.append(device)),
    )
    place = torch.device("cuda", 1)
    MLADevicePool(
        MLAGeometry(layers=range(2), kv_lora_rank=3, dtype=torch.float32),
        size=4,
        page_size=2,
        device=place,
    )
    assert waited == [place]
