"""Ranks and engines that hold different bytes never read each other's; those that hold the same
do."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from hicache_storage.engines.sglang import SGLangBridge
from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens, tp

pytestmark = pytest.mark.interop


def written_by(rank, storage, **extra):
    rank.attach(*storage, **extra)
    backup = rank.backup(tokens(4))
    assert backup.completed_tokens == 4 * PAGE_SIZE
    return backup


def hit_pages(rank, storage, **extra):
    rank.attach(*storage, **extra)
    rank.wipe()
    return rank.prefetch(tokens(4)).hit_tokens // PAGE_SIZE


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"layout": "page_first_direct"},
        {"layout": "layer_first"},
        {"heads": 4},
        {"layers": 4},
    ],
    ids=lambda fields: "-".join(map(str, next(iter(fields.items())))),
)
def test_other_pages_are_a_miss(ranks, storage, other):
    """Finding D9: SGLang's own file driver reads some of these as hits, with wrong bytes."""
    first = ranks(mha_pools("page_first", heads=2, layers=3))
    second = ranks(mha_pools(**{"layout": "page_first", **other}))
    backup = written_by(first, storage)
    assert hit_pages(second, storage) == 0
    assert first.restores(backup)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tp(0), tp(1)),
        (tp(0), tp(0, 4)),
        ({"pp_rank": 0, "pp_size": 2}, {"pp_rank": 1, "pp_size": 2}),
    ],
    ids=["rank", "size", "stage"],
)
def test_ranks_of_sharded_kv_never_meet(ranks, storage, one, other):
    written_by(ranks(mha_pools("page_first"), **one), storage)
    assert hit_pages(ranks(mha_pools("page_first"), **other), storage) == 0


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_replicated_kv_share(ranks, storage, size):
    """Also with another TP size: latent KV does not depend on it."""
    backup = written_by(ranks(mla_pools("page_first"), **tp(0)), storage)
    second = ranks(mla_pools("page_first"), **tp(size - 1, size))
    second.attach(*storage)
    assert second.restores(backup)


def test_a_rank_that_does_not_write_answers_what_exists(ranks, storage):
    """SGLang does not ask it to write; if it did, nothing would be written."""
    writer, other = (ranks(mla_pools("page_first"), **tp(number)) for number in range(2))
    writer.attach(*storage)
    other.attach(*storage)
    assert other.controller.backup_skip
    keys, indices = other.hashes(tokens(2)), torch.arange(2 * PAGE_SIZE)
    assert other.bridge.batch_set_v1(keys, indices) == [False, False]
    assert other.bridge.batch_exists(keys) == 0
    assert writer.bridge.batch_set_v1(keys, indices) == [True, True]
    assert other.bridge.batch_set_v1(keys, indices) == [True, True]


@pytest.mark.parametrize("field", ["tenant", "revision", "salt", "model"])
def test_what_the_operator_tells_apart_never_meets(ranks, storage, field):
    written_by(ranks(mha_pools("page_first")), storage, **{field: "a"})
    assert hit_pages(ranks(mha_pools("page_first")), storage, **{field: "b"}) == 0
    assert hit_pages(ranks(mha_pools("page_first")), storage, **{field: "a"}) == 4


def dcp_bridge(rank: int, size: int, storage: tuple[str, dict[str, object]]) -> SGLangBridge:
    name, driver_config = storage
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=4,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="deepseek",
        dcp_size=size,
        dcp_rank=rank % size,
        logical_page_size=PAGE_SIZE * size,
        extra_config={"interface_v1": 1, "driver": name, "driver_config": driver_config},
    )
    bridge = SGLangBridge(config, {})
    assert bridge.storage is None
    pools = mla_pools("page_first", dcp_size=size, dcp_rank=rank % size)
    bridge.register_mem_pool_host(pools.kv)
    assert bridge.storage.identity.is_writer("kv") == config.is_storage_writer
    return bridge


def test_dcp_shards_never_meet_and_their_replicas_share(storage):
    """SGLang 0.5.23 attaches no dynamic backend under DCP; the bridge is ready for when it does."""
    bridges = [dcp_bridge(rank, 2, storage) for rank in range(4)]
    try:
        indices = torch.arange(2 * PAGE_SIZE * 2)
        keys = ["a" * 64, "b" * 64]
        assert bridges[0].batch_set_v1(keys, indices) == [True, True]
        assert [bridge.batch_exists(keys) for bridge in bridges] == [2, 0, 2, 0]
        assert bridges[3].batch_set_v1(keys, indices) == [False, False]
        assert bridges[1].batch_set_v1(keys, indices) == [True, True]
        assert [bridge.batch_exists(keys) for bridge in bridges] == [2, 2, 2, 2]
        assert bridges[2].batch_get_v1(keys, indices) == [True, True]
    finally:
        for bridge in bridges:
            bridge.close()
