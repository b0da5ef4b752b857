"""Backups of one rank: what is stored stays, the rest is tried again, and the pages rest as long as
they are used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hicache_storage.hybrid import BackupResult, HybridIndices, ParallelConfig
from hicache_storage.spec import InvalidTransferError
from tests.hybrid.stack import INDEXER, KV, MAMBA, PAGE, hashes, identity
from tests.hybrid.storages import Faulty, fetched, keeping, of, without
from tests.support.waiting import eventually

KEYS = hashes(12)


def backed_up(stack, host, keys=KEYS, prefix=()):
    number = stack.controller.backups.begin(host, keys[: host.kv.numel() // PAGE], prefix)
    [result] = eventually(stack.controller.backups.completed)
    assert result.operation_id == number
    return result


def stored(number, **changes):
    return BackupResult(number, **{"complete": True, **changes})


def filled(stack, pages, ends=()):
    host = stack.take("host", pages, ends)
    stack.fill("host", host, KEYS)
    return host


def test_a_state_alone_is_stored_under_the_key_before_it(stack, store):
    stack.controller.attach(store.open())
    backed_up(stack, filled(stack, 4))
    alone = stack.take("host", 0, ends=(1,))
    alone = HybridIndices(states=alone.states, endpoints=(0,))
    stack.fill("host", alone, [], KEYS[:4])
    assert backed_up(stack, alone, prefix=KEYS[:4]) == stored(2)
    assert fetched(stack, 4).tokens == 4 * PAGE


def test_what_was_stored_is_kept_and_the_rest_tried_again(stack, store):
    """The peer stored 3 of 4 pages, counted none, and never tried again."""
    fails = {(KV, KEYS[2])}

    def keeps(*page):
        first = page in fails
        fails.discard(page)
        return not first

    storage = Faulty(store.open(), "batch_set_v2", keeping(keeps))
    stack.controller.attach(storage)
    host = filled(stack, 4, ends=(4,))
    assert backed_up(stack, host) == stored(1)
    assert storage.stored()[1:] == [{KV: [KEYS[2]]}]
    assert stack.controller.stats().backup_retries == 1


@pytest.mark.parametrize(("pool", "page"), [(KV, 3), (INDEXER, 1), (MAMBA, 1), (MAMBA, 5), (KV, 0)])
def test_what_is_never_stored_is_given_up(stack, store, pool, page):
    keeps = keeping(lambda *stored: stored != (pool, KEYS[page]))
    storage = Faulty(store.open(), "batch_set_v2", keeps)
    stack.controller.attach(storage)
    assert backed_up(stack, filled(stack, 6, ends=(2, 6))) == stored(1, complete=False)
    assert len(storage.calls) == 3
    stats = stack.controller.stats()
    assert (stats.pages_backed_up, stats.pages_dropped, stats.backup_retries) == (13, 1, 2)


def test_calls_take_so_many_pages_of_all_pools(stack, store, monkeypatch):
    monkeypatch.setattr("hicache_storage.hybrid.storage_io.backups.BATCH_PAGES", 4)
    storage = Faulty(store.open(), "batch_set_v2", of(lambda answer: answer))
    stack.controller.attach(storage)
    assert backed_up(stack, filled(stack, 6, ends=(2, 4, 5))).complete
    assert storage.stored() == [
        {INDEXER: KEYS[:4], KV: KEYS[:4], MAMBA: [KEYS[1], KEYS[3]]},
        {INDEXER: KEYS[4:6], KV: KEYS[4:6], MAMBA: [KEYS[4]]},
    ]


@pytest.mark.parametrize(
    ("start", "lost", "lost_from", "lookups"),
    [
        (0, (), None, 0),
        (4, (), None, 1),
        (6, (2, 3), 2, 2),
        (8, (0,), 0, 2),
        # Down: it has not even what it has just taken; a storm of rewriting would meet it when it
        # is back.
        (4, (0, 4), None, 2),
    ],
)
def test_what_is_missing_before_a_span_is_told(stack, store, start, lost, lost_from, lookups):
    """An L3 evicts the beginning of a conversation that is alive on the host: what is stored behind
    it is of no use."""
    answer = without({KEYS[page] for page in lost})
    storage = Faulty(store.open(), "batch_exists_v2", answer)
    stack.controller.attach(storage)
    told = backed_up(stack, filled(stack, 2), KEYS[start:], KEYS[:start])
    assert told == stored(1, lost_from=lost_from)
    assert len(storage.calls) == lookups


@pytest.mark.parametrize("error", [SystemExit(1), OSError("down")])
def test_looking_for_what_is_missing_may_fail(stack, store, error):
    stack.controller.attach(Faulty(store.open(), "batch_exists_v2", error))
    assert backed_up(stack, filled(stack, 2), KEYS[4:6], KEYS[:4]) == stored(1)
    assert stack.controller.stats().storage_errors == 2


@pytest.mark.parametrize(
    "answer", [SystemExit(1), OSError("down"), None, {}, [True], of(lambda answer: {KV: [True]})]
)
def test_a_storage_that_fails_stores_nothing(stack, store, answer):
    stack.controller.attach(Faulty(store.open(), "batch_set_v2", answer))
    host = filled(stack, 3)
    assert backed_up(stack, host) == stored(1, complete=False)
    stack.controller.free_host(host)
    assert stack.free() == stack.total()


def test_without_a_storage_nothing_is_stored(stack):
    assert backed_up(stack, filled(stack, 2)) == stored(1, complete=False)


def test_a_storage_that_hangs_is_left_behind(stack, store, gate, impatient):
    storage, hang = store.open(), gate("write")
    impatient(hang)
    stack.controller.attach(storage)
    storage.before = hang
    host = filled(stack, 3, ends=(3,))
    assert backed_up(stack, host) == stored(1, complete=False)
    stack.controller.free_host(host)
    assert stack.free() == {KV: 13 * PAGE, MAMBA: 7}
    hang.open()
    eventually(lambda: stack.free() == stack.total())


def test_detaching_tells_what_is_on_its_way(make_stack, store, gate):
    storage, hang = store.open(), gate("write")
    stack = make_stack(stop_seconds=0.05)
    stack.controller.attach(storage)
    storage.before = hang
    hosts = [filled(stack, 2), filled(stack, 3)]
    numbers = [
        stack.controller.backups.begin(host, KEYS[: host.kv.numel() // PAGE]) for host in hosts
    ]
    assert hang.entered.wait(60)
    stack.controller.detach()
    told = [stored(number, complete=False) for number in numbers]
    assert stack.controller.backups.completed() == told
    for host in hosts:
        stack.controller.free_host(host)
    assert stack.free()[KV] <= 14 * PAGE
    hang.open()
    eventually(lambda: stack.free() == stack.total())


@pytest.mark.parametrize(
    ("replicated", "tp_rank", "pools"),
    [(False, 1, {INDEXER, KV, MAMBA}), (True, 0, {INDEXER, KV, MAMBA}), (True, 1, {MAMBA})],
)
def test_a_replicated_pool_has_one_writer(make_stack, kit, replicated, tp_rank, pools):
    """States are sharded over TP also where KV is not (rule ID-3)."""
    parallel = ParallelConfig(tp_rank=tp_rank, tp_size=2)
    agreeing = SimpleNamespace(size=2, all_reduce_min=list)
    stack = make_stack(parallel=parallel, rank_group=agreeing)
    inner = kit.storage(identity(parallel, kv_replicated=replicated))
    kit.opened.append(inner)
    storage = Faulty(inner, "batch_set_v2", of(lambda answer: answer))
    stack.controller.attach(storage)
    assert backed_up(stack, filled(stack, 2, ends=(2,))).complete
    assert set().union(*storage.stored()) == pools


@pytest.mark.parametrize(
    ("host", "hashes", "message"),
    [
        (HybridIndices(torch.arange(2 * PAGE)), KEYS[:1], "one for each of 2 pages, got 1"),
        (HybridIndices(torch.arange(2 * PAGE - 1)), KEYS[:2], "whole pages"),
        (
            HybridIndices(states=torch.arange(1), endpoints=(0,)),
            [],
            "prefix_hashes is empty",
        ),
    ],
)
def test_spans_that_do_not_fit_are_refused(stack, host, hashes, message):
    with pytest.raises(InvalidTransferError, match=message):
        stack.controller.backups.begin(host, hashes)
    assert stack.controller.backups.completed() == []
