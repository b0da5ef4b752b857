"""Whatever a driver does, SGLang's threads live on, every operation is acknowledged, and no wrong
page is reported."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from hicache_storage.layers import DeadlineLayer
from hicache_storage.spec import HiCacheStorageExtraInfo, PoolTransferResult
from tests.interop.drivers import STORES
from tests.interop.engine import PAGE_SIZE, mamba_pool, mha_pools, tokens

pytestmark = pytest.mark.interop

OPERATIONS = ("exists", "get", "set")
SHORT_SECONDS = 0.3
"""Only while something hangs."""
PATIENCE_SECONDS = 60.0


def raise_os_error(operation):
    raise OSError(5, "Input/output error")


def raise_runtime_error(operation):
    raise RuntimeError("a bug in the driver")


def leave_the_process(operation):
    sys.exit(3)


def hang_for_a_while(operation):
    time.sleep(2 * SHORT_SECONDS)


def answer_for_too_many(operation):
    return [[True] * 1000]


def answer_with_nothing(operation):
    return []


DRIVER_FAULTS = (
    raise_os_error,
    raise_runtime_error,
    hang_for_a_while,
    answer_for_too_many,
    answer_with_nothing,
)


def with_mamba():
    pools = mha_pools("page_first")
    pools.side["mamba"] = mamba_pool("page_first")
    return pools


def give(rank, seconds):
    """Let the calls from now on have another deadline."""
    layer = rank.bridge.storage
    while not isinstance(layer, DeadlineLayer):
        layer = layer.inner
    layer._seconds, layer._default = seconds, HiCacheStorageExtraInfo(deadline_seconds=seconds)


def still_works(rank, trouble):
    """After the trouble is over: the threads live, and pages go out and come back."""
    trouble.clear()
    assert rank.all_alive()
    rank.wipe()
    backup = rank.backup(tokens(3, start=7000), checkpoints={"mamba": 1} if rank.hybrid else None)
    rank.wipe()
    result = rank.prefetch(tokens(3, start=7000), windows={"mamba": 1} if rank.hybrid else None)
    return backup.completed_tokens == 3 * PAGE_SIZE and rank.delivered(result, backup)


@pytest.mark.parametrize("hybrid", [False, True], ids=["kv", "hybrid"])
@pytest.mark.parametrize("fault", DRIVER_FAULTS)
def test_a_driver_that_fails(ranks, trouble, fault, hybrid):
    rank = ranks(with_mamba() if hybrid else mha_pools("page_first"))
    rank.attach("sample", deadline_seconds=PATIENCE_SECONDS)
    checkpoints = {"mamba": 1} if hybrid else None
    backup = rank.backup(tokens(4), checkpoints=checkpoints)
    rank.wipe()
    if fault is hang_for_a_while:
        give(rank, SHORT_SECONDS)
    for operation in OPERATIONS:
        trouble.at(operation, answer=fault)
        if operation == "set":
            rank.backup(tokens(4, start=3000), checkpoints=checkpoints)
        else:
            result = rank.prefetch(tokens(4), windows=checkpoints)
            assert result.completed_tokens in (0, 4 * PAGE_SIZE)
            assert result.completed_tokens == 0 or rank.delivered(result, backup)
        assert trouble.happened
        rank.wipe()
        trouble.clear()
    stats = rank.bridge.storage.get_stats()
    # A get of this driver reads into the host pool itself, so it is waited for (rule GET-9).
    assert stats.deadlines_missed >= 2 if fault is hang_for_a_while else stats.faults >= 3
    give(rank, PATIENCE_SECONDS)
    assert still_works(rank, trouble)


def unruly_answers():
    def huge(operation):
        if operation == "exists":
            return PoolTransferResult(1000, {}, list(range(1, 1001)))
        return {"kv": [True] * 1000, "mamba": [True] * 1000}

    def empty(operation):
        return PoolTransferResult(0) if operation == "exists" else {}

    def another_type(operation):
        return "yes"

    return (raise_os_error, raise_runtime_error, leave_the_process, huge, empty, another_type)


@pytest.mark.parametrize("hybrid", [False, True], ids=["kv", "hybrid"])
@pytest.mark.parametrize("fault", unruly_answers())
def test_a_storage_that_breaks_the_contract(ranks, trouble, fault, hybrid):
    rank = ranks(with_mamba() if hybrid else mha_pools("page_first"))
    rank.attach("unruly", deadline_seconds=PATIENCE_SECONDS)
    checkpoints = {"mamba": 1} if hybrid else None
    rank.backup(tokens(4), checkpoints=checkpoints)
    rank.wipe()
    for operation in OPERATIONS:
        trouble.at(operation, answer=fault)
        if operation == "set":
            assert rank.backup(tokens(4, start=3000), checkpoints=checkpoints).completed_tokens == 0
        else:
            assert rank.prefetch(tokens(4), windows=checkpoints).completed_tokens == 0
        assert trouble.happened
        rank.wipe()
        trouble.clear()
    assert still_works(rank, trouble)


def test_a_storage_that_fails_when_all_pools_are_registered(ranks, trouble, caplog):
    """SGLang would be left half attached, with its threads running."""
    trouble.at("registered", answer=raise_runtime_error)
    rank = ranks(with_mamba())
    rank.attach("unruly")
    assert trouble.happened == 1
    assert "refused on_host_pools_registered" in caplog.text
    assert still_works(rank, trouble)


def test_a_failed_question_has_a_verdict_for_every_pool(ranks, trouble):
    """SGLang reads a pool that is left out as one that nothing is known about."""
    rank = ranks(with_mamba())
    rank.attach("unruly")
    trouble.at("exists", answer=raise_runtime_error)
    answer = rank.bridge.batch_exists_v2(
        ["a"], [PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    )
    assert (answer.kv_hit_pages, answer.restorable_prefix_pages) == (0, [])
    assert answer.extra_pool_hit_pages == {"kv": 0, "mamba": 0}


def test_damaged_pages_are_misses_and_are_repaired(ranks, trouble):
    rank = ranks(mha_pools("page_first"))
    rank.attach("sample")
    rank.backup(tokens(6))
    memory_store = STORES["default"]
    third = list(memory_store)[2]
    memory_store[third] = bytes(len(memory_store[third]))
    rank.wipe()
    result = rank.prefetch(tokens(6))
    assert (result.hit_tokens, result.completed_tokens) == (6 * PAGE_SIZE, 2 * PAGE_SIZE)
    rank.wipe()
    assert rank.prefetch(tokens(6)).hit_tokens == 2 * PAGE_SIZE
    rank.wipe()
    backup = rank.backup(tokens(6))
    rank.wipe()
    assert rank.delivered(rank.prefetch(tokens(6)), backup)


def test_a_store_that_is_away_at_first_is_found_later(ranks, trouble, caplog):
    trouble.at("connect", answer=raise_os_error)
    rank = ranks(mha_pools("page_first"))
    rank.attach("sample")
    assert "cannot be opened yet" in caplog.text
    assert rank.backup(tokens(3)).completed_tokens == 0
    trouble.clear()
    time.sleep(1.1)
    assert still_works(rank, trouble)


@pytest.mark.parametrize(
    ("keys", "indices"),
    [
        (["a", "b"], torch.arange(PAGE_SIZE)),
        (["a"], torch.arange(PAGE_SIZE, dtype=torch.int32)),
        (["a"], torch.arange(PAGE_SIZE) + 1),
        (["a"], torch.arange(PAGE_SIZE) + 10_000),
        (["a"], torch.arange(0, 2 * PAGE_SIZE, 2)),
        (["a" * 600], torch.arange(PAGE_SIZE)),
        (["a"], None),
        ([7], torch.arange(PAGE_SIZE)),
    ],
    ids=[
        "too few",
        "dtype",
        "misaligned",
        "out of range",
        "scattered",
        "long key",
        "none",
        "no text",
    ],
)
def test_misuse_is_answered_not_raised(ranks, storage, caplog, keys, indices):
    rank = ranks(with_mamba())
    rank.attach(*storage)
    bridge = rank.bridge
    for move in (bridge.batch_get_v1, bridge.batch_set_v1):
        assert move(keys, indices) == [False] * len(keys)
    good = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0]), keys=["state"])
    bad = PoolTransfer(PoolName.KV, host_indices=indices, keys=keys)
    assert bridge.batch_set_v2([bad, good]) == {"kv": [False] * len(keys), "mamba": [True]}
    assert bridge.batch_get_v2([bad, good]) == {"kv": [False] * len(keys), "mamba": [True]}
    assert bridge.refused_calls == 4
    assert "refused batch_set_v1, pool kv: InvalidTransferError" in caplog.text


def test_a_reason_is_logged_once(ranks, storage, caplog):
    rank = ranks(mha_pools("page_first"))
    rank.attach(*storage)
    caplog.clear()
    for _ in range(5):
        rank.bridge.batch_get_v1(["a", "b"], torch.arange(PAGE_SIZE))
    assert rank.bridge.refused_calls == 5
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_odd_questions_have_answers(ranks, storage):
    rank = ranks(with_mamba())
    rank.attach(*storage)
    bridge = rank.bridge
    assert bridge.batch_exists([]) == 0
    assert bridge.batch_exists(["a\0b"]) == 0
    assert bridge.batch_get_v1([], torch.tensor([], dtype=torch.int64)) == []
    assert bridge.batch_get_v2([]) == {}
    assert bridge.batch_set_v2([PoolTransfer(PoolName.MAMBA)]) == {"mamba": []}
    nowhere = PoolTransfer(PoolName.SWA, host_indices=torch.arange(2), keys=["a", "b"])
    assert bridge.batch_get_v2([nowhere]) == {"swa": [False, False]}
    answer = bridge.batch_exists_v2(
        ["a"], [PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    )
    assert (answer.kv_hit_pages, answer.extra_pool_hit_pages) == (0, {"kv": 0, "swa": 0})


def test_a_pool_asked_twice_in_a_call_answers_one_after_the_other(ranks, storage):
    rank = ranks(with_mamba())
    rank.attach(*storage)
    first = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0]), keys=["a"])
    second = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([1, 2]), keys=["b", "c"])
    assert rank.bridge.batch_set_v2([first, second]) == {"mamba": [True, True, True]}
    first.keys = ["missing"]
    assert rank.bridge.batch_get_v2([first, second]) == {"mamba": [False, True, True]}


def test_calls_after_close_are_misses(ranks, storage):
    rank = ranks(mha_pools("page_first"))
    rank.attach(*storage)
    rank.backup(tokens(3))
    bridge = rank.bridge
    bridge.close()
    bridge.close()
    assert rank.prefetch(tokens(3)).hit_tokens == 0
    assert rank.backup(tokens(3)).completed_tokens == 0
    assert rank.all_alive()
