"""Pages in shards of KV heads, beside the suite's `ShardCases`: the SDK's own pools and layouts."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.pools import AttentionGeometry, PagedHostPool
from hicache_storage.spec import (
    Capabilities,
    InvalidPoolError,
    PageGeometry,
    PoolTransfer,
    from_memory,
)
from hicache_storage.testing import BytePool, MemoryObjects, MemoryStorage
from tests.support.pools import make_pool

PAGES, PAGE_SIZE, LAYERS, HEADS, DIM = 4, 2, 3, 8, 6
KEYS = ["a", "b", "c"]
LATENT = {"layers": range(1), "kv_lora_rank": 4, "dtype": torch.int16, "size": 8, "page_size": 2}
AXES = {
    "layer_first": (2, 1, 0, 3),
    "page_first": (2, 0, 1, 3),
    "page_first_direct": (3, 0, 2, 1, 4),
    "page_head": (1, 0, 2, 3, 4),
}


class Rank:
    """A rank of a model of `HEADS` KV heads, with its host pool."""

    def __init__(self, kit, objects, size, rank, *, layout="page_head", v_dim=None, **changes):
        heads = max(1, HEADS // size)
        self.first = rank * HEADS // size
        self.identity = kit.identity(
            **{"store_tp_size": 8, "layout": layout, **changes}, tp_size=size, tp_rank=rank
        )
        shape = {"layers": range(LAYERS), "head_num": heads, "head_dim": DIM, "v_head_dim": v_dim}
        size = {"size": PAGES * PAGE_SIZE, "page_size": PAGE_SIZE, "dtype": torch.int16}
        self.pool = make_pool(PagedHostPool, "mha", layout=layout, **size, **shape)
        self.storage = MemoryStorage(self.identity, objects)
        self.storage.register_mem_host_pool_v2(self.pool, "kv")
        kit.opened.append(self.storage)

    def by_head(self, buffer):
        """A view of one half of the pool: its first axis is the heads, its last two layers and
        elements."""
        return buffer.permute(AXES[self.pool.layout])

    def fill(self, model):
        heads = slice(self.first, self.first + self.pool.geometry.head_num)
        for half, buffer in enumerate(self.pool.parts):
            view = self.by_head(buffer)
            view.copy_(model[half, heads, ..., : buffer.shape[-1]].reshape(view.shape))

    def content(self):
        halves = self.pool.parts
        shape = (self.pool.geometry.head_num, PAGES, PAGE_SIZE, LAYERS, -1)
        return [self.by_head(buffer).reshape(shape) for buffer in halves]

    def transfer(self, keys=KEYS):
        return [PoolTransfer("kv", torch.arange(len(keys) * PAGE_SIZE), keys=keys)]

    def set(self, keys=KEYS):
        return self.storage.batch_set_v2(self.transfer(keys))["kv"]

    def get(self, keys=KEYS):
        return self.storage.batch_get_v2(self.transfer(keys))["kv"]

    def hit(self, keys=KEYS):
        return self.storage.batch_exists_v2(keys).kv_hit_pages

    def names(self, key):
        [pool] = self.storage.pools.values()
        return [part.namespace.object_name(key) for part in pool.parts]


@pytest.fixture
def ranks(kit):
    objects = {}

    def make(size, **changes):
        return [Rank(kit, objects, size, rank, **changes) for rank in range(size)]

    make.objects = objects
    return make


def model():
    return torch.randint(-999, 999, (2, HEADS, PAGES, PAGE_SIZE, LAYERS, DIM), dtype=torch.int16)


@pytest.mark.parametrize("v_dim", [None, 3])
@pytest.mark.parametrize("layout", AttentionGeometry.ORDERS)
@pytest.mark.parametrize(("writers", "readers"), [(1, 8), (8, 2), (2, 4)])
def test_a_tp_size_reads_what_another_has_written(ranks, layout, writers, readers, v_dim):
    """The suite has pages of its own (`ShardCases.test_every_tp_size_reads_every_other`)."""
    expected = model()
    for rank in ranks(writers, layout=layout, v_dim=v_dim):
        rank.fill(expected)
        assert rank.set() == [True] * 3
    for rank in ranks(readers, layout=layout, v_dim=v_dim):
        rank.fill(torch.zeros_like(expected))
        assert rank.hit() == 3
        assert rank.get() == [True] * 3
        heads = slice(rank.first, rank.first + rank.pool.geometry.head_num)
        for half, found in enumerate(rank.content()):
            assert torch.equal(found[:, :3], expected[half, heads, :3, ..., : found.shape[-1]])
            assert not found[:, 3].any()


def test_a_shard_in_the_place_of_another_is_damage(ranks):
    [one] = ranks(1)
    one.fill(model())
    one.set()
    first, second, *_ = one.names("a")
    ranks.objects[first], ranks.objects[second] = ranks.objects[second], ranks.objects[first]
    assert one.get() == [False, True, True]


def test_a_page_with_a_shard_missing_is_no_page_from_memory_either(ranks, monkeypatch):
    monkeypatch.setattr(MemoryStorage, "caches_lookups", True)
    monkeypatch.setattr(MemoryStorage, "objects_exist_cached", MemoryStorage.objects_exist)
    [one] = ranks(1)
    one.set()
    ranks.objects.pop(min(ranks.objects))
    found = one.storage.batch_present(KEYS)
    assert found.count(False) == 1
    assert one.storage.answers_from_memory("lookup")
    token = from_memory.set(True)
    assert one.storage.batch_present(KEYS) == found
    assert one.storage.batch_exists_v2(KEYS).kv_hit_pages == found.index(False)
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
    pool = BytePool(components=(32, 64))
    pool.geometry = PageGeometry("other", "uint8", 2, 16, (32, 64), heads, rows)
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
    [reader], writers = [[Rank(kit, objects, 1, 0)], [Rank(kit, objects, 8, n) for n in range(8)]]
    assert all(all(rank.set()) for rank in writers)
    cursor = reader.storage.removals().cursor
    writers[5].storage.delete(["b"])
    answer = reader.storage.removals(cursor)
    assert [one.key for one in answer.removed] == ["b"]
    reader.storage.delete(["a"])
    answer = reader.storage.removals(answer.cursor)
    assert [one.key for one in answer.removed] == ["a"]
    assert writers[4].storage.removals(cursor).lost
