"""Mamba states beside KV, and anchors that hold nothing, through SGLang's hybrid controller."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tests.interop.engine import (
    PAGE_SIZE,
    logical_pools,
    mamba_pool,
    mha_pools,
    mla_pools,
    tokens,
    tp,
    with_mamba,
)

pytestmark = pytest.mark.interop


def with_side(pools, name, pool):
    pools.side[name] = pool
    return pools


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("make_pools", [mha_pools, mla_pools])
def test_states_come_back_with_their_pages(ranks, storage, make_pools, layout):
    rank = ranks(with_mamba(make_pools(layout), layout))
    rank.attach(*storage)
    backup = rank.backup(tokens(6), checkpoints={"mamba": 1})
    assert backup.completed_tokens == 6 * PAGE_SIZE
    assert backup.pool_hits == {"mamba": 1}
    rank.wipe()
    result = rank.prefetch(tokens(6), windows={"mamba": 1})
    assert (result.hit_tokens, result.completed_tokens) == (6 * PAGE_SIZE, 6 * PAGE_SIZE)
    assert result.pool_hits["mamba"] == 1
    assert rank.delivered(result, backup)
    assert rank.delivered(result, backup, "mamba")
    assert rank.bridge.refused_calls == 0


def test_states_with_parts_that_have_no_addresses_come_back(ranks, storage):
    """Side states ride along in flat pages only; SGLang's pool refuses to tell where they are."""
    rank = ranks(with_mamba(mha_pools("page_first"), slot_states=2))
    with pytest.raises(NotImplementedError):
        rank.pools.side["mamba"].get_page_buffer_meta(torch.tensor([0]))
    rank.attach(*storage)
    backup = rank.backup(tokens(3), checkpoints={"mamba": 1})
    rank.wipe()
    rank.pools.side["mamba"].alloc(3)
    result = rank.prefetch(tokens(3), windows={"mamba": 1})
    assert result.indices["mamba"].tolist() == [3]
    assert rank.delivered(result, backup)
    assert rank.delivered(result, backup, "mamba")


def test_the_hit_ends_at_the_last_checkpoint(hybrid):
    """Rule EX-1: KV reaches page 8, states exist at 2 and 5; nothing between them can be
    restored."""
    hybrid.backup(tokens(2), checkpoints={"mamba": 1})
    hybrid.wipe()
    states = hybrid.backup(tokens(5), checkpoints={"mamba": 1})
    hybrid.wipe()
    hybrid.backup(tokens(8))
    hybrid.wipe()
    hybrid.backup(tokens(4, start=500))
    without = hybrid.prefetch(tokens(4, start=500), windows={"mamba": 1})
    assert (without.hit_tokens, without.verdicts) == (0, {"kv": 4, "mamba": 0})
    hybrid.wipe()
    result = hybrid.prefetch(tokens(8), windows={"mamba": 1})
    assert result.hit_tokens == 5 * PAGE_SIZE
    assert result.verdicts == {"kv": 8, "mamba": 5}
    assert hybrid.delivered(result, states, "mamba")
    window = PoolTransfer(
        PoolName.MAMBA, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    answer = hybrid.bridge.batch_exists_v2(hybrid.hashes(tokens(8)), [window])
    assert answer.restorable_prefix_pages == [2, 5]


def test_a_window_of_several_pages_comes_back(hybrid):
    assert hybrid.restores(hybrid.backup(tokens(6), checkpoints={"mamba": 3}), mamba=3)


def test_every_rank_has_states_of_its_own_beside_replicated_kv(ranks, storage):
    """Rule ID-3: in a model with latent attention the first rank writes KV for all, and each its
    own states."""
    both = [ranks(with_mamba(mla_pools("page_first")), **tp(number)) for number in range(2)]
    backups = []
    for number, rank in enumerate(both):
        rank.attach(*storage)
        backups.append(rank.backup(tokens(4), seed=number + 1, checkpoints={"mamba": 1}))
    assert all(backup.completed_tokens == 4 * PAGE_SIZE for backup in backups)
    for rank, backup in zip(both, backups, strict=True):
        rank.wipe()
        result = rank.prefetch(tokens(4), windows={"mamba": 1})
        assert result.completed_tokens == 4 * PAGE_SIZE
        assert rank.delivered(result, backups[0])
        assert rank.delivered(result, backup, "mamba")


class TestAnchorWithoutBytes:
    """DeepSeek-V4: the KV pool hands out slots, the side pools hold everything."""

    @pytest.fixture
    def rank(self, ranks, storage):
        rank = ranks(with_mamba(logical_pools()))
        rank.attach(*storage, kv_dtype="fp8_e4m3")
        return rank

    def test_side_pools_come_back(self, rank, caplog):
        assert not [record for record in caplog.get_records("setup") if record.levelname == "ERROR"]
        backup = rank.backup(tokens(5), checkpoints={"mamba": 2})
        assert backup.completed_tokens == 5 * PAGE_SIZE
        rank.wipe()
        result = rank.prefetch(tokens(5), windows={"mamba": 2})
        assert (result.hit_tokens, result.completed_tokens) == (5 * PAGE_SIZE, 5 * PAGE_SIZE)
        assert rank.delivered(result, backup, "mamba")
        assert rank.bridge.refused_calls == 0

    @pytest.mark.parametrize(
        ("checkpoints", "start", "windows"),
        [({}, 0, {"mamba": 1}), ({"mamba": 1}, 0, {}), ({"mamba": 1}, 500, {"mamba": 1})],
        ids=["no states", "no side pool asked", "another prompt"],
    )
    def test_nothing_is_found(self, rank, checkpoints, start, windows):
        rank.backup(tokens(5), checkpoints=checkpoints)
        assert rank.prefetch(tokens(5, start=start), windows=windows).hit_tokens == 0
        assert rank.bridge.batch_exists_v2(rank.hashes(tokens(5))).kv_hit_pages == 0

    def test_reading_the_anchor_delivers_nothing_and_says_so_truthfully(self, rank):
        hashes = rank.hashes(tokens(3))
        assert rank.bridge.batch_get_v1(hashes, torch.arange(3 * PAGE_SIZE)) == [True] * 3


class TestPoolsThatCannotBeServed:
    """SGLang does not undo an attach that fails at a side pool, so these are attached and answered
    with misses."""

    def test_a_pool_without_memory(self, ranks, storage, caplog):
        rank = ranks(with_side(with_mamba(mha_pools("page_first")), "swa", logical_pools().kv))
        rank.attach(*storage)
        assert "pool 'swa' (LogicalHostPool) is not served" in caplog.text
        backup = rank.backup(tokens(4))
        assert backup.completed_tokens == 4 * PAGE_SIZE
        result = rank.prefetch(tokens(4), windows={"swa": 1})
        assert result.hit_tokens == 0
        assert result.verdicts == {"kv": 4, "swa": 0}
        assert rank.restores(backup)
        assert rank.all_alive()
        # Moving its pages does not disturb the others.
        wanted = [
            PoolTransfer(PoolName.SWA, host_indices=torch.arange(PAGE_SIZE), keys=["a"]),
            PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0, 1]), keys=["a", "b"]),
        ]
        before = rank.bridge.refused_calls
        assert rank.bridge.batch_set_v2(wanted) == {"swa": [False], "mamba": [True, True]}
        assert rank.bridge.batch_get_v2(wanted) == {"swa": [False], "mamba": [True, True]}
        assert rank.bridge.refused_calls == before + 2

    def test_a_pool_that_takes_the_place_of_a_served_one(self, hybrid):
        """The memory of the former must not be touched any more."""
        bridge = hybrid.bridge
        wanted = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0]), keys=["a"])
        assert bridge.batch_set_v2([wanted]) == {"mamba": [True]}
        bridge.register_mem_host_pool_v2(logical_pools().kv, "mamba")
        assert bridge.batch_get_v2([wanted]) == {"mamba": [False]}
        bridge.register_mem_host_pool_v2(mamba_pool("page_first"), "mamba")
        assert bridge.batch_get_v2([wanted]) == {"mamba": [True]}

    @pytest.mark.parametrize("served", [False, True], ids=["rank-1-of-2", "single-rank"])
    def test_heads_beside_replicated_kv(self, ranks, storage, caplog, served):
        """SGLang stores a draft pool's heads from the first rank only: serving it would give the
        others the wrong heads."""
        pools = with_side(mla_pools("page_first"), "draft", mha_pools("page_first").kv)
        rank = ranks(pools, **({} if served else tp(1)))
        rank.attach(*storage)
        warned = "pool 'draft' (MHATokenToKVPoolHost) is not served" in caplog.text
        assert warned is not served
        if served:
            backup = rank.backup(tokens(4), checkpoints={"draft": 4})
            rank.wipe()
            result = rank.prefetch(tokens(4), windows={"draft": 4})
            assert rank.delivered(result, backup, "draft")
        else:
            assert rank.prefetch(tokens(2), windows={"draft": 1}).hit_tokens == 0
