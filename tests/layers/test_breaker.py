"""The circuit breaker: closed, open, half-open; misuse is told in every state."""

from __future__ import annotations

import threading

import pytest

from hicache_storage.layers import (
    BreakerState,
    CircuitBreaker,
    CircuitBreakerLayer,
    DeadlineLayer,
    StorageLayer,
    StorageOptions,
    wrap,
)
from hicache_storage.spec import (
    Capabilities,
    HiCacheStorageExtraInfo,
    HungReads,
    InvalidTransferError,
    PoolTransfer,
    StorageClosedError,
    StorageRefusedError,
    StorageUnavailableError,
    UnknownPoolError,
)
from tests.support.failing import failing

PATIENCE_SECONDS = 60.0
PASSED = HiCacheStorageExtraInfo(deadline_seconds=0)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


# The state machine
# ------------------------------------------------------------------------------------------------

# What happens one after the other: a number is the time, yes or no what `admits` answers.
STEPS = {
    "opens after two faults in a row": "failed yes failed no",
    "a success begins the row again": "failed succeeded failed yes",
    "a trial that succeeds closes it": "failed failed 4.9 no 5.0 yes no succeeded yes yes",
    "a trial that fails opens it again": "failed failed 5.0 yes failed 9.9 no 10.0 yes",
    # A get that is waited for may never come back, and kept all others out for as long.
    "a trial that hangs lets another try": (
        "failed failed 5.0 yes no 9.9 no 10.0 yes no succeeded succeeded yes"
    ),
    "calls that began before it opened do not keep it open": "failed failed 4.0 failed 5.0 yes",
    "the next call is the trial": "failed failed 5.0 yes undecided yes no",
    "what is undecided ends no row": "failed undecided failed no",
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_the_state_machine(steps):
    clock = Clock()
    breaker = CircuitBreaker(2, 5.0, clock)
    for number, step in enumerate(steps.split()):
        if step in ("yes", "no"):
            assert breaker.admits() is (step == "yes"), number
        elif step[0].isdigit():
            clock.now = float(step)
        else:
            getattr(breaker, step)()


# The layer
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(kit):
    """A storage that fails while `down` is set, behind a breaker of three faults and ten
    seconds."""
    storage, pool = kit.memory_storage()
    down = threading.Event()

    def before(operation):
        if down.is_set():
            raise OSError("down")

    storage.open()
    storage.before = before
    clock = Clock()
    layer = CircuitBreakerLayer(storage, 3, 10.0, clock)
    layer.register_mem_host_pool_v2(pool, "kv")
    return layer, storage, pool, down, clock


def open_reads(layer, down):
    down.set()
    for _ in range(3):
        assert layer.batch_exists_v2(["a"]).kv_hit_pages == 0
    down.clear()


def test_an_open_breaker_leaves_the_store_alone(broken):
    layer, storage, pool, down, _clock = broken
    open_reads(layer, down)
    asked = len(storage.operations)
    assert layer.batch_get_v2([pool.transfer("kv", ["a", "b"], [0, 1])]) == {"kv": [False, False]}
    assert layer.batch_present(["a"]) == [False]
    result = layer.batch_exists_v2(["a"], [PoolTransfer("mamba")])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {"kv": 0, "mamba": 0})
    assert len(storage.operations) == asked
    stats = layer.get_stats()
    assert (stats.breaker_state, stats.breaker_refusals, stats.faults) == ("open", 3, 3)
    layer.close()
    with pytest.raises(StorageClosedError):
        layer.batch_exists_v2(["a"])


@pytest.mark.parametrize("state", ["open", "half_open"])
def test_misuse_is_told_and_is_no_trial(broken, state):
    layer, storage, pool, down, clock = broken
    open_reads(layer, down)
    clock.now = 10.0 if state == "half_open" else 0.0
    for misuse in (
        lambda: layer.batch_get_v2([pool.transfer("swa", ["a"], [0])]),
        lambda: layer.batch_exists_v2(["a\0"]),
        lambda: layer.batch_present(["a"], pool="KV"),
    ):
        with pytest.raises(InvalidTransferError):
            misuse()
    # A call whose deadline has passed, or that names no pool, does not ask the store.
    assert layer.batch_exists_v2(["a"], None, PASSED).kv_hit_pages == 0
    assert layer.batch_present(["a"], pool="swa") == [False]
    assert layer.breakers["read"].state is BreakerState.OPEN
    clock.now = 10.0
    asked = len(storage.operations)
    layer.batch_exists_v2(["a"])
    assert len(storage.operations) == asked + 1, "the next call tries"
    assert layer.breakers["read"].state is BreakerState.CLOSED


def test_a_clear_counts_for_deletes_alone_and_raises_while_they_are_refused(broken):
    """LC-7: it is never answered as if it had happened."""
    layer, storage, pool, down, clock = broken
    pages = [pool.transfer("kv", ["a"], [0])]
    assert layer.batch_set_v2(pages) == {"kv": [True]}
    open_reads(layer, down)
    down.set()
    for _ in range(3):
        with pytest.raises(StorageUnavailableError, match="down"):
            layer.clear()
    down.clear()
    asked = len(storage.operations)
    with pytest.raises(StorageUnavailableError, match="of deletes is open; repeat the clear"):
        layer.clear()
    assert layer.delete(["a"]) == [False]
    assert len(storage.operations) == asked
    with pytest.raises(UnknownPoolError):
        layer.delete(["a"], pool="swa")
    assert storage.objects
    clock.now = 10.0
    layer.clear()
    assert not storage.objects
    assert layer.batch_set_v2(pages) == {"kv": [True]}


@pytest.mark.parametrize(("hangs", "kind"), [("write", "write"), ("exist", "read")])
def test_a_missed_deadline_is_a_fault_of_its_kind(kit, hangs, kind):
    storage, pool = kit.memory_storage(capabilities=Capabilities(may_hang=True))
    storage.open()
    guarded, release = DeadlineLayer(storage, PATIENCE_SECONDS), threading.Event()
    layer = CircuitBreakerLayer(guarded, 1, 10.0)
    layer.register_mem_host_pool_v2(pool, "kv")
    storage.before = lambda operation: operation != hangs or release.wait(PATIENCE_SECONDS)
    short = HiCacheStorageExtraInfo(deadline_seconds=0.05)
    if kind == "write":
        assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])], short) == {"kv": [False]}
    else:
        assert layer.batch_exists_v2(["a"], None, short).kv_hit_pages == 0
    others = dict.fromkeys(("read", "write", "delete"), "closed")
    assert layer.get_stats().breaker_states == {**others, kind: "open"}
    asked = len(storage.operations)
    layer.batch_exists_v2(["a"])
    assert len(storage.operations) == asked + (kind == "write")
    release.set()
    layer.close()


class Foreign(StorageLayer):
    """A storage that counts its faults and tells them to nobody, as one that is not an
    `ObjectStorage` may."""

    notes_faults = False


def test_a_storage_that_only_counts_faults_opens_it_too(kit):
    storage, _pool = kit.memory_storage()
    storage.before = failing(OSError("down"))
    layer = CircuitBreakerLayer(Foreign(storage), 2, 10.0)
    for _ in range(2):
        layer.batch_exists_v2(["a"])
    assert layer.breakers["read"].state is BreakerState.OPEN


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_a_call_whose_deadline_has_passed_does_not_end_a_row_of_faults(kit, deadline):
    """Nor one that has waited in a queue for as long: the store was not asked."""
    storage, pool = kit.memory_storage()
    layer = wrap(storage, StorageOptions(deadline_seconds=deadline, breaker_threshold=2))
    layer.register_mem_host_pool_v2(pool, "kv")
    layer.open()
    pages = [pool.transfer("kv", ["a"], [0])]
    storage.before = failing(OSError("down"))
    layer.batch_get_v2(pages)
    layer.batch_get_v2(pages, PASSED)
    layer.batch_exists_v2(["a"], None, PASSED)
    layer.batch_present(["a"], extra_info=PASSED)
    layer.batch_get_v2(pages)
    assert layer.get_stats().breaker_states["read"] == "open"
    layer.close()


CACHED = {
    "batch_exists_v2": lambda layer, _: layer.batch_exists_v2(["a"]),
    "batch_present": lambda layer, _: layer.batch_present(["a"]),
    "batch_get_v2": lambda layer, pages: layer.batch_get_v2(pages),
}


@pytest.mark.parametrize("call", CACHED)
def test_an_answer_from_memory_neither_closes_it_nor_ends_a_row_of_faults(kit, call):
    storage, pool = kit.memory_storage(
        capabilities=Capabilities(may_hang=True, hung_reads=HungReads.BOUNCE_BUFFER)
    )
    storage.open()
    pages, clock, in_memory = [pool.transfer("kv", ["a"], [0])], Clock(), []
    layer = CircuitBreakerLayer(DeadlineLayer(storage, 60.0), 2, 10.0, clock)
    layer.register_mem_host_pool_v2(pool, "kv")
    storage.answers_from_memory = lambda operation: bool(in_memory)
    storage.objects_exist_cached = lambda batches, call: [[True]]
    storage.read_objects_cached = lambda batches, call: all(
        read.fill(storage.objects[read.namespace.object_name(read.key)])
        for batch in batches
        for read in batch.reads
    )
    assert layer.batch_set_v2(pages) == {"kv": [True]}

    def answer_from_memory():
        in_memory.append(True)
        CACHED[call](layer, pages)
        in_memory.clear()

    storage.before = failing(OSError("down"))
    layer.batch_get_v2(pages)
    answer_from_memory()
    assert layer.breakers["read"].state is BreakerState.CLOSED
    layer.batch_get_v2(pages)
    assert layer.breakers["read"].state is BreakerState.OPEN
    clock.now = 10.0
    answer_from_memory()
    assert layer.breakers["read"].state is BreakerState.OPEN
    layer.close()


def test_faults_beside_pages_that_are_served_count_and_end_a_row_of_failed_calls(kit):
    """One of several stores hangs: the breaker refused the pages of the others for seconds."""
    storage, pool = kit.memory_storage()
    storage.open()
    served = []

    def fail_partly(operation):
        if operation == "read":
            storage.note_partial_faults([OSError("one store is down")], served=bool(served))

    storage.before = fail_partly
    layer = CircuitBreakerLayer(storage, 2, 10.0)
    layer.register_mem_host_pool_v2(pool, "kv")
    for count, served[:], state in [
        (1, [], BreakerState.CLOSED),
        (2, ["b"], BreakerState.CLOSED),
        (3, [], BreakerState.CLOSED),
        (4, [], BreakerState.OPEN),
    ]:
        layer.batch_get_v2([pool.transfer("kv", ["a"], [0])])
        assert (layer.fault_count(), layer.breakers["read"].state) == (count, state)


def test_refusals_of_some_pages_are_no_fault_and_faults_beside_them_are(kit):
    storage, _pool = kit.memory_storage()
    refused, fault = StorageRefusedError("quota"), OSError("down")
    storage.note_partial_faults([refused], served=True)
    assert storage.fault_count() == 0
    storage.note_partial_faults([refused, fault], served=True)
    assert storage.fault_count() == 1
    with pytest.raises(OSError, match="down"):
        storage.note_partial_faults([refused, fault], served=False)
