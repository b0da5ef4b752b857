"""Misuse is refused by name, before any I/O (rule FT-2).

The suite's `MisuseCases` show for every call that wrong indices, keys and call infos are refused; here are
the messages, and layers that the suite does not have around a driver.
"""

from __future__ import annotations

import numpy
import pytest
import torch

from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.spec import (
    HiCacheStorageExtraInfo,
    InvalidTransferError,
    PoolHitPolicy,
    PoolTransfer,
)

PAGE = torch.arange(2)


@pytest.mark.parametrize(
    ("indices", "keys", "message"),
    [
        (PAGE.to("meta"), ["a"], "must be on the CPU, got meta"),
        (torch.arange(4).view(2, 2), ["a", "b"], "4 entries in one dimension"),
        (torch.tensor([6, 7]), ["a"], "name a page twice"),
    ],
)
def test_a_wrong_transfer_is_named(kit, indices, keys, message):
    storage, pool = kit.memory_storage()
    good = pool.transfer("kv", ["good"], [3])
    with pytest.raises(InvalidTransferError, match=message):
        storage.batch_get_v2([good, PoolTransfer("kv", indices, keys=keys)])
    assert storage.operations == []


@pytest.fixture(params=["bare", "layers"])
def around(kit, request):
    """A dict with the page `a`: by itself, in layers with a breaker that takes one fault."""
    storage, pool = kit.memory_storage()
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
    layers = wrap(storage, StorageOptions(breaker_threshold=1))
    layers.register_mem_host_pool_v2(pool, "kv")
    storage.operations.clear()
    return storage if request.param == "bare" else layers, storage, pool


def transfer(keys):
    return PoolTransfer("kv", PAGE, keys=keys)


def prefix(keys):
    return HiCacheStorageExtraInfo(prefix_keys=keys)


WRONG_KEYS = ["ab", None, 7, iter(["a"]), numpy.array(["a", "b"]), {"a", "b"}, [1], ["a\0"]]
CALLS = {
    "exists": lambda asked, keys: asked.batch_exists_v2(keys),
    "present": lambda asked, keys: asked.batch_present(keys),
    "get": lambda asked, keys: asked.batch_get_v2([transfer(keys)]),
    "delete": lambda asked, keys: asked.delete(keys),
    "window": lambda asked, keys: asked.batch_exists_v2(
        ["a"], [transfer(3 if keys is None else keys)]
    ),
    "prefix of exists": lambda asked, keys: asked.batch_exists_v2(
        ["a"], None, prefix(3 if keys is None else keys)
    ),
    "prefix of get": lambda asked, keys: asked.batch_get_v2(
        [transfer(["a"])], prefix(3 if keys is None else keys)
    ),
    "transfers of get": lambda asked, keys: asked.batch_get_v2(keys),
    "transfers of set": lambda asked, keys: asked.batch_set_v2(keys),
    "transfers of exists": lambda asked, keys: asked.batch_exists_v2(
        ["a"], 3 if keys is None else keys
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_list_of_keys_is_nobodys_fault(around, call):
    """`delete("ab")` deleted the pages `a` and `b`; five deletes of an iterator opened the breaker
    for everybody."""
    asked, storage, _pool = around
    # Of a window only the number of keys counts.
    for keys in WRONG_KEYS if call != "window" else WRONG_KEYS[:5]:
        with pytest.raises(InvalidTransferError, match=r"key|transfers"):
            CALLS[call](asked, keys)
    assert storage.operations == []
    assert (asked.fault_count(), asked.get_stats().breaker_state) == (0, "closed")


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("extra", [{"deadline_seconds": 1.0}, "chat_7", 1.0, []], ids=repr)
def test_extra_info_of_another_type(around, extra, is_open):
    """It was a bare AttributeError out of a layer, or taken for none."""
    asked, storage, pool = around
    for breaker in getattr(getattr(asked, "inner", asked), "breakers", {}).values():
        if is_open:
            breaker.failed()
    for call in (
        lambda: asked.batch_exists_v2(["a"], None, extra),
        lambda: asked.batch_present(["a"], extra_info=extra),
        lambda: asked.batch_get_v2([pool.transfer("kv", ["a"], [0])], extra),
        lambda: asked.batch_set_v2([pool.transfer("kv", ["b"], [0])], extra),
    ):
        with pytest.raises(InvalidTransferError, match="extra_info"):
            call()
    assert storage.operations == []
    assert asked.fault_count() == 0


@pytest.mark.parametrize("name", [None, 3, b"kv"])
def test_a_name_of_a_pool_that_is_no_text(around, name):
    asked, _storage, pool = around
    for call in (
        lambda: asked.delete(["a"], pool=name),
        lambda: asked.register_mem_host_pool_v2(pool, name),
    ):
        with pytest.raises(InvalidTransferError, match="a pool's name is a text"):
            call()


BLOCKS = {"hit_policy": PoolHitPolicy.BLOCK_GROUPS}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (PoolTransfer, {"name": None}, "a pool's name is a text"),
        (PoolTransfer, {"name": "KV"}, "not of the form"),
        (PoolTransfer, {"name": "kv", "indices_from_pool": 3}, "a pool's name is a text"),
        (PoolTransfer, {"name": "kv", "hit_policy": "most"}, "hit_policy 'most' is none of all_p"),
        (PoolTransfer, {"name": "kv", "hit_policy": None}, "hit_policy None"),
        (PoolTransfer, {"name": "kv", **BLOCKS, "block_pages": "4"}, "block_pages must be a num"),
        (PoolTransfer, {"name": "kv", **BLOCKS, "group_pages": 1.5}, "group_pages"),
        (HiCacheStorageExtraInfo, {"request_id": 5}, "request_id"),
        (HiCacheStorageExtraInfo, {"request_id": b"x"}, "request_id"),
        (HiCacheStorageExtraInfo, {"prefix_keys": "ab"}, "prefix_keys"),
        (HiCacheStorageExtraInfo, {"cancellation": 7}, "cancellation"),
    ],
)
def test_a_wrong_field_is_named(kind, fields, message):
    with pytest.raises(InvalidTransferError, match=message):
        kind(**fields)
