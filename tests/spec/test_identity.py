"""ID-1, ID-3, ID-4: which fields decide about sharing, and that the fingerprint does not move
between releases."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.spec import InvalidIdentityError


@pytest.mark.parametrize("pool", ["kv", "indexer", "mamba", "swa"])
def test_pools_have_fingerprints_of_their_own(kit, pool):
    others = {"kv", "indexer", "mamba", "swa"} - {pool}
    assert kit.identity().fingerprint(pool) not in {
        kit.identity().fingerprint(other) for other in others
    }


def test_replicated_kv_is_one_for_all_tp_ranks_and_sizes_while_mamba_is_not(kit):
    ranks = [kit.identity(kv_replicated=True, tp_rank=rank, tp_size=4) for rank in range(4)]
    ranks.append(kit.identity(kv_replicated=True, tp_rank=1, tp_size=2))
    assert len({rank.fingerprint("kv") for rank in ranks}) == 1
    assert len({rank.fingerprint("mamba") for rank in ranks}) == len(ranks)
    assert [rank.is_writer("kv") for rank in ranks] == [True, False, False, False, False]
    assert all(rank.is_writer("mamba") for rank in ranks)


def of_size(kit, tp_size, **changes):
    return [kit.identity(tp_rank=rank, tp_size=tp_size, **changes) for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_ranks_of_every_tp_size_hold_the_same_shards(kit, tp_size):
    ranks = of_size(kit, tp_size, store_tp_size=8)
    held = [shard for rank in ranks for shard in rank.shards("kv")]
    assert held == list(range(8))
    assert all(rank.is_writer("kv") for rank in ranks)
    whole = kit.identity(store_tp_size=8)
    assert [rank.fingerprint("kv", shard) for rank in ranks for shard in rank.shards("kv")] == [
        whole.fingerprint("kv", shard) for shard in range(8)
    ]
    assert {"tp_rank", "tp_size"}.isdisjoint(whole.deciding_fields("kv", 3))


def test_shards_and_their_number_decide(kit):
    whole = kit.identity(store_tp_size=8)
    prints = {whole.fingerprint("kv", shard) for shard in range(8)}
    prints |= {kit.identity(store_tp_size=4).fingerprint("kv", shard) for shard in range(4)}
    prints |= {whole.fingerprint("kv"), kit.identity().fingerprint("kv")}
    assert len(prints) == 14


def test_replicated_heads_have_one_writer_a_shard(kit):
    ranks = [
        kit.identity(
            store_tp_size=2, tp_size=8, tp_rank=rank, head_start=rank // 4, head_end=rank // 4 + 1
        )
        for rank in range(8)
    ]
    assert [list(rank.shards("kv")) for rank in ranks] == [[0]] * 4 + [[1]] * 4
    assert [rank.tp_rank for rank in ranks if rank.is_writer("kv")] == [0, 4]
    assert ranks[1].fingerprint("kv", 0) == kit.identity(store_tp_size=2).fingerprint("kv", 0)


@pytest.mark.parametrize(
    ("changes", "pool"),
    [
        ({}, "mamba"),
        ({"tp_sharded_pools": ["swa"]}, "swa"),
        ({"tp_replicated_pools": ["indexer"]}, "indexer"),
        ({"kv_replicated": True}, "kv"),
        ({"kv_replicated": True, "tp_size": 6}, "kv"),
    ],
)
def test_pools_that_are_not_stored_in_shards_keep_their_pages(kit, changes, pool):
    with_shards = kit.identity(**{"tp_size": 4, **changes}, store_tp_size=8)
    assert not with_shards.shards(pool)
    assert with_shards.fingerprint(pool) == kit.identity(**{"tp_size": 4, **changes}).fingerprint(
        pool
    )


def test_a_pool_may_be_replicated_beside_sharded_kv(kit):
    ranks = of_size(kit, 4, tp_replicated_pools={"indexer"})
    assert len({rank.fingerprint("indexer") for rank in ranks}) == 1
    assert [rank.is_writer("indexer") for rank in ranks] == [True, False, False, False]
    assert len({rank.fingerprint("kv") for rank in ranks}) == 4


def test_dp_ranks_share_unless_told_otherwise(kit):
    assert kit.identity(dp_size=2).fingerprint() == kit.identity(dp_rank=1, dp_size=2).fingerprint()
    apart = [
        kit.identity(dp_rank=rank, dp_size=2, dp_replicated=False).fingerprint()
        for rank in range(2)
    ]
    assert apart[0] != apart[1]


def test_the_fingerprint_is_stable_across_releases(kit):
    """A change here empties every store of every user: it needs a new contract version and a line
    in the changelog."""
    assert kit.identity().fingerprint("kv").hex() == "d1927a7b02663204e4e4d14f28e36ab6"


def test_a_torch_dtype_is_taken_by_its_name(kit):
    named = kit.identity(kv_dtype="bfloat16")
    assert kit.identity(kv_dtype=torch.bfloat16) == named
    assert kit.identity(kv_dtype=torch.bfloat16).fingerprint("kv") == named.fingerprint("kv")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank"),
        ({"cp_rank": -1}, "cp_rank"),
        ({"page_size": 0}, "page_size"),
        ({"layer_start": 3, "layer_end": 3}, "layer_start"),
        ({"head_start": -1}, "head_start"),
        ({"model": ""}, "model"),
        ({"kv_dtype": ""}, "kv_dtype"),
        ({"kv_dtype": 16}, "kv_dtype must be of type str"),
        ({"model": None}, "model must be of type str"),
        ({"page_size": "64"}, "page_size must be of type int"),
        ({"store_tp_size": -1}, "store_tp_size"),
        ({"store_tp_size": 6, "tp_size": 4}, "pass 12"),
        ({"store_tp_size": 4, "tp_size": 8}, "pass head_start and head_end"),
        # 8 heads, one for each rank: a shard of two would be shared by ranks that hold half of it.
        (
            {"store_tp_size": 4, "tp_size": 8, "tp_rank": 1, "head_start": 1, "head_end": 2},
            "divide the number of KV heads",
        ),
        ({"store_tp_size": 8, "tp_size": 2, "head_end": 2}, "divide the number of KV heads"),
        ({"tp_replicated_pools": {"mamba"}}, "both name 'mamba'"),
    ],
)
def test_contradictions_are_refused_by_name(kit, changes, named):
    with pytest.raises(InvalidIdentityError, match=named):
        kit.identity(**changes)
