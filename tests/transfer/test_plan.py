"""Plans: which way the pages of a pool go, from lengths alone."""

from __future__ import annotations

import pytest
import torch
from transfer_bench import KINDS, LAYERS

from hicache_storage.pools import (
    AttentionGeometry,
    DevicePages,
    MambaGeometry,
    MambaHostPool,
    MHAHostPool,
    MLAGeometry,
    MLAHostPool,
    host_tensor,
)
from hicache_storage.pools.pages import check_pages, page_numbers
from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer.copies import growing
from hicache_storage.transfer.plan import MIN_DMA_BYTES, How, describe, make_plan

KERNEL, STAGED, DIRECT = How.KERNEL, How.STAGED, How.DIRECT
BF16 = torch.bfloat16


def planned(pool, way=None):
    """The plan for a host pool and a device pool that nobody touches."""
    layers = [
        [host_tensor((pool.size, *part[0, 0].shape), part.dtype) for part in pool.layer(layer)]
        for layer in range(pool.layer_num)
    ]
    rows = pool.layer(0)[0].shape[1]
    device = DevicePages(layers, pool.page_size, rows_per_page=rows)
    return make_plan(device, pool, way)


def mha(layout, page_size, head_dim=128, **fields):
    shape = AttentionGeometry(layers=range(32), head_num=8, head_dim=head_dim, dtype=BF16, **fields)
    return MHAHostPool(shape, size=2 * page_size, page_size=page_size, layout=layout)


@pytest.mark.parametrize(
    ("layout", "page_size", "way", "out", "into"),
    [
        # Half a page of 64 tokens is 4 MiB; a layer of it is 128 KiB.
        ("page_first", 64, None, STAGED, KERNEL),
        ("page_first_direct", 64, None, STAGED, KERNEL),
        ("page_head", 64, None, STAGED, KERNEL),
        ("layer_first", 64, None, KERNEL, KERNEL),
        # 64 KiB, as SGLang has by default, and just the shortest pieces that DMA is fast for.
        ("page_first", 1, None, KERNEL, KERNEL),
        ("page_first", 4, None, KERNEL, KERNEL),
        ("page_first", 8, None, STAGED, KERNEL),
        # A layer is long enough alone.
        ("layer_first", 256, None, DIRECT, DIRECT),
        ("page_first_direct", 256, None, DIRECT, DIRECT),
        ("page_first", 256, None, STAGED, KERNEL),
        # Forced.
        ("page_first", 64, "kernel", KERNEL, KERNEL),
        ("page_first", 1, "dma", STAGED, STAGED),
        ("page_first_direct", 64, "dma", STAGED, STAGED),
        ("page_head", 64, "dma", STAGED, KERNEL),
        ("layer_first", 64, "dma", DIRECT, DIRECT),
    ],
)
def test_lengths_decide(layout, page_size, way, out, into):
    (group,) = planned(mha(layout, page_size), way)
    assert (group.out, group.into, group.parts, group.layer_num) == (out, into, 2, 32)
    assert group.layer_bytes == page_size * 2048


def test_states_of_some_mib_go_by_dma_alone():
    state = {"temporal_shape": (64, 128, 64), "conv_shapes": ((4096, 3),)}
    shape = MambaGeometry(layers=range(4), temporal_dtype=BF16, conv_dtype=BF16, **state)
    pool = MambaHostPool(shape, size=2)
    temporal, conv = planned(pool)
    assert (temporal.out, temporal.into, temporal.layer_bytes) == (DIRECT, DIRECT, 1 << 20)
    assert (conv.out, conv.into, conv.layer_bytes) == (KERNEL, KERNEL, 24 << 10)


def test_parts_of_other_lengths_are_planned_apart():
    k, v = planned(mha("page_first", 8, 128, v_head_dim=64))
    assert (k.out, k.layer_bytes, v.out, v.layer_bytes) == (STAGED, 16384, KERNEL, 8192)
    assert k.parts == v.parts == 1


def test_the_log_says_what_and_why():
    pool = MLAHostPool(
        MLAGeometry(layers=range(61), kv_lora_rank=576, dtype=BF16), size=128, page_size=64
    )
    (group,) = plan = planned(pool)
    assert group.layer_bytes * 61 >= MIN_DMA_BYTES > group.layer_bytes
    assert describe(plan) == (
        "1 part of 61 layers: write-back DMA and a kernel, load rows by a kernel (pieces of 73728 "
        "bytes a layer, 4497408 a page)"
    )


def test_groups_of_layers_grow():
    assert [len(run) for run in growing(32)] == [1, 1, 2, 4, 8, 16]
    assert [len(run) for run in growing(5)] == [1, 1, 2, 1]
    assert [layer for run in growing(61) for layer in run] == list(range(61))


def test_layers_may_lie_anywhere():
    """A pool whose layers were allocated one by one has no pages of one piece."""
    device, host = KINDS["mla"].pair("page_first_direct", "cpu")
    (whole,) = make_plan(device, host, "dma")
    (apart,) = make_plan(device, KINDS["mla"].pair("page_first", "cpu")[0], "dma")
    assert (whole.out, whole.into) == (STAGED, STAGED)
    assert (apart.out, apart.into, apart.layer_num) == (DIRECT, DIRECT, LAYERS)


# Page numbers
# ---------------------------------------------------------------------------------------------


def test_pages_are_whole_and_in_order():
    two = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), torch.arange(8).view(2, 4)
    assert page_numbers(two, 4).tolist() == [[2, 0], [0, 1]]
    assert page_numbers([torch.tensor([[4, 5], [2, 3]])], 2).tolist() == [[2, 1]]
    assert page_numbers([torch.tensor([7, 3, 7])], 1).tolist() == [[7, 3, 7]]
    # Not next to each other in memory; and pages of another number than a power of two.
    assert page_numbers([torch.tensor([6, 0, 7, 0, 8, 0])[::2]], 3).tolist() == [[2]]
    many = torch.randperm(5000).unsqueeze(1) * 16 + torch.arange(16)
    assert torch.equal(page_numbers([many.view(-1)] * 2, 16)[1], many[:, 0] // 16)
    wrong = many.clone()
    wrong[4321, 7] += 1
    with pytest.raises(InvalidTransferError, match="whole pages of 16"):
        check_pages(wrong.view(-1), 16)


@pytest.mark.parametrize(
    "wrong", [[0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, 4], [0, 1, 2, 3, 8, 9, 10, 10]]
)
def test_what_is_no_page_is_refused(wrong):
    with pytest.raises(InvalidTransferError, match=r"whole pages of 4 consecutive slots, not"):
        page_numbers([torch.tensor(wrong)], 4)
    with pytest.raises(InvalidTransferError, match=r"int64, got torch\.int32"):
        page_numbers([torch.tensor([0], dtype=torch.int32)], 1)
