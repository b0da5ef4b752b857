"""A KV pool is registered only under an identity that describes its pages."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.pools import PagedHostPool
from hicache_storage.spec import InvalidPoolError
from hicache_storage.testing import BytePool
from tests.pools.foreign import AddressPool, P
from tests.support.pools import make_pool

FITTING = {"page_size": P, "layout": "page_first", "kv_dtype": "bfloat16"}
WRONG = {"page_size": 2 * P, "layout": "page_frist", "kv_dtype": "bananas"}


def own_pool(dtype=torch.bfloat16, layout="page_first"):
    shape = {"layers": range(1), "head_num": 2, "head_dim": 4, "dtype": dtype}
    return make_pool(PagedHostPool, "mha", size=4 * P, page_size=P, layout=layout, **shape)


@pytest.mark.parametrize("make", [own_pool, AddressPool])
@pytest.mark.parametrize("field", WRONG)
def test_a_pool_of_another_kind_is_refused_by_the_field(kit, make, field):
    storage = kit.storage(kit.identity(**{**FITTING, field: WRONG[field]}))
    with pytest.raises(InvalidPoolError, match=f"pass {field}={FITTING[field]!r}"):
        storage.register_mem_host_pool_v2(make(), "kv")
    assert not storage.pools
    assert not storage.operations


def test_other_heads_are_refused(kit):
    wrong = {"head_start": 2, "head_end": 6, **FITTING}
    with pytest.raises(InvalidPoolError, match="pass head_end=4"):
        kit.storage(kit.identity(**wrong)).register_mem_host_pool_v2(own_pool(), "kv")
    # Fields that decide nothing there.
    storage = kit.storage(kit.identity(kv_replicated=True, **wrong))
    storage.register_mem_host_pool_v2(own_pool(), "kv")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.uint8, "fp8_e4m3"),
        (torch.int8, "int4"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e5m2, "float8_e5m2"),
        (torch.float32, torch.float32),
    ],
)
def test_names_of_quantized_kv(kit, dtype, kv_dtype):
    storage = kit.storage(kit.identity(**{**FITTING, "kv_dtype": kv_dtype}))
    storage.register_mem_host_pool_v2(own_pool(dtype), "kv")


def test_fp8_of_the_other_kind_is_refused(kit):
    storage = kit.storage(kit.identity(**{**FITTING, "kv_dtype": "fp8_e5m2"}))
    with pytest.raises(InvalidPoolError, match="pass kv_dtype='fp8_e4m3'"):
        storage.register_mem_host_pool_v2(own_pool(torch.float8_e4m3fn), "kv")


def test_side_pools_and_bare_geometries_are_not_compared(kit):
    storage = kit.storage(kit.identity(**WRONG))
    storage.register_mem_host_pool_v2(own_pool(torch.float32, "layer_first"), "swa")
    storage.register_mem_host_pool_v2(BytePool(), "kv")
    assert set(storage.pools) == {"kv", "swa"}
