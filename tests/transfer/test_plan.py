"""Plans: which way the pages of a pool go, from lengths alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hicache_storage.pools import (
    AttentionGeometry,
    DevicePages,
    MambaGeometry,
    PagedHostPool,
    host_tensor,
)
from hicache_storage.transfer.plan import How, load_group, make_plan
from tests.transfer.rig import LAYERS, pools_of

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
    return PagedHostPool(shape, size=2 * page_size, page_size=page_size, layout=layout)


@pytest.mark.parametrize(
    ("layout", "page_size", "way", "out", "into"),
    [
        # Half a page of 64 tokens is 4 MiB; a layer of it is 128 KiB.
        ("page_first", 64, None, STAGED, KERNEL),
        ("page_first_direct", 64, None, STAGED, STAGED),
        # An eighth of the layers is 128 KiB.
        ("page_first_direct", 16, None, STAGED, KERNEL),
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
    pool = PagedHostPool(shape, size=2)
    temporal, conv = planned(pool)
    assert (temporal.out, temporal.into, temporal.layer_bytes) == (DIRECT, DIRECT, 1 << 20)
    assert (conv.out, conv.into, conv.layer_bytes) == (KERNEL, KERNEL, 24 << 10)


def test_parts_of_other_lengths_are_planned_apart():
    k, v = planned(mha("page_first", 8, 128, v_head_dim=64))
    assert (k.out, k.layer_bytes, v.out, v.layer_bytes) == (STAGED, 16384, KERNEL, 8192)
    assert k.parts == v.parts == 1


@pytest.mark.parametrize(
    ("kib", "layers", "group"), [(128, 32, 4), (256, 32, 2), (2, 32, 4), (128, 61, 4), (2, 3, 1)]
)
def test_a_load_comes_in_groups_of_layers(kib, layers, group):
    assert load_group(kib << 10, layers) == group


def test_layers_may_lie_anywhere():
    """A pool whose layers were allocated one by one has no pages of one piece."""
    device, host = pools_of("mla", "page_first_direct")
    (whole,) = make_plan(device, host, "dma")
    (apart,) = make_plan(device, pools_of("mla", "page_first")[0], "dma")
    assert (whole.out, whole.into) == (STAGED, STAGED)
    assert (apart.out, apart.into, apart.layer_num) == (DIRECT, DIRECT, LAYERS)
    # A block, in which the layers are in another order; and a layer that lies in the next page.
    turned = SimpleNamespace(layer=lambda layer: host.layer((0, 2, 1)[layer]))
    (found,) = make_plan(device, turned, "dma")
    assert (found.out, found.into) == (STAGED, DIRECT)
    beyond = [slice(None, -1), slice(None, -1), slice(1, None)]
    parts = SimpleNamespace(
        layer=lambda layer: tuple(part[beyond[layer]] for part in host.layer(layer))
    )
    (found,) = make_plan(device, parts, "dma")
    assert (found.out, found.into) == (DIRECT, DIRECT)
