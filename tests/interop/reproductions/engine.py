"""SGLang's side of the reproductions: its configuration and its host pools.

Nothing of this project is imported here: what a script shows is shown by the driver alone.
"""

from __future__ import annotations

import itertools

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

PAGES = 16
_MEETINGS = itertools.count()


def config(extra, **changes):
    """The configuration of a rank: one rank of one model, with some fields changed."""
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "model",
    }
    return HiCacheStorageConfig(**{**fields, **changes}, extra_config=extra)


def kv_pool(page_bytes=16384, dtype=torch.bfloat16):
    """A pool of `PAGES` pages of one slot; half of a page is K and half is V."""
    row = page_bytes // 2 // dtype.itemsize
    device = MHATokenToKVPool(
        size=PAGES,
        page_size=1,
        dtype=dtype,
        head_num=1,
        head_dim=row,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        1,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=PAGES,
        start_layer=0,
        end_layer=1,
    )


def mamba_pool(page_bytes=8192):
    """A pool of `PAGES` states."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(1, PAGES, 1, page_bytes // 8),
        conv=(torch.zeros(1, PAGES, 1, page_bytes // 4, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=PAGES, pin_memory=False, layout="page_first")


def fill(pool, page, value):
    """Make every element of a page `value`."""
    blank = pool.get_dummy_flat_data_page()
    pool.set_from_flat_data_page(page, torch.full_like(blank, value))


def holds(pool, page, value):
    """Whether every element of a page is `value`."""
    return bool((pool.get_data_page(page, flat=True) == value).all())


def slots(*pages):
    """The slots of pages, which have one each."""
    return torch.tensor(pages, dtype=torch.int64)


def put(store, pool, keys, value=1):
    """Store a page of `value` under each key; whether all were stored."""
    pages = range(len(keys))
    for page in pages:
        fill(pool, page, value)
    return all(store.batch_set_v1(keys, slots(*pages)))


def put_side(store, pool, name, keys, value=1):
    """The same for a side pool."""
    for page in range(len(keys)):
        fill(pool, page, value)
    transfer = PoolTransfer(name, slots(*range(len(keys))), keys=keys)
    return all(store.batch_set_v2([transfer])[name])


def all_pages(name):
    """Ask for a side pool that is needed whole, as SGLang asks."""
    return PoolTransfer(name, hit_policy=PoolHitPolicy.ALL_PAGES)


def last_page(name):
    """Ask for a side pool of which the last page is needed; the key is the one that SGLang sends."""
    return PoolTransfer(name, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES)


def meet(make, first, second):
    """Show that a page of one rank is delivered to another; ranks are changes of the configuration."""
    pool, other, keys = kv_pool(), kv_pool(), [f"meet-{next(_MEETINGS)}"]
    assert put(make(pool, **first), pool, keys, value=2)
    assert make(other, **second).batch_get_v1(keys, slots(3)) == [True]
    assert holds(other, 3, 2)


def with_states(make, count, mark):
    """A rank whose store has the KV of some keys, with a pool of states; the pool and the keys."""
    kv, states = kv_pool(), mamba_pool()
    store, keys = make(kv), [f"{mark}-{page}" for page in range(count)]
    store.register_mem_host_pool_v2(states, PoolName.MAMBA)
    assert put(store, kv, keys)
    return store, states, keys


def too_short(make):
    """A rank whose store has half of the page "short", which it cannot read and goes on finding."""
    half, whole = kv_pool(page_bytes=8192), kv_pool()
    assert put(make(half), half, ["short"])
    store = make(whole)
    assert store.batch_get_v1(["short"], slots(3)) == [False]
    assert store.batch_exists(["short"]) == 1
    return store, whole
