"""The cause of a finding: exceptions and damage that were answered as misses, hung threads."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from types import SimpleNamespace

import pytest

from hicache_conformance.harness.process_state import MAX_CAUSES, cause_log
from hicache_conformance.injectors.injector import ActiveFaults
from hicache_conformance.model.case import Violation
from hicache_conformance.model.cause import (
    Cause,
    cause_of,
    damage,
    places_in_driver,
    stacks_in_driver,
)
from hicache_conformance.model.fault_plan import Fault, FaultKind
from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.runner.session import violation_finding
from hicache_storage.spec import StorageRefusedError, StorageUnavailableError
from hicache_storage.testing import MemoryStorage
from tests.conformance.records import ended, judged


class Broken(MemoryStorage):
    """A driver whose writes fail in a helper of its own."""

    error: Exception = KeyError("gone")

    def write_objects(self, batches, call):
        return [[self.put(write) for write in batch.writes] for batch in batches]

    def put(self, write):
        raise self.error


def broken(kit):
    storage, pool = Broken(kit.identity()), kit.pool()
    storage.register_mem_host_pool_v2(pool, "kv")
    return storage, pool


def refused(storage, pool, keys=("a",)):
    assert storage.batch_set_v2([pool.transfer("kv", list(keys), list(range(len(keys))))]) == {
        "kv": [False] * len(keys)
    }


def logged(kit, *errors):
    """The log of a driver whose writes have failed so, one after the other."""
    storage, pool = broken(kit)
    with cause_log() as log:
        for storage.error in errors or [Broken.error]:
            refused(storage, pool)
    return log


def test_the_driver_s_frames_come_first_the_innermost_at_the_top(kit):
    [cause] = logged(kit).causes
    assert cause.error == "KeyError: 'gone'"
    assert cause.place.startswith("test_causes.py:")
    assert cause.place.endswith(" in put")
    frames = [line for line in cause.traceback.splitlines() if line.startswith("  File")]
    names = [line.rpartition(" in ")[2] for line in frames if "test_causes.py" in line]
    assert [name for name in names if name != "<listcomp>"] == ["put", "write_objects"]
    assert all("hicache_storage" in line for line in frames[len(names) :])
    assert cause.traceback.endswith("KeyError: 'gone'")
    assert (cause.expected, cause.injected) == (False, False)


class FailsToClear(MemoryStorage):
    """A driver whose clears fail in a helper of its own."""

    def clear_namespaces(self, namespaces, call):
        self.unlink()

    def unlink(self):
        raise ValueError("value is not an integer")


def test_an_error_that_the_sdk_raised_from_the_driver_s_has_the_driver_s_place_and_words(kit):
    storage = FailsToClear(kit.identity())
    storage.register_mem_host_pool_v2(kit.pool(), "kv")
    with pytest.raises(StorageUnavailableError) as raised:
        storage.clear()
    # The suite's own frames are not taken for the driver's; this test's would be.
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    cause = cause_of(error)
    assert cause.error.startswith("StorageUnavailableError: ")
    assert "value is not an integer" in cause.error
    assert cause.place.endswith(" in unlink")
    assert " in unlink" in cause.traceback.splitlines()[0]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), StorageRefusedError("full")])
def test_a_fault_of_the_store_is_expected_and_has_its_place_all_the_same(kit, error):
    [cause] = logged(kit, error).causes
    assert (cause.expected, cause.place.rpartition(" ")[2]) == (True, "put")


def test_each_distinct_exception_of_an_episode_is_kept_and_each_once(kit):
    log = logged(kit, *(ValueError(number % (2 * MAX_CAUSES)) for number in range(3 * MAX_CAUSES)))
    assert [cause.error for cause in log.causes] == [
        f"ValueError: {number}" for number in range(MAX_CAUSES)
    ]
    assert len(log.lines) == 1


def test_frames_and_pages_of_a_call_are_not_kept_alive(kit, monkeypatch):
    class Held:
        pass

    # pytest's own keep the records, and with them the exceptions.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    storage, pool = broken(kit)
    held = Held()
    gone = weakref.ref(held)

    def put(write, held=held):
        raise KeyError(id(held))

    storage.put = put
    with cause_log() as log:
        refused(storage, pool)
        storage.put = None
        del held, put
        gc.collect()
        assert log.causes
        assert gone() is None


def test_damage_is_a_cause_with_what_did_not_fit(kit):
    storage, pool = kit.memory_storage()
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
    name = storage.pools["kv"].namespace.object_name("a")
    storage.objects[name] = storage.objects[name][:-64] + bytes(64)
    with cause_log() as log:
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [False]}
    assert log.causes == [damage("whose envelope is missing or overwritten")]


def test_levels_and_handlers_are_what_they_were_before():
    logger, root = logging.getLogger("hicache_storage.objects"), logging.getLogger()
    before = logger.level, list(root.handlers)
    with cause_log():
        assert logger.level == logging.DEBUG
    assert (logger.level, list(root.handlers)) == before


class TestReports:
    def test_the_message_names_the_cause_and_the_detail_has_its_traceback(self, kit):
        record = violation_finding(Violation("SET-1", "page 0 was refused"), logged(kit))
        assert record.reason.startswith(
            "SET-1: page 0 was refused; answered as a miss: KeyError: 'gone' (test_causes.py:"
        )
        assert "in put\n    raise self.error" in record.detail
        assert record.log.startswith(
            "WARNING hicache_storage.objects.faults: memory: answering misses: 'gone'"
        )
        assert record.causes[0].error == "KeyError: 'gone'"

    def test_an_exception_that_reached_the_caller_is_the_cause_before_all_others(self, kit):
        violation = Violation("", "clear raised StorageRefusedError: no")
        violation.__cause__ = StorageRefusedError("no")
        record = violation_finding(violation, logged(kit))
        assert [cause.error for cause in record.causes] == ["StorageRefusedError: no"]
        assert record.reason == "clear raised StorageRefusedError: no"

    def test_where_the_suite_makes_the_store_fail_only_a_bug_explains_anything(self, kit):
        log = logged(kit, OSError(5, "Input/output error"), AttributeError("typo"))
        violation = Violation("FT-1", "a set answers False")
        assert [
            cause.error for cause in violation_finding(violation, log, injects=True).causes
        ] == ["AttributeError: typo"]
        assert [cause.error for cause in violation_finding(violation, log).causes] == [
            "OSError: [Errno 5] Input/output error",
            "AttributeError: typo",
        ]

    def test_an_exception_that_the_suite_raised_explains_nothing(self, kit):
        storage, pool = broken(kit)
        storage.put = lambda write: ActiveFaults().apply([Fault(kind=FaultKind.ERROR, error="EIO")])
        with cause_log() as log:
            refused(storage, pool)
        assert [cause.injected for cause in log.causes] == [True]
        assert violation_finding(Violation("SET-1", "refused"), log).causes == ()


def test_a_violation_carries_the_stacks_of_threads_that_hang_each_place_once(kit):
    release, entered = threading.Event(), threading.Semaphore(0)

    class Hangs(MemoryStorage):
        def objects_exist(self, batches, call):
            entered.release()
            release.wait(30)
            return super().objects_exist(batches, call)

    storage, pool = Hangs(kit.identity()), kit.pool()
    storage.register_mem_host_pool_v2(pool, "kv")
    threads = [threading.Thread(target=storage.batch_exists_v2, args=(["a"],)) for _ in "ab"]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert entered.acquire(timeout=30)
        detail = violation_finding(Violation("FT-3", "did not come back")).detail
        places = places_in_driver()
    finally:
        release.set()
        for thread in threads:
            thread.join(30)
    stacks = detail.partition("Meanwhile inside the driver:\n")[2]
    assert stacks.startswith("thread ")
    assert stacks.count("in objects_exist") == stacks.count("release.wait(30)") == 1
    assert [place.partition(":")[0] for place in places] == ["test_causes.py"] * 2
    assert all(place.endswith(" in objects_exist") for place in places)
    assert (places_in_driver(), stacks_in_driver()) == ([], "")


def bug(text="'x'", place="driver.py:7 in _put"):
    return Cause(
        error=f"KeyError: {text}", place=place, traceback="", expected=False, injected=False
    )


OTHER = bug(place="driver.py:9 in f")
CUT, SHORT = (damage(f"whose object has no envelope: {size} bytes, not 320") for size in (256, 40))


@pytest.mark.parametrize(
    ("outcomes", "shared"),
    [
        # One mistake, whatever the call.
        (
            [("GET-1", bug("'a'")), ("SET-1", bug("'b'"), OTHER), ("SET-3", OTHER), ("SET-6",)],
            [(["GET-1", "SET-1"], bug("'a'"))],
        ),
        # Pages damaged in one way, whatever their length.
        (
            [("GET-1", CUT), ("SET-1", SHORT), ("SET-2", damage("whose checksum does not fit"))],
            [(["GET-1", "SET-1"], CUT)],
        ),
    ],
    ids=["one mistake", "damage"],
)
def test_rules_that_one_cause_breaks_are_one_finding(outcomes, shared):
    cases = [
        ended(f"test_{number}", rule, outcome=Outcome.FAIL, broken_rule=rule, causes=tuple(causes))
        for number, (rule, *causes) in enumerate(outcomes)
    ]
    found = judged(*cases).shared_causes()
    assert [(each.rules, each.cause) for each in found] == shared


def test_a_worker_process_s_exceptions_reach_the_case(monkeypatch):
    from hicache_conformance.harness.process_state import CauseLog
    from hicache_conformance.processes.worker import Done, WorkerProcess

    log = CauseLog()
    worker = SimpleNamespace(_log=log, busy=True, swallowed=0)
    WorkerProcess._note(worker, Done(causes=[bug()]))
    assert log.causes == [bug()]
    assert worker.swallowed == 1
    assert not worker.busy
