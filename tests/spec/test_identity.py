"""ID-1, ID-3, ID-4: which fields decide about sharing, and that the fingerprint does not move
between releases."""

from __future__ import annotations

import pytest

from hicache_storage.spec import IDENTITY_FIELDS, InvalidIdentityError

DIFFERENT = {
    "model": "other",
    "kv_dtype": "fp8_e4m3",
    "page_size": 64,
    "layout": "layer_first",
    "revision": "r2",
    "layer_start": 1,
    "layer_end": 5,
    "head_start": 1,
    "head_end": 2,
    "tp_rank": 1,
    "tp_size": 4,
    "pp_rank": 1,
    "pp_size": 4,
    "cp_rank": 1,
    "cp_size": 4,
    "dp_rank": 1,
    "dp_size": 4,
    "kv_replicated": True,
    "tp_sharded_pools": frozenset(),
    "dp_replicated": True,
    "tenant": "t",
    "adapter": "lora",
    "salt": "s",
    "page_format": "other:1",
}
BASE = {
    "tp_size": 2,
    "pp_size": 2,
    "cp_size": 2,
    "dp_size": 2,
    "layer_end": 9,
    "head_end": 9,
    "dp_replicated": False,
}


def test_every_field_is_tried():
    assert set(DIFFERENT) == set(IDENTITY_FIELDS)


@pytest.mark.parametrize("field", sorted(set(DIFFERENT) - {"tp_sharded_pools"}))
def test_a_field_that_affects_bytes_changes_the_fingerprint(kit, field):
    one, other = kit.identity(**BASE), kit.identity(**{**BASE, field: DIFFERENT[field]})
    assert one.fingerprint("kv") != other.fingerprint("kv")


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
    ],
)
def test_contradictions_are_refused_by_name(kit, changes, named):
    with pytest.raises(InvalidIdentityError, match=named):
        kit.identity(**changes)
