"""Prefetches of one rank: what is delivered, what is cut where, how long a request waits, and what
faults do."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hicache_storage.hybrid import PrefetchRules
from hicache_storage.hybrid.storage_io.prefetch_jobs import PrefetchBuffers, ReadStep, plan_reads
from hicache_storage.spec import PoolTransferResult, seconds_since_asked
from tests.hybrid.stack import INDEXER, KV, MAMBA, PAGE, hashes
from tests.hybrid.storages import Faulty, fetched, finished, of, ready
from tests.support.waiting import eventually

WAIT = {"threshold_tokens": PAGE, "policy": "wait_complete", "occupancy": 1.0}


def check(stack, result, keys, pages, ends):
    """What was delivered is right, and nothing else is taken."""
    assert result.tokens == pages * PAGE
    assert result.endpoints == ends
    assert stack.holds("host", result, keys)
    assert stack.free() == {
        KV: stack.total()[KV] - pages * PAGE,
        MAMBA: stack.total()[MAMBA] - len(ends),
    }
    stack.controller.free_host(result)
    assert stack.free() == stack.total()


def test_a_prefix_is_delivered_in_all_pools(stack, store):
    keys = store.fill(8, ends=(4, 8))
    stack.controller.attach(store.open())
    result = fetched(stack, 12)
    check(stack, result, keys, 8, (8,))
    stats = stack.controller.stats()
    assert (stats.tokens_hit, stats.tokens_prefetched, stats.prefetches) == (8 * PAGE, 8 * PAGE, 1)


def test_memory_is_taken_after_the_hit_is_known(stack, store, gate):
    store.fill(8, ends=(8,))
    storage, hang = store.open(), gate("exist")
    stack.controller.attach(storage)
    storage.before = hang
    operation = stack.controller.prefetcher.begin("r", hashes(8))
    assert hang.entered.wait(60)
    assert not ready(stack, operation)
    assert stack.free() == stack.total()
    hang.open()
    assert finished(stack, operation).tokens == 8 * PAGE


@pytest.mark.parametrize(("free_pages", "pages"), [(8, 8), (7, 2), (5, 2), (2, 2), (1, 0), (0, 0)])
def test_a_short_host_gets_the_max_restorable_prefix_that_fits(
    make_stack, store, free_pages, pages
):
    """D1: checkpoints {2, 8} of 8 pages; with 5 free pages the peer reads 5 and restores none."""
    keys = store.fill(8, ends=(2, 8))
    stack = make_stack(pages=16)
    stack.controller.attach(store.open())
    others = stack.take("host", 16 - free_pages) if free_pages < 16 else None
    result = fetched(stack, 8)
    stack.give("host", others)
    check(stack, result, keys, pages, (pages,) if pages else ())
    assert stack.controller.stats().tokens_without_room == (8 - pages) * PAGE


def test_the_cut_is_not_under_the_threshold(make_stack, store):
    store.fill(8, ends=(2, 8))
    stack = make_stack(prefetch=PrefetchRules(**{**WAIT, "threshold_tokens": 3 * PAGE}))
    stack.controller.attach(store.open())
    stack.take("host", 11)
    assert fetched(stack, 8).tokens == 0
    assert stack.free() == {KV: 5 * PAGE, MAMBA: 8}


def test_what_is_not_begun(make_stack, store):
    stack = make_stack(prefetch=PrefetchRules(threshold_tokens=3 * PAGE, policy="wait_complete"))
    assert stack.controller.prefetcher.begin("r", hashes(8)) is None, "no storage"
    stack.controller.attach(store.open())
    assert stack.controller.prefetcher.begin("r", hashes(2)) is None, "too short"
    first = stack.controller.prefetcher.begin("r", hashes(8))
    assert first is not None
    assert stack.controller.prefetcher.begin("r", hashes(3)) is None, (
        "half of the host's 16 pages are asked for"
    )
    stack.controller.prefetcher.terminate(first)
    assert stack.controller.prefetcher.begin("r", hashes(3)) is not None
    stats = stack.controller.stats()
    assert (stats.prefetches, stats.prefetches_below_threshold, stats.prefetches_rate_limited) == (
        2,
        1,
        1,
    )


# How long a request waits
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "goes_on"), [("best_effort", True), ("wait_complete", False), ("timeout", True)]
)
def test_policies_while_the_states_are_pending(make_stack, store, gate, policy, goes_on):
    """The timeout holds also where KV is there and only a side pool is not (issue 35181 of the
    peer)."""
    store.fill(8, ends=(8,))
    storage, hang = store.open(), gate("read")
    rules = PrefetchRules(**{**WAIT, "policy": policy}, base_seconds=0, seconds_per_1024_tokens=0)
    stack = make_stack(prefetch=rules)
    stack.controller.attach(storage)
    operation = stack.controller.prefetcher.begin("r", hashes(8))
    storage.before = hang
    eventually(lambda: ready(stack, operation) is goes_on and hang.hanging)
    assert not operation.done
    if goes_on:
        assert stack.controller.prefetcher.terminate(operation).tokens == 0
    hang.open()
    if not goes_on:
        assert finished(stack, operation).tokens == 8 * PAGE


@pytest.mark.parametrize("call", [3, 4])
def test_a_terminated_prefetch_delivers_up_to_its_last_savepoint(
    make_stack, store, gate, monkeypatch, call
):
    """Calls of 4 pages end at checkpoints: a prefix that was saved is handed over, what is on its
    way, pages or the next state, is not."""
    monkeypatch.setattr("hicache_storage.hybrid.storage_io.prefetch_jobs.BATCH_PAGES", 4)
    keys = store.fill(12, ends=(3, 7, 12))
    storage, hang = store.open(), gate("read")
    stack = make_stack(pages=16, states=4)
    stack.controller.attach(storage)
    reads = []

    def one_hangs(operation):
        reads.append(operation)
        if reads.count("read") == call:
            hang(operation)

    storage.before = one_hangs
    operation = stack.controller.prefetcher.begin("r", hashes(12))
    eventually(lambda: ready(stack, operation) or hang.hanging)
    result = stack.controller.prefetcher.terminate(operation)
    assert result.tokens == 7 * PAGE
    assert stack.free()[KV] == 4 * PAGE, "what the call may still write into rests"
    assert stack.holds("host", result, keys)
    hang.open()
    eventually(lambda: stack.free()[KV] == 9 * PAGE)
    check(stack, result, keys, 7, (7,))


def test_a_state_that_is_overwritten_is_not_there_any_more(stack):
    """Another rank may have the shorter endpoint alone."""
    buffers = PrefetchBuffers(stack.group, torch.arange(12 * PAGE), torch.arange(2))
    buffers.pages = 12
    for end in (3, 7, 12):
        buffers.arrived[end] = buffers.take_state()
    assert [buffers.is_complete(end) for end in (3, 7, 12)] == [False, True, True]


@pytest.mark.parametrize(
    ("with_states", "plan"),
    [
        (True, [(0, 6, True), (6, 14, False), (14, 21, True)]),
        (False, [(0, 8, False), (8, 16, False), (16, 21, True)]),
    ],
)
def test_calls_end_at_checkpoints_that_are_not_too_early(monkeypatch, with_states, plan):
    monkeypatch.setattr("hicache_storage.hybrid.storage_io.prefetch_jobs.BATCH_PAGES", 8)
    assert plan_reads(21, [1, 6, 9, 21], with_states=with_states) == [
        ReadStep(*step) for step in plan
    ]


# Faults
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "pages", "end"), [(KV, [6], 5), (INDEXER, [6, 4], 2), (MAMBA, [7, 4], 2)]
)
def test_a_page_that_has_gone_cuts_to_the_checkpoint_before(stack, store, pool, pages, end):
    """Evicted between the lookup and the read."""
    keys = store.fill(8, ends=(2, 5, 8))
    storage = store.open()
    stack.controller.attach(storage)
    names = [storage.pools[pool].namespace.object_name(keys[page]) for page in pages]

    def evict(operation):
        if operation == "read":
            for name in names:
                store.objects.pop(name, None)

    storage.before = evict
    check(stack, fetched(stack, 8), keys, end, (end,))


GARBAGE = [
    ("batch_exists_v2", SystemExit(1)),
    ("batch_exists_v2", RuntimeError("down")),
    ("batch_exists_v2", None),
    ("batch_exists_v2", 8),
    ("batch_exists_v2", PoolTransferResult(8, {}, [9])),
    ("batch_exists_v2", PoolTransferResult(8, {}, [0, 8])),
    ("batch_exists_v2", PoolTransferResult(8, {}, [True, 8])),
    ("batch_exists_v2", PoolTransferResult(8, {}, None)),
    ("batch_get_v2", KeyboardInterrupt()),
    ("batch_get_v2", ValueError("bug")),
    ("batch_get_v2", None),
    ("batch_get_v2", {}),
    ("batch_get_v2", [True]),
    ("batch_get_v2", of(lambda answer: dict.fromkeys(answer, True))),
    ("batch_get_v2", of(lambda answer: {name: pages[:-1] for name, pages in answer.items()})),
    ("batch_get_v2", of(lambda answer: {name: [*pages, True] for name, pages in answer.items()})),
    ("batch_get_v2", of(lambda answer: {name: [1] * len(pages) for name, pages in answer.items()})),
    ("batch_get_v2", of(lambda answer: {KV: answer[KV]})),
]


@pytest.mark.parametrize(("name", "answer"), GARBAGE)
def test_what_is_no_answer_is_a_miss(stack, store, name, answer):
    store.fill(8, ends=(8,))
    stack.controller.attach(Faulty(store.open(), name, answer))
    assert fetched(stack, 8).tokens == 0
    assert stack.free() == stack.total()
    stats = stack.controller.stats()
    raised = isinstance(answer, BaseException)
    assert (stats.storage_errors > 0, stats.invalid_answers > 0) == (raised, not raised)
    assert fetched(stack, 8).tokens == 0, "the workers live"


def test_a_storage_that_hangs_is_left_behind(stack, store, gate, impatient):
    """Its pages rest until the call comes back, and come back then."""
    keys = store.fill(8, ends=(4, 8))
    storage, hang = store.open(), gate("read")
    impatient(hang)
    stack.controller.attach(storage)
    storage.before = hang
    result = fetched(stack, 8)
    assert result.tokens == 0
    assert stack.free() == {KV: 8 * PAGE, MAMBA: 7}
    stats = stack.controller.stats()
    assert (stats.abandoned_calls, stats.stuck_calls) == (1, 1)
    others = stack.take("host", 8)
    stack.fill("host", others, hashes(8, seed=1))
    hang.open()
    eventually(lambda: stack.free() == {KV: 8 * PAGE, MAMBA: 8})
    assert stack.holds("host", others, hashes(8, seed=1))
    assert stack.controller.stats().stuck_calls == 0
    stack.give("host", others)
    check(stack, fetched(stack, 8), keys, 8, (8,))


def test_a_storage_that_always_hangs_costs_two_threads(stack, store, gate, impatient):
    store.fill(8, ends=(8,))
    storage, hang = store.open(), gate("exist")
    impatient(hang)
    stack.controller.attach(storage)
    storage.before = hang
    for _ in range(2):
        # The third waits for a thread when the second is given up.
        operations = [stack.controller.prefetcher.begin("r", hashes(4)) for _ in range(3)]
        assert [finished(stack, operation).tokens for operation in operations] == [0, 0, 0]
    assert hang.hanging == 2
    hang.open()
    eventually(lambda: stack.controller.stats().stuck_calls == 0)
    assert fetched(stack, 8).tokens == 8 * PAGE


@pytest.mark.parametrize("operation", ["exist", "read"])
def test_a_hanging_storage_holds_up_nobody(make_stack, store, gate, operation):
    store.fill(8, ends=(8,))
    storage, hang = store.open(), gate(operation)
    stack = make_stack(stop_seconds=0.05)
    stack.controller.attach(storage)
    storage.before = hang
    prefetches = [stack.controller.prefetcher.begin("r", hashes(8)) for _ in range(2)]
    eventually(lambda: ready(stack, prefetches[0]) or hang.hanging)
    stack.controller.detach()
    assert all(prefetch.ready for prefetch in prefetches)
    for prefetch in prefetches:
        assert stack.controller.prefetcher.terminate(prefetch).tokens == 0
    free = stack.free()[KV]
    assert free <= 8 * PAGE if operation == "read" else free == 16 * PAGE
    assert not stack.controller.attached
    hang.open()
    eventually(lambda: stack.free() == stack.total())
    stack.controller.attach(store.open())
    assert fetched(stack, 8).tokens == 8 * PAGE


def test_the_deadline_of_a_lookup_begins_when_it_is_submitted(stack, store, gate):
    """Behind hung lookups each of the others would have a deadline of its own, one after another."""
    storage, hang, waited = store.open(), gate("exist"), []
    stack.controller.attach(storage)
    storage.before = lambda operation: (
        hang(operation) or (operation == "exist" and waited.append(seconds_since_asked()))
    )
    first, second = (stack.controller.prefetcher.begin("r", hashes(8)) for _ in range(2))
    assert hang.entered.wait(60)
    submitted = time.monotonic()
    while (released := time.monotonic()) <= submitted:
        pass
    hang.open()
    for operation in (first, second):
        finished(stack, operation)
    assert waited[1] >= released - submitted


def test_without_threads_a_lookup_is_a_miss(stack, store, monkeypatch):
    """A system that is out of threads makes misses, and nobody waits."""

    def fail(thread):
        raise RuntimeError("can't start new thread")

    store.fill(8, ends=(8,))
    stack.controller.attach(store.open())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert fetched(stack, 8).tokens == 0
    assert fetched(stack, 8).tokens == 8 * PAGE
