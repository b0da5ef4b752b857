"""The threads that call a storage."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_storage.hybrid.stats import StatsCounter
from hicache_storage.hybrid.storage_io.prefetch_jobs import PrefetchRequest, QueryJob
from hicache_storage.hybrid.storage_io.workers import Job, StorageWorker
from hicache_storage.spec import seconds_since_asked
from tests.support.waiting import eventually


class Noted(Job):
    """Counts its performances."""

    performed = 0

    def perform(self):
        self.performed += 1


@pytest.fixture
def worker():
    made = StorageWorker("hicache-test", 60, StatsCounter())
    yield made
    made.stop(60)


def test_jobs_run_one_after_the_other(worker):
    jobs = [Noted() for _ in range(5)]
    for job in jobs:
        worker.submit(job)
    assert jobs[-1].wait(60)
    assert [job.performed for job in jobs] == [1] * 5


def test_the_deadline_of_a_lookup_begins_when_it_is_submitted(worker):
    """Behind hung lookups each of the others would have a deadline of its own, one after another."""
    go_on, waited = threading.Event(), list[float]()

    class Hung(Job):
        def perform(self):
            assert go_on.wait(60)

    class Calls:
        def restorable(self, *_):
            waited.append(seconds_since_asked())
            return []

    worker.submit(Hung())
    job = QueryJob(Calls(), PrefetchRequest((), (), "request"))
    worker.submit(job)
    submitted = time.monotonic()
    while (released := time.monotonic()) <= submitted:
        pass
    go_on.set()
    assert job.wait(60)
    assert waited[0] >= released - submitted


def test_without_a_thread_a_job_is_over_and_the_next_one_tries_again(worker, monkeypatch):
    """A system that is out of threads makes misses, and nobody waits."""

    def fail(thread):
        raise RuntimeError("can't start new thread")

    refused, accepted = Noted(), Noted()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        worker.submit(refused)
    assert refused.finished()
    worker.submit(accepted)
    eventually(accepted.finished)
    assert (refused.performed, accepted.performed) == (0, 1)


def test_after_stop_jobs_are_over_at_once(worker):
    worker.stop(60)
    job = Noted()
    worker.submit(job)
    assert job.finished()
    assert not job.performed
