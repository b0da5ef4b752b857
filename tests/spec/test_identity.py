"""Identities beside the suite's `IdentityCases` and `ShardCases`: what is refused, and that the
fingerprint does not move between releases."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.spec import InvalidIdentityError


def test_shards_and_their_number_decide(kit):
    whole = kit.identity(store_tp_size=8)
    prints = {whole.fingerprint("kv", shard) for shard in range(8)}
    prints |= {kit.identity(store_tp_size=4).fingerprint("kv", shard) for shard in range(4)}
    prints |= {whole.fingerprint("kv"), kit.identity().fingerprint("kv")}
    assert len(prints) == 14


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
