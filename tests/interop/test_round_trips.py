"""Pages that SGLang's controller writes come back byte for byte, into the right pages and no
others."""

from __future__ import annotations

from types import SimpleNamespace

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
    result = rank.prefetch(tokens(9))
    assert (result.hit_tokens, result.completed_tokens) == (6 * PAGE_SIZE, 6 * PAGE_SIZE)
    assert rank.delivered(result, backup)
    assert rank.bridge.refused_calls == 0
    assert rank.prefetch(tokens(4, start=1000)).hit_tokens == 0


def test_sglang_is_told_of_each_batch_when_it_counts(ranks, trouble):
    rank = ranks(mha_pools("page_first"))
    rank.controller.enable_storage_metrics = True
    rank.attach("sample")
    rank.backup(tokens(6))
    rank.wipe()
    rank.prefetch(tokens(9))
    told = rank.bridge.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([6], [6])
    assert all(speed > 0 for speed in told.backup_bandwidth + told.prefetch_bandwidth)
    assert rank.bridge.get_stats() == type(told)()


def test_a_page_that_vanishes_after_the_query_ends_the_hit_there(sample, trouble):
    backup = sample.backup(tokens(6))
    assert len(STORES["default"]) == 6, "each page once, K and V together"
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


def test_the_engine_tells_what_its_pool_does_not(ranks, storage, monkeypatch):
    """Which fp8 it is, and how the model was changed."""
    model = SimpleNamespace(
        kv_cache_dtype="fp8_e5m2", json_model_override_args="{}", quantization_param_path=None
    )
    monkeypatch.setattr("hicache_storage.engines.sglang.bridge.get_model", lambda: model)
    rank = ranks(mha_pools("page_first", dtype=torch.float8_e5m2))
    rank.attach(*storage)
    identity = rank.bridge.storage.identity
    assert (identity.kv_dtype, identity.revision) == ("fp8_e5m2", "")
    rank.backup(tokens(4))
    rank.detach()
    rank.wipe()
    model.json_model_override_args = '{"rope_scaling": {"type": "yarn", "factor": 4.0}}'
    rank.attach(*storage)
    assert rank.prefetch(tokens(4)).hit_tokens == 0
