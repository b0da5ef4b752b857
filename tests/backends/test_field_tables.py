"""The edge cases in which SGLang's own drivers disagree with each other, or answer wrongly, put to
the file driver.

Measured on SGLang 0.5.23: its file driver, and those for 3FS and Mooncake, answer the calls below
with an AttributeError, a KeyError, an IndexError after pages were reserved, a wrong endpoint, or
each with something else. One answer is right.
"""

from __future__ import annotations

import pytest
import torch

from hicache_storage import PoolTransfer, create_storage
from hicache_storage.spec import InvalidTransferError, UnknownPoolError

TRAILING = "trailing_pages"


@pytest.fixture
def opened(kit, tmp_path):
    """Open file storages on one directory."""
    storages = []

    def make(pools=("kv",), **identity):
        storage = create_storage(
            "file", kit.identity(**identity), {"path": str(tmp_path / "store")}
        )
        storages.append(storage)
        registered = {name: kit.pool(pages=16) for name in pools}
        for name, pool in registered.items():
            storage.register_mem_host_pool_v2(pool, name)
        return storage, registered

    yield make
    for storage in storages:
        storage.close()


def store(storage, pool, name, keys):
    assert storage.batch_set_v2([pool.transfer(name, keys, range(len(keys)))]) == {
        name: [True] * len(keys)
    }


class TestCallsOnTheEdge:
    def test_exists_before_any_registration_is_nothing(self, opened):
        storage, _ = opened(pools=())
        assert storage.batch_exists_v2(["a"]).kv_hit_pages == 0

    @pytest.mark.parametrize("operation", ["batch_get_v2", "batch_set_v2"])
    @pytest.mark.parametrize("pools", [(), ("kv",)])
    def test_an_unknown_pool_in_get_and_set_is_named(self, opened, operation, pools):
        storage, _ = opened(pools)
        with pytest.raises(UnknownPoolError, match="'mamba' is not registered"):
            getattr(storage, operation)([PoolTransfer("mamba", torch.arange(2), keys=["a"])])

    def test_an_unknown_pool_in_exists_is_zero_whether_kv_hits_or_not(self, opened):
        storage, pools = opened()
        for keys in (["absent"], ["a"]):
            result = storage.batch_exists_v2(keys, [PoolTransfer("mamba", hit_policy=TRAILING)])
            assert (result.kv_hit_pages, result.extra_pool_hit_pages["mamba"]) == (0, 0)
            store(storage, pools["kv"], "kv", ["a"])

    @pytest.mark.parametrize("operation", ["batch_get_v2", "batch_set_v2"])
    def test_no_keys(self, opened, operation):
        storage, _ = opened()
        assert getattr(storage, operation)(
            [PoolTransfer("kv", torch.empty(0, dtype=torch.int64), keys=[])]
        ) == {"kv": []}
        assert storage.batch_exists_v2([]).restorable_prefix_pages == []

    @pytest.mark.parametrize("operation", ["batch_get_v2", "batch_set_v2"])
    @pytest.mark.parametrize(
        ("keys", "slots", "message"),
        [(None, 2, "keys is None"), (["a", "b"], 2, "4 entries"), (["a"], 4, "2 entries")],
    )
    def test_keys_and_indices_that_do_not_fit_move_nothing(
        self, opened, operation, keys, slots, message
    ):
        storage, pools = opened()
        before = bytes(pools["kv"].memory)
        with pytest.raises(InvalidTransferError, match=message):
            getattr(storage, operation)([PoolTransfer("kv", torch.arange(slots), keys=keys)])
        assert bytes(pools["kv"].memory) == before
        assert storage.batch_exists_v2(["a"]).kv_hit_pages == 0

    def test_block_groups_report_and_do_not_gate(self, opened):
        storage, pools = opened(("kv", "swa"))
        keys = [f"k{page}" for page in range(8)]
        store(storage, pools["kv"], "kv", keys)
        store(storage, pools["swa"], "swa", [keys[3]])
        asked = PoolTransfer("swa", hit_policy="block_groups", block_pages=4, group_pages=1)
        result = storage.batch_exists_v2(keys, [asked])
        assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (8, {"kv": 8, "swa": 4})

    def test_a_duplicate_key_leaks_nothing(self, opened):
        storage, pools = opened()
        pools["kv"].fill(0, 1)
        pools["kv"].fill(1, 1)
        assert storage.batch_set_v2([pools["kv"].transfer("kv", ["a", "a"], [0, 1])]) == {
            "kv": [True, True]
        }
        assert storage.get_stats().pools["kv"].pages_written == 1

    def test_two_transfers_of_one_pool_are_both_answered(self, opened):
        storage, pools = opened()
        store(storage, pools["kv"], "kv", ["a"])
        pool = pools["kv"]
        answer = storage.batch_get_v2(
            [pool.transfer("kv", ["a"], [4]), pool.transfer("kv", ["x"], [5])]
        )
        assert answer == {"kv": [True, False]}

    def test_restorable_endpoints_are_always_listed(self, opened):
        storage, pools = opened()
        store(storage, pools["kv"], "kv", ["a", "b"])
        assert storage.batch_exists_v2(["a", "b", "c"]).restorable_prefix_pages == [1, 2]

    def test_a_placeholder_for_keys_is_a_window_of_one(self, opened):
        storage, pools = opened(("kv", "mamba"))
        store(storage, pools["kv"], "kv", ["a", "b"])
        store(storage, pools["mamba"], "mamba", ["b"])
        asked = PoolTransfer("mamba", keys=["__placeholder__"], hit_policy=TRAILING)
        assert storage.batch_exists_v2(["a", "b"], [asked]).restorable_prefix_pages == [2]


class TestCommonEndpoints:
    """D19: folding pools, or ranks, by the minimum of their maxima answers a length that one of
    them cannot restore."""

    def test_an_indexer_to_five_and_checkpoints_at_two_and_eight(self, opened):
        storage, pools = opened(("kv", "indexer", "mamba"))
        keys = [f"k{page}" for page in range(1, 9)]
        store(storage, pools["kv"], "kv", keys)
        store(storage, pools["indexer"], "indexer", keys[:5])
        store(storage, pools["mamba"], "mamba", [keys[1], keys[7]])
        asked = [PoolTransfer("indexer"), PoolTransfer("mamba", keys=[""], hit_policy=TRAILING)]
        result = storage.batch_exists_v2(keys, asked)
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (2, [2])
        assert result.extra_pool_hit_pages == {"kv": 8, "indexer": 5, "mamba": 8}

    def test_ranks_that_hold_other_checkpoints_agree_on_the_one_they_share(self, opened):
        keys = [f"k{page}" for page in range(1, 8)]
        restorable = []
        for rank, checkpoints in enumerate(((3, 6), (3, 7))):
            storage, pools = opened(("kv", "mamba"), tp_rank=rank, tp_size=2)
            store(storage, pools["kv"], "kv", keys)
            store(storage, pools["mamba"], "mamba", [keys[page - 1] for page in checkpoints])
            asked = PoolTransfer("mamba", keys=[""], hit_policy=TRAILING)
            restorable.append(storage.batch_exists_v2(keys, [asked]).restorable_prefix_pages)
        assert restorable == [[3, 6], [3, 7]]
        assert max(set(restorable[0]).intersection(*restorable)) == 3
