"""Pages in shards of KV heads, beside the suite's `ShardCases`: the SDK's own pools and layouts."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.pools import AttentionGeometry, PagedHostPool, page_access
from hicache_storage.pools.shards import head_shards
from hicache_storage.spec import Capabilities, InvalidPoolError, PageGeometry, from_memory
from hicache_storage.testing import BytePool, MemoryObjects, MemoryStorage
from tests.pools.foreign import read, some_pages, write
from tests.support.pools import make_pool

KEYS = ["a", "b", "c"]
LATENT = {"layers": range(1), "kv_lora_rank": 4, "dtype": torch.int16, "size": 8, "page_size": 2}
HEADS_FIRST = {
    "layer_first": (2, 1, 0, 3),
    "page_first": (2, 0, 1, 3),
    "page_first_direct": (3, 0, 2, 1, 4),
    "page_head": (1, 0, 2, 3, 4),
}


@pytest.mark.parametrize("v_dim", [None, 3])
@pytest.mark.parametrize("layout", AttentionGeometry.ORDERS)
@pytest.mark.parametrize("shards", [1, 2, 8])
def test_a_shard_is_the_page_of_a_pool_with_its_heads_alone(layout, shards, v_dim):
    """So ranks of any TP size store the same bytes."""

    def pool_of(heads):
        shape = {"layers": range(3), "head_num": heads, "head_dim": 6, "v_head_dim": v_dim}
        own = {"size": 8, "page_size": 2, "layout": layout, "dtype": torch.int16}
        return make_pool(PagedHostPool, "mha", **shape, **own)

    whole, slots = pool_of(8), [6, 0]
    parts = head_shards(page_access(whole), shards, "kv")
    pages = [some_pages(part, number + 2)[-2:] for number, part in enumerate(parts)]
    for part, of_part in zip(parts, pages, strict=True):
        write(part, slots, of_part)
    for number, (part, of_part) in enumerate(zip(parts, pages, strict=True)):
        pool, heads = pool_of(8 // shards), slice(number * 8 // shards, (number + 1) * 8 // shards)
        for tensor, of_whole in zip(pool.parts, whole.parts, strict=True):
            axes = HEADS_FIRST[layout]
            tensor.permute(axes).copy_(of_whole.permute(axes)[heads])
        access = page_access(pool)
        assert part.geometry == access.geometry
        assert read(part, slots) == read(access, slots) == of_part
        assert not any(map(any, read(access, [2, 4])))


def stored_rank(kit, objects, size=1, number=0):
    """A rank that has stored its 8 / `size` of 8 shards of each page, and the transfer of all."""
    identity = kit.identity(store_tp_size=8, tp_size=size, tp_rank=number)
    storage, pool = MemoryStorage(identity, objects), heads_pool(8 // size, (1, 1))
    kit.opened.append(storage)
    storage.register_mem_host_pool_v2(pool, "kv")
    transfer = pool.transfer("kv", KEYS, range(3))
    assert storage.batch_set_v2([transfer]) == {"kv": [True] * 3}
    return storage, transfer


def test_a_page_with_a_shard_missing_is_no_page_from_memory_either(kit, monkeypatch):
    monkeypatch.setattr(MemoryStorage, "caches_lookups", True)
    monkeypatch.setattr(MemoryStorage, "objects_exist_cached", MemoryStorage.objects_exist)
    storage, _ = stored_rank(kit, {})
    storage.objects.pop(min(storage.objects))
    found = storage.batch_present(KEYS)
    assert found.count(False) == 1
    assert storage.answers_from_memory("lookup")
    token = from_memory.set(True)
    assert storage.batch_present(KEYS) == found
    assert storage.batch_exists_v2(KEYS).kv_hit_pages == found.index(False)
    from_memory.reset(token)


def test_every_driver_over_objects_declares_it(kit):
    storage, _ = kit.memory_storage(capabilities=Capabilities())
    assert storage.capabilities.head_shards


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BytePool(), "has no KV heads"),
        (lambda: make_pool(PagedHostPool, "mla", **LATENT), "has no KV heads"),
        (lambda: heads_pool(4, (1, 1)), "which 8 shards cannot share"),
        (lambda: heads_pool(8, (1,)), "contradicts itself"),
        (lambda: heads_pool(8, (1, 7)), "contradicts itself"),
    ],
)
def test_pools_that_have_no_such_shards_are_refused(kit, make, message):
    storage = MemoryStorage(kit.identity(store_tp_size=8))
    kit.opened.append(storage)
    with pytest.raises(InvalidPoolError, match=message):
        storage.register_mem_host_pool_v2(make(), "kv")
    # They are served where the identity does not ask for shards of them.
    storage = MemoryStorage(kit.identity(store_tp_size=8, tp_replicated_pools={"kv"}))
    kit.opened.append(storage)
    storage.register_mem_host_pool_v2(make(), "kv")


def heads_pool(heads, rows):
    components = (4 * heads, 8 * heads)
    pool = BytePool(components=components)
    pool.geometry = PageGeometry("other", "uint8", 2, 16, components, heads, rows)
    return pool


@pytest.mark.parametrize(
    ("pool", "changes", "message"),
    [
        (
            "kv",
            {"store_tp_size": 8, "head_end": 16},
            "another head_end than the identity: 8, and not 16",
        ),
        ("swa", {"store_tp_size": 1, "tp_size": 2, "head_end": 8}, "name it in tp_sharded_pools"),
    ],
)
def test_pools_that_contradict_the_identity_are_refused(kit, pool, changes, message):
    storage = MemoryStorage(kit.identity(**changes))
    kit.opened.append(storage)
    with pytest.raises(InvalidPoolError, match=message):
        storage.register_mem_host_pool_v2(heads_pool(8, (1, 1)), pool)


def test_a_page_is_reported_as_removed_once_and_with_any_of_its_shards(kit):
    objects = MemoryObjects()
    reader, _ = stored_rank(kit, objects)
    writers = [stored_rank(kit, objects, 8, number)[0] for number in range(8)]
    cursor = reader.removals().cursor
    writers[5].delete(["b"])
    answer = reader.removals(cursor)
    assert [one.key for one in answer.removed] == ["b"]
    reader.delete(["a"])
    answer = reader.removals(answer.cursor)
    assert [one.key for one in answer.removed] == ["a"]
    assert writers[4].removals(cursor).lost
