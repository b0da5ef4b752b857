"""Attaching and detaching at run time: all of it or nothing, whatever the storage does (D14)."""

from __future__ import annotations

import threading
from dataclasses import asdict

import pytest

from hicache_storage.hybrid import HybridCacheController, ParallelConfig, StorageAttachedError
from hicache_storage.spec import (
    ConfigError,
    InvalidPoolError,
    StorageTimeoutError,
    StorageUnavailableError,
)
from tests.hybrid.stack import PAGE, hashes, identity
from tests.hybrid.storages import Faulty, fetched, is_closed
from tests.support.waiting import eventually


@pytest.fixture
def threads():
    """Names the threads that call a storage; none of other files in the same process."""
    before = set(threading.enumerate())

    def names():
        new = [thread.name for thread in set(threading.enumerate()) - before]
        return sorted(name for name in new if name.startswith("hicache-"))

    return names


@pytest.mark.parametrize(
    ("call", "error", "raised"),
    [
        ("open", StorageUnavailableError("down"), StorageUnavailableError),
        ("open", SystemExit(1), StorageUnavailableError),
        ("register_mem_host_pool_v2", InvalidPoolError("pool"), InvalidPoolError),
        ("register_mem_host_pool_v2", RuntimeError("bug"), RuntimeError),
        ("on_host_pools_registered", RuntimeError("bug"), RuntimeError),
    ],
)
def test_an_attach_that_fails_leaves_nothing(threads, stack, store, call, error, raised):
    store.fill(4, ends=(4,))
    inner = store.open()
    with pytest.raises(raised):
        stack.controller.attach(Faulty(inner, call, error))
    assert not stack.controller.attached
    assert threads() == []
    assert is_closed(inner)
    assert stack.controller.prefetcher.begin("r", hashes(4)) is None
    stack.controller.attach(store.open())
    assert fetched(stack, 4).tokens == 4 * PAGE


def test_an_attach_that_hangs_is_left_behind(threads, make_stack, store, gate, monkeypatch):
    monkeypatch.setattr("hicache_storage.hybrid.controller.ATTACH_SECONDS", 0.05)
    storage, hang = store.open(), gate("connect")
    storage.before = hang
    stack = make_stack(stop_seconds=0.05)
    with pytest.raises(StorageTimeoutError):
        stack.controller.attach(storage)
    assert not stack.controller.attached
    assert stack.controller.prefetcher.begin("r", hashes(4)) is None
    hang.open()
    eventually(lambda: "hicache-attach" not in threads())


def test_a_second_storage_is_refused(stack, store):
    first, second = store.open(), store.open()
    stack.controller.attach(first)
    with pytest.raises(StorageAttachedError):
        stack.controller.attach(second)
    assert second.operations == []
    assert not is_closed(second)
    assert stack.controller.attached


@pytest.mark.parametrize(("field", "value"), [("cp_size", 2), ("pp_size", 2), ("tp_size", 4)])
def test_a_storage_of_another_rank_is_refused(stack, store, field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        stack.controller.attach(store.open(**{field: value}))
    assert not stack.controller.attached


def test_detach_leaves_nothing_and_may_be_repeated(threads, stack, store):
    storage = store.open()
    stack.controller.attach(storage)
    store.fill(4, ends=(4,))
    assert fetched(stack, 4).tokens == 4 * PAGE
    assert threads() == ["hicache-query", "hicache-read"]
    for _ in range(2):
        stack.controller.detach()
        assert not stack.controller.attached
        assert threads() == []
    assert is_closed(storage)


def test_a_close_that_raises_or_hangs_stops_nobody(threads, make_stack, store, gate):
    stack = make_stack()
    stack.controller.attach(Faulty(store.open(), "close", RuntimeError("bug")))
    stack.controller.detach()
    assert stack.controller.stats().storage_errors == 1
    stack, storage, hang = make_stack(stop_seconds=2.0), store.open(), gate("disconnect")
    storage.before = hang
    stack.controller.attach(storage)
    stack.controller.detach()
    assert stack.controller.stats().abandoned_calls == 1
    hang.open()
    eventually(lambda: threads() == [])


def test_ranks_and_agreement_must_fit(stack):
    parallel = ParallelConfig(tp_size=2, cp_size=2)
    with pytest.raises(ConfigError, match="over 1 ranks, but parallel has 4"):
        HybridCacheController(stack.group, stack.transfers, parallel=parallel)


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 3, 1, 2), (4, 1, 1, 1), (1, 1, 1, 1)])
def test_ranks_are_counted_with_tp_innermost(sizes):
    tp, cp, pp, dp = sizes
    names = {"tp_size": tp, "cp_size": cp, "pp_size": pp, "dp_size": dp}
    places = [ParallelConfig.of_rank(rank, **names) for rank in range(tp * cp * pp * dp)]
    assert [place.rank for place in places] == list(range(len(places)))
    assert [(p.dp_rank, p.pp_rank, p.cp_rank, p.tp_rank) for p in places] == sorted(
        (d, p, c, t) for d in range(dp) for p in range(pp) for c in range(cp) for t in range(tp)
    )
    for ranks in places[0].replicas:
        assert len({places[rank].dp_rank for rank in ranks}) == 1
        assert len(ranks) == tp * cp * pp
    assert all(asdict(place).items() <= asdict(identity(place)).items() for place in places)
    # Each shard of a replicated pool has exactly one writer.
    writers = [place for place in places if identity(place, kv_replicated=True).is_writer("kv")]
    shards = {(place.cp_rank, place.pp_rank, place.dp_rank) for place in places}
    assert sorted((p.cp_rank, p.pp_rank, p.dp_rank) for p in writers) == sorted(shards)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelConfig(tp_rank=1), "tp_rank must be in"),
        (lambda: ParallelConfig(cp_rank=-1), "cp_rank must be in"),
        (
            lambda: ParallelConfig.of_rank(4, tp_size=2, cp_size=2),
            r"rank must be in \[0, 4\), got 4",
        ),
        (lambda: ParallelConfig.of_rank(-1, tp_size=2), "rank must be in"),
        (lambda: ParallelConfig.of_rank(0, pp_size=0), "pp_size must be at least 1"),
    ],
)
def test_places_outside_of_the_world_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
