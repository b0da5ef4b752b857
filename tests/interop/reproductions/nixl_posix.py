"""What matrix.md says about `sglang-nixl`, shown with the driver alone: `python nixl_posix.py [RULE]...`"""

import os
import tempfile
from pathlib import Path

import torch
from engine import (
    all_pages,
    config,
    fill,
    holds,
    kv_pool,
    last_page,
    meet,
    put,
    put_side,
    slots,
    too_short,
    with_states,
)
from sglang.srt.mem_cache.hicache_storage import PoolName
from shows import main, shows

VARIABLE = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"


def make_store(pool, **changes):
    """A rank with a host pool; all of one run have the same directory."""
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    extra = {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False}
    store = HiCacheNixl(config(extra, **changes))
    store.register_mem_pool_host(pool)
    return store


@shows("ID-1")
def names_of_models_run_together(make):
    """A page of the model a/b is delivered to the model a-b, and one of bfloat16 to float16."""
    meet(make, {"model_name": "a/b"}, {"model_name": "a-b"})
    pool, other = kv_pool(), kv_pool(dtype=torch.float16)
    assert put(make(pool), pool, ["k2"])
    assert make(other).batch_get_v1(["k2"], slots(3)) == [True]
    assert not holds(other, 3, 1)


@shows("ID-4")
def stages_of_a_pipeline_meet(make):
    """The first stage of a pipeline is delivered the page of the second."""
    meet(make, {"pp_rank": 1, "pp_size": 2}, {"pp_rank": 0, "pp_size": 2})


@shows("ID-5")
def keys_climb_out(make):
    """A key with dots is written outside the store."""
    pool, outside = kv_pool(), Path(os.environ[VARIABLE]).parent
    assert put(make(pool), pool, ["../../escaped"])
    assert list(outside.glob("escaped*"))


@shows("EX-1")
def the_hit_is_a_minimum(make):
    """KV has 7 pages, states end after 2 and 6, a side pool after 5; the hit is 5, with no state."""
    side = kv_pool()
    store, states, keys = with_states(make, 7, "ex1")
    store.register_mem_host_pool_v2(side, PoolName.SWA)
    assert put_side(store, states, PoolName.MAMBA, [keys[1], keys[5]])
    assert put_side(store, side, PoolName.SWA, keys[:5])
    asked = [last_page(PoolName.MAMBA), all_pages(PoolName.SWA)]
    assert store.batch_exists_v2(keys, asked).kv_hit_pages == 5


@shows("EX-5")
def restorable_lengths_are_not_listed(make):
    """A state is kept after page 4 alone; restorable lengths are left out, which stands for all."""
    store, states, keys = with_states(make, 4, "ex5")
    assert put_side(store, states, PoolName.MAMBA, keys[3:])
    found = store.batch_exists_v2(keys, [last_page(PoolName.MAMBA)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, None)


@shows("EX-9")
def an_unreadable_page_exists(make):
    """A page that is too short to be read goes on existing."""
    too_short(make)


@shows("GET-5")
def a_longer_page_is_delivered(make):
    """A page that is twice as long as asked for is delivered, its first half for the whole."""
    half, whole = kv_pool(page_bytes=8192), kv_pool()
    assert put(make(whole), whole, ["long"])
    assert make(half).batch_get_v1(["long"], slots(3)) == [True]


@shows("GET-3", "SET-1")
def one_missing_page_hides_the_batch(make):
    """Pages that are stored are answered False when another one of their batch is missing."""
    pool = kv_pool()
    store = make(pool)
    assert put(store, pool, ["one", "two"])
    assert store.batch_get_v1(["one", "missing", "two"], slots(3, 4, 5)) == [False] * 3
    assert store.batch_get_v1(["one", "two"], slots(3, 4)) == [True, True]


@shows("SET-3")
def a_page_is_written_again(make):
    """A set of a page that exists writes it again, here with other bytes."""
    pool = kv_pool()
    store = make(pool)
    assert put(store, pool, ["again"], value=1)
    assert put(store, pool, ["again"], value=2)
    fill(pool, 3, 0)
    assert store.batch_get_v1(["again"], slots(3)) == [True]
    assert holds(pool, 3, 2)


@shows("LC-4")
def clear_takes_everything(make):
    """Clearing one model's store removes another model's pages, and files of others."""
    pool, stranger = kv_pool(), Path(os.environ[VARIABLE]) / "stranger.txt"
    mine, yours = make(pool, model_name="mine"), make(pool, model_name="yours")
    assert put(yours, pool, ["k"])
    stranger.write_text("nothing of a cache")
    mine.clear()
    assert yours.batch_exists(["k"]) == 0
    assert not stranger.exists()


if __name__ == "__main__":
    os.environ[VARIABLE] = str(Path(tempfile.mkdtemp(prefix="reproduction-"), "store"))
    main(make_store)
