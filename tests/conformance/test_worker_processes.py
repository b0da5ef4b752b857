"""Storages in processes of their own: told what to do, killed, never left behind."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from hicache_conformance.harness.pools import PoolShape
from hicache_conformance.harness.store_files import disk_usage
from hicache_conformance.history.events import Call, Workload
from hicache_conformance.model.case import Inconclusive, Violation
from hicache_conformance.processes import worker as workers
from hicache_conformance.processes.worker import KillSchedule, WorkerProcess, WorkerStorage, watch
from hicache_storage.plugins import registry
from hicache_storage.spec import StorageIdentity
from tests.conformance.fault_helpers import threads_of
from tests.support.waiting import eventually

MUTANTS = Path(__file__).with_name("mutants")
IDENTITY = StorageIdentity(
    model="m", kv_dtype="bfloat16", page_size=2, layout="page_first", salt="workers"
)
KEYS = tuple(f"key{number}" for number in range(8))


@pytest.fixture
def start(site, tmp_path, monkeypatch):
    """Start a worker with a driver; what a test leaves is killed."""
    monkeypatch.syspath_prepend(str(MUTANTS))
    monkeypatch.syspath_prepend(str(site.directory))
    registry.cache_clear()
    started = []

    def open_peer(driver="file", config=None):
        options = {"path": str(tmp_path / "store")} if config is None else config
        setup = WorkerStorage(
            name=f"p{len(started)}",
            driver=driver,
            config=options,
            identity=IDENTITY,
            pools={"kv": PoolShape()},
            seed="1",
        )
        worker = WorkerProcess(setup)
        started.append(worker)
        return worker

    yield open_peer
    for worker in started:
        worker.kill()
    # Later tests of this process must not find the sample drivers.
    registry.cache_clear()


def workload(mix, *, calls=20, clients=1, first=1, keys=KEYS):
    return Workload(seed="s", clients=clients, calls=calls, keys=keys, mix=mix, first_value=first)


def is_gone(worker):
    return not Path(f"/proc/{worker.pid}").exists()


def test_it_has_a_session_of_its_own_and_ends_when_closed(start):
    one = start()
    assert os.getsid(one.pid) == one.pid != os.getsid(0)
    one.close()
    one.close()
    assert is_gone(one)


def test_a_workload_tells_both_ends_of_every_call(start):
    one, two = start(), start()
    for worker, first in ((one, 1), (two, 1000)):
        worker.start(workload({Call.SET: 1, Call.GET: 1}, calls=30, clients=2, first=first))
    watch([one, two])
    for worker in (one, two):
        assert len(worker.events) == 60
        assert {event.begun.client for event in worker.events} == {
            f"{worker.name}.0",
            f"{worker.name}.1",
        }
        assert all(event.began_at <= event.ended_at for event in worker.events)
    sets = [
        event.begun.value
        for worker in (one, two)
        for event in worker.events
        if event.call is Call.SET
    ]
    assert len(set(sets)) == len(sets)


def test_one_workload_makes_the_same_calls_again(start):
    one, two = start(), start()
    for worker in (one, two):
        worker.start(workload({Call.SET: 1, Call.GET: 1, Call.EXISTS: 1}))
        watch([worker])
    calls = [
        [(event.call, event.keys, event.begun.value) for event in worker.events]
        for worker in (one, two)
    ]
    assert calls[0] == calls[1]
    assert two.stats().pages_read > 0


def test_a_struck_peer_is_dead_and_what_it_said_is_known(start):
    victim, other = start(), start()
    # More than it gets done, however late the schedule is.
    works = {
        victim: workload({Call.SET: 1}, calls=100_000, clients=2),
        other: workload({Call.GET: 1}),
    }
    for worker, work in works.items():
        worker.start(work)
    watch([victim, other], {victim: KillSchedule(10, 0.5)})
    assert is_gone(victim)
    assert 10 <= len(victim.events) < 200_000
    assert sum(event.ended is None for event in victim.events) <= 2
    assert len(other.events) == 20
    victim.kill()
    with pytest.raises(RuntimeError, match="is dead"):
        victim.get(KEYS)


def test_a_driver_that_is_not_there_is_untestable(start):
    with pytest.raises(Inconclusive, match="no driver named 'nobody'"):
        start("nobody", {})
    with pytest.raises(Inconclusive, match="unknown option"):
        start("file", {"where": "here"})


def test_a_broken_rule_travels(start):
    raising = start("Raises", {})
    with pytest.raises(
        Violation, match=r"^batch_get_v2 raised OSError: the disk is gone \(process p0\)"
    ):
        raising.get(KEYS)


def test_a_fault_of_the_suite_is_not_the_driver_s(start):
    one = start()
    with pytest.raises(RuntimeError, match="the suite broke in process p0"):
        one.get(KEYS, "mamba")


def test_a_process_that_dies_is_told_with_what_it_did(start):
    one = start()
    one.start(workload({Call.SET: 1}, calls=100_000, keys=KEYS))
    os.kill(one.pid, signal.SIGSEGV)
    with pytest.raises(Violation, match=r"process p0 was killed by SIGSEGV in (a set of|opening)"):
        watch([one])
    assert is_gone(one)


def test_a_driver_that_ends_the_process_is_found(start):
    one = start("Dies")
    with pytest.raises(Violation, match=r"process p0 ended with status 3 in a get of 8 pages"):
        one.get(KEYS)
    assert is_gone(one)


def test_a_call_that_hangs_is_ended(start, monkeypatch):
    one = start()
    os.kill(one.pid, signal.SIGSTOP)
    # It is the fork server's child, which waits for it.
    while set(threads_of(one.pid)) != {"T"}:
        time.sleep(0.001)
    monkeypatch.setattr(workers, "SILENCE_SECONDS", 0.5)
    with pytest.raises(Violation, match=r"^FT-3: process p0 has not come back from"):
        one.get(KEYS)
    assert is_gone(one)


def fork_server():
    """The process whose forks the workers are."""
    return forkserver._forkserver._forkserver_pid


def test_a_fork_server_takes_its_workers_with_it(start):
    one = start()
    os.kill(fork_server(), signal.SIGKILL)
    eventually(lambda: is_gone(one))
    with pytest.raises(Violation, match="process p0 ended with status 255"):
        one.get(KEYS)


def test_forks_know_nothing_of_this_project_beforehand(start):
    # Each fork draws the first generation of its envelopes when it imports them; a fork server that
    # had would share it.
    one, two = start(), start()
    assert "torch" in Path(f"/proc/{fork_server()}/maps").read_text()
    assert one.pid != two.pid
    assert not any(name.startswith("hicache") for name in workers.PRELOADED)


def test_a_footprint_is_that_of_the_directories_that_options_name(tmp_path):
    (tmp_path / "store" / "deep").mkdir(parents=True)
    (tmp_path / "store" / "deep" / "page").write_bytes(b"12345")
    (tmp_path / "elsewhere").write_bytes(b"123")
    assert disk_usage({"path": str(tmp_path / "store"), "threads": 4}, tmp_path) == 5
    assert disk_usage({"url": "http://localhost"}, tmp_path) == 0
