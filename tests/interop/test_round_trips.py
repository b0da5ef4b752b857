"""Pages that SGLang's controller writes come back byte for byte, into the right pages and no
others."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from tests.interop.drivers import SEEN, STORES
from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens

pytestmark = pytest.mark.interop

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
POOLS = [
    *(pytest.param(mha_pools, layout, id=f"mha-{layout}") for layout in (*LAYOUTS, "page_head")),
    *(pytest.param(mla_pools, layout, id=f"mla-{layout}") for layout in LAYOUTS),
]


@pytest.mark.parametrize("controller", ["plain", "hybrid"])
@pytest.mark.parametrize(("make_pools", "layout"), POOLS)
def test_pages_come_back(ranks, storage, make_pools, layout, controller):
    rank = ranks(make_pools(layout), hybrid=controller == "hybrid")
    rank.attach(*storage)
    backup = rank.backup(tokens(6))
    assert backup.completed_tokens == 6 * PAGE_SIZE
    rank.wipe()
    result = rank.prefetch(tokens(6))
    assert (result.hit_tokens, result.completed_tokens) == (6 * PAGE_SIZE, 6 * PAGE_SIZE)
    assert rank.delivered(result, backup)
    assert rank.bridge.refused_calls == 0
    assert rank.prefetch(tokens(4, start=1000)).hit_tokens == 0


def test_pages_come_back_where_the_pool_has_holes(plain):
    """Host pages are handed out in any order; each page has to find its own place."""
    backup = plain.backup(tokens(8))
    plain.wipe()
    kv = plain.pools.kv
    taken = kv.alloc(16 * PAGE_SIZE).view(16, PAGE_SIZE)
    kv.free(taken[torch.randperm(16, generator=torch.Generator().manual_seed(0))].reshape(-1))
    kv.alloc(kv.available_size() - 16 * PAGE_SIZE)
    result = plain.prefetch(tokens(8))
    slots = result.indices["kv"][::PAGE_SIZE].tolist()
    assert slots != sorted(slots)
    assert plain.delivered(result, backup)


def test_a_long_prompt_takes_several_batches(ranks, storage):
    rank = ranks(mha_pools("page_first", pages=300))
    rank.attach(*storage)
    backup = rank.backup(tokens(290))
    assert backup.completed_tokens == 290 * PAGE_SIZE
    assert rank.restores(backup)


def test_the_stored_prefix_of_a_longer_prompt_is_found(plain):
    backup = plain.backup(tokens(4))
    plain.wipe()
    result = plain.prefetch(tokens(9))
    assert (result.hit_tokens, result.completed_tokens) == (4 * PAGE_SIZE, 4 * PAGE_SIZE)
    assert plain.delivered(result, backup)


def test_what_is_stored_is_not_written_again(ranks, storage):
    rank = ranks(mha_pools("page_first"), metrics=True)
    rank.attach(*storage)
    backup = rank.backup(tokens(4), seed=1)
    rank.wipe()
    assert rank.backup(tokens(6), seed=2).completed_tokens == 6 * PAGE_SIZE
    assert rank.restores(backup)
    assert rank.bridge.storage.get_stats().pools["kv"].pages_written == 6


def test_a_page_that_vanishes_after_the_query_ends_the_hit_there(sample, trouble):
    backup = sample.backup(tokens(6))
    sample.wipe()
    fourth = list(STORES["default"])[3]
    trouble.at("get", answer=lambda operation: STORES["default"].pop(fourth, None) and None)
    result = sample.prefetch(tokens(6))
    assert (result.hit_tokens, result.completed_tokens) == (6 * PAGE_SIZE, 3 * PAGE_SIZE)
    assert all(map(torch.equal, sample.contents(result)[:3], backup.contents["kv"][:3]))


def test_the_driver_is_told_what_precedes_the_keys(ranks, trouble):
    """With `hicache_storage_pass_prefix_keys`, in each of several batches."""
    rank = ranks(mha_pools("page_first", pages=300))
    rank.attach("sample")
    prompt = tokens(210)
    hashes = rank.hashes(prompt)
    rank.backup(prompt[: 10 * PAGE_SIZE])
    SEEN.clear()
    rank.backup(prompt[10 * PAGE_SIZE :], prefix_keys=hashes[:10])
    assert [prefix for operation, prefix, _ in SEEN if operation == "set"] == [
        hashes[:10],
        hashes[: 10 + 128],
    ]
    rank.wipe()
    SEEN.clear()
    rank.prefetch(prompt[10 * PAGE_SIZE :], prefix_keys=hashes[:10])
    for kind in ("exists", "get"):
        assert [prefix for operation, prefix, _ in SEEN if operation == kind] == [
            hashes[:10],
            hashes[: 10 + 128],
        ]


def test_the_driver_is_told_the_session(sample):
    sample.bridge.batch_exists(["a"], HiCacheStorageExtraInfo(extra_info={"session_id": "chat-7"}))
    sample.bridge.batch_exists(["a"], HiCacheStorageExtraInfo(extra_info={"session_id": 7}))
    [first, (operation, prefix, drawn)] = SEEN
    assert (first, operation, prefix) == (("exists", [], "chat-7"), "exists", [])
    assert drawn not in (None, "", "chat-7")


def test_fp8_pages_come_back_under_their_logical_dtype(ranks, storage):
    rank = ranks(mha_pools("page_first", dtype=torch.float8_e4m3fn))
    assert rank.pools.kv.dtype == torch.uint8
    rank.attach(*storage, kv_dtype="fp8_e4m3")
    assert rank.restores(rank.backup(tokens(4)))
    rank.detach()
    rank.attach(*storage, kv_dtype="fp8_e5m2")
    assert rank.prefetch(tokens(4)).hit_tokens == 0


def test_the_engine_may_tell_which_fp8_it_is(ranks, storage, monkeypatch):
    monkeypatch.setattr(
        "hicache_storage.engines.sglang.bridge.get_model",
        lambda: SimpleNamespace(kv_cache_dtype="fp8_e5m2"),
    )
    rank = ranks(mha_pools("page_first", dtype=torch.float8_e5m2))
    rank.attach(*storage)
    assert rank.bridge.storage.identity.kv_dtype == "fp8_e5m2"


def test_pages_are_not_those_of_another_configuration_of_the_model(ranks, storage, monkeypatch):
    model = SimpleNamespace(
        kv_cache_dtype="auto", json_model_override_args="{}", quantization_param_path=None
    )
    monkeypatch.setattr("hicache_storage.engines.sglang.bridge.get_model", lambda: model)
    rank = ranks(mha_pools("page_first"))
    rank.attach(*storage)
    assert rank.bridge.storage.identity.revision == ""
    rank.backup(tokens(4))
    rank.detach()
    rank.wipe()
    model.json_model_override_args = '{"rope_scaling": {"type": "yarn", "factor": 4.0}}'
    rank.attach(*storage)
    assert rank.prefetch(tokens(4)).hit_tokens == 0


def test_pages_are_not_those_of_weights_that_came_later(ranks, storage, monkeypatch):
    serving = SimpleNamespace(weight_version="default")
    monkeypatch.setattr("hicache_storage.engines.sglang.bridge.get_serving", lambda: serving)
    rank = ranks(mha_pools("page_first"))
    rank.attach(*storage)
    backup = rank.backup(tokens(4))
    rank.wipe()
    serving.weight_version = "2"
    assert rank.prefetch(tokens(4)).hit_tokens == 0
    assert rank.backup(tokens(8, start=100)).completed_tokens == 0
    assert rank.bridge.refused_calls > 0
    rank.detach()
    rank.attach(*storage)
    assert rank.bridge.storage.identity.revision == '["", "2"]'
    assert rank.prefetch(tokens(4)).hit_tokens == 0
    serving.weight_version = "default"
    rank.detach()
    rank.attach(*storage)
    assert rank.restores(backup)


def test_clear_removes_the_pages(plain, ranks, storage):
    other = ranks(mha_pools("page_first"))
    other.attach(*storage, model="qwen")
    plain.backup(tokens(4))
    backup = other.backup(tokens(4))
    plain.bridge.clear()
    assert plain.prefetch(tokens(4)).hit_tokens == 0
    assert other.restores(backup)


def test_metrics_tell_what_moved_since_they_were_last_asked(ranks, storage):
    rank = ranks(mha_pools("page_first"), metrics=True)
    rank.attach(*storage)
    rank.backup(tokens(6))
    rank.prefetch(tokens(6))
    metrics = rank.bridge.get_stats()
    assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([6], [6])
    assert len(metrics.prefetch_bandwidth) == len(metrics.backup_bandwidth) == 1
    assert metrics.prefetch_bandwidth[0] > 0
    assert metrics.backup_bandwidth[0] > 0
    assert rank.bridge.get_stats().prefetch_pgs == []
    rank.backup(tokens(6))
    assert rank.bridge.get_stats().backup_pgs == []


@pytest.mark.parametrize(
    ("parallel", "number"),
    [({"tp_rank": 1, "tp_size": 2}, "0"), ({"dp_rank": 1}, "1")],
    ids=["rank", "replica"],
)
def test_prometheus_can_ask_the_bridge_itself(ranks, storage, parallel, number):
    """Each rank at a port of its own, and each replica of plain DP, although the storage
    configuration of each says that it is number 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = ranks(mha_pools("page_first"), **parallel)
    rank.attach(*storage, metrics_port=port - 1, metrics_host="127.0.0.1")
    assert rank.controller.storage_config.dp_rank == 0
    rank.backup(tokens(6))
    said = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    ranked = (
        f'dp_rank="{number}",driver="{rank.bridge.storage.get_stats().driver}",model_name="llama",'
        f'pool="kv",pp_rank="0",tp_rank="{parallel.get("tp_rank", 0)}"'
    )
    assert f"hicache_storage_written_pages_total{{{ranked}}} 6.0" in said
    rank.detach()
    with pytest.raises(URLError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)


def test_metrics_can_be_switched_off(plain):
    plain.backup(tokens(6))
    assert plain.bridge.get_stats().backup_pgs == []
    assert plain.bridge.storage.get_stats().pools == {}
