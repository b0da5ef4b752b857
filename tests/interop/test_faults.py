"""Whatever a driver does, SGLang's threads live on, every operation is acknowledged, and no wrong
page is reported."""

from __future__ import annotations

import sys

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from hicache_storage.spec import PoolTransferResult
from tests.interop.drivers import raise_os_error
from tests.interop.engine import PAGE_SIZE, mha_pools, tokens, with_mamba

pytestmark = pytest.mark.interop

OPERATIONS = ("exists", "get", "set")


def raise_runtime_error(operation):
    raise RuntimeError("a bug in the driver")


def leave_the_process(operation):
    sys.exit(3)


def huge(operation):
    if operation == "exists":
        return PoolTransferResult(1000, {}, list(range(1, 1001)))
    return {"kv": [True] * 1000, "mamba": [True] * 1000}


def empty(operation):
    return PoolTransferResult(0) if operation == "exists" else {}


def still_works(rank, trouble):
    """After the trouble is over: the threads live, and pages go out and come back."""
    trouble.clear()
    assert rank.all_alive()
    rank.wipe()
    windows = {"mamba": 1} if rank.hybrid else {}
    return rank.restores(rank.backup(tokens(3, start=7000), checkpoints=windows), **windows)


@pytest.mark.parametrize(
    "fault",
    [raise_os_error, raise_runtime_error, leave_the_process, huge, empty, lambda operation: "yes"],
    ids=["error", "bug", "exit", "huge", "empty", "another-type"],
)
@pytest.mark.parametrize("windows", [{}, {"mamba": 1}], ids=["kv", "hybrid"])
def test_a_storage_that_breaks_the_contract(ranks, trouble, windows, fault):
    pools = mha_pools("page_first")
    rank = ranks(with_mamba(pools) if windows else pools)
    rank.attach("unruly", deadline_seconds=60.0)
    rank.backup(tokens(4), checkpoints=windows)
    rank.wipe()
    for operation in OPERATIONS:
        trouble.at(operation, answer=fault)
        if operation == "set":
            assert rank.backup(tokens(4, start=3000), checkpoints=windows).completed_tokens == 0
        else:
            assert rank.prefetch(tokens(4), windows=windows).completed_tokens == 0
        assert trouble.happened
        rank.wipe()
        trouble.clear()
    assert still_works(rank, trouble)


def test_a_storage_that_fails_when_all_pools_are_registered(ranks, trouble, caplog):
    """SGLang would be left half attached, with its threads running."""
    trouble.at("registered", answer=raise_runtime_error)
    rank = ranks(with_mamba(mha_pools("page_first")))
    rank.attach("unruly")
    assert trouble.happened == 1
    assert "refused on_host_pools_registered" in caplog.text
    assert still_works(rank, trouble)


def test_a_failed_question_has_a_verdict_for_every_pool(ranks, trouble):
    """SGLang reads a pool that is left out as one that nothing is known about."""
    rank = ranks(with_mamba(mha_pools("page_first")))
    rank.attach("unruly")
    trouble.at("exists", answer=raise_runtime_error)
    answer = rank.bridge.batch_exists_v2(
        ["a"], [PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    )
    assert (answer.kv_hit_pages, answer.restorable_prefix_pages) == (0, [])
    assert answer.extra_pool_hit_pages == {"kv": 0, "mamba": 0}


PAGE = torch.arange(PAGE_SIZE)
MISUSE = {
    "too few": (["a", "b"], PAGE),
    "dtype": (["a"], PAGE.int()),
    "misaligned": (["a"], PAGE + 1),
    "out of range": (["a"], PAGE + 10_000),
    "scattered": (["a"], 2 * PAGE),
    "long key": (["a" * 600], PAGE),
    "none": (["a"], None),
    "no text": ([7], PAGE),
}


@pytest.mark.parametrize(("keys", "indices"), MISUSE.values(), ids=MISUSE)
def test_misuse_is_answered_not_raised_and_its_reason_logged_once(hybrid, caplog, keys, indices):
    bridge = hybrid.bridge
    caplog.clear()
    for _ in range(2):
        for move in (bridge.batch_get_v1, bridge.batch_set_v1):
            assert move(keys, indices) == [False] * len(keys)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2
    good = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0]), keys=["state"])
    bad = PoolTransfer(PoolName.KV, host_indices=indices, keys=keys)
    for move in (bridge.batch_set_v2, bridge.batch_get_v2):
        assert move([bad, good]) == {"kv": [False] * len(keys), "mamba": [False]}
    assert bridge.refused_calls == 6
    assert "refused batch_set_v1, pool kv: InvalidTransferError" in caplog.text


def test_odd_questions_have_answers(hybrid):
    bridge = hybrid.bridge
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
    # A pool that is asked twice in a call answers one after the other.
    first = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0]), keys=["a"])
    second = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([1, 2]), keys=["b", "c"])
    assert bridge.batch_set_v2([first, second]) == {"mamba": [True, True, True]}
    first.keys = ["missing"]
    assert bridge.batch_get_v2([first, second]) == {"mamba": [False, True, True]}


def test_calls_after_close_are_misses(plain):
    plain.backup(tokens(3))
    plain.bridge.close()
    plain.bridge.close()
    assert plain.prefetch(tokens(3)).hit_tokens == 0
    assert plain.backup(tokens(3)).completed_tokens == 0
    assert plain.all_alive()
