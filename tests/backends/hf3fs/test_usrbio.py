"""The USRBIO engine against a stand-in that checks every argument."""

from __future__ import annotations

import errno
import os
import threading
from datetime import timedelta

import pytest

from hicache_backends.hf3fs import store as store_module
from hicache_backends.hf3fs.slots.engine import SlotRead
from hicache_backends.hf3fs.slots.usrbio import SharedPages
from hicache_storage.objects import Call, ObjectRead
from tests.backends.hf3fs.harness import chain, content
from tests.backends.hf3fs.usrbio_stand_in import StandIn


@pytest.fixture
def library(tmp_path, monkeypatch):
    made = StandIn(tmp_path)
    monkeypatch.setattr(store_module, "load_library", lambda: made)
    yield made
    assert made.misuse == []


@pytest.fixture
def usrbio(rig, library):
    def make(**options):
        return rig(engine="usrbio", **{"usrbio_buffer": "256KiB", "usrbio_entries": 8, **options})

    return make


def test_pages_come_back_whatever_the_order_of_results(usrbio, library):
    mine, keys = usrbio(), chain("a", 64)
    assert all(mine.put(keys))
    mine.expect(keys)
    assert mine.storage.store.engine.name == "usrbio"
    assert {ring.for_read for ring in library.rings} == {True, False}


def test_holes_stay_where_they_are(usrbio):
    mine, keys = usrbio(), chain("a", 8)
    assert all(mine.put(keys[::2]))
    assert [page is not None for page in mine.get(keys)] == [True, False] * 4


def test_short_results_are_gone_on_with(usrbio, library):
    mine, keys = usrbio(), chain("a", 16)
    library.short = 20
    assert all(mine.put(keys))
    library.short = 20
    mine.expect(keys)
    assert library.short == 0


def test_one_failed_request_fails_one_page(usrbio, library):
    mine, keys = usrbio(), chain("a", 8)
    library.errors = [errno.EIO]
    assert sorted(mine.put(keys)) == [False] + [True] * 7
    assert all(mine.put(keys))
    library.errors = [errno.EIO]
    assert [page is not None for page in mine.get(keys)].count(False) == 1
    mine.expect(keys)


def test_a_result_of_more_bytes_than_were_asked_for_fails_one_page(usrbio, library):
    mine, keys = usrbio(), chain("a", 8)
    library.excess = 1
    assert sorted(mine.put(keys)) == [False] + [True] * 7
    assert all(mine.put(keys))
    library.excess = 1
    assert [page is not None for page in mine.get(keys)].count(False) == 1
    mine.expect(keys)


def test_a_file_that_ends_too_early_is_damage(usrbio):
    mine, keys = usrbio(), chain("a", 4)
    assert all(mine.put(keys))
    with open(mine.scope.file.path, "r+b") as file:
        file.truncate(mine.scope.file.offset(mine.slot(keys[2])) + 100)
    assert [page is None for page in mine.get(keys)].count(True) >= 1
    assert mine.storage.get_stats().pools["kv"].pages_damaged >= 1
    assert all(mine.put(keys))
    mine.expect(keys)


def test_waits_that_come_back_with_nothing_are_waited_again(usrbio, library):
    mine, keys = usrbio(), chain("a", 16)
    library.idle = 5
    assert all(mine.put(keys))
    library.idle = 5
    mine.expect(keys)


def test_a_submission_that_fails_is_a_miss_and_the_ring_comes_back(usrbio, library):
    mine, keys = usrbio(usrbio_rings=1), chain("a", 4)
    assert all(mine.put(keys))
    library.refusals = [errno.EAGAIN]
    assert mine.get(keys) == [None] * 4
    mine.expect(keys)
    others = chain("b", 4)
    library.refusals = [errno.EAGAIN]
    assert mine.put(others) == [False] * 4
    mine.expect(keys)


def test_some_of_a_batch_hang(usrbio, library):
    """What has come back is delivered; what has not keeps its memory."""
    mine, keys = usrbio(usrbio_rings=1), chain("a", 6)
    assert all(mine.put(keys))
    library.kept = 2
    found = mine.get(keys, seconds=1.5)
    assert found.count(None) == 2
    assert mine.storage.store.engine.stuck() == 2
    library.kept = 0
    mine.expect(keys)


def test_several_threads_share_the_rings(usrbio, library):
    mine, keys = usrbio(usrbio_rings=2), chain("a", 24)
    assert all(mine.put(keys))
    scope, engine, read = mine.scope, mine.store.engine, []
    places = {key: mine.slot(key) for key in keys}

    def work():
        for _ in range(5):
            jobs = [
                SlotRead(ObjectRead.aside(scope.namespace, key), scope.file, slot)
                for key, slot in places.items()
            ]
            engine.read(jobs, Call(20))
            read.extend(jobs)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 4 * 5 * 24
    assert all(job.whole and job.fault is None for job in read)
    assert all(
        b"".join(job.read.buffers) == content(job.read.key, 0, mine.page_bytes) for job in read
    )
    assert len([ring for ring in library.rings if ring.for_read]) <= 2


def test_requests_that_hang_keep_nobody_and_no_memory_is_used_twice(usrbio, library):
    mine, keys = usrbio(usrbio_rings=1), chain("a", 4)
    assert all(mine.put(keys))
    library.hangs.set()
    assert mine.get(keys, seconds=1.5) == [None] * 4
    # The stand-in lets nothing go by itself.
    assert mine.get(keys, seconds=0.3) == [None] * 4
    assert mine.storage.store.engine.stuck() == 4
    library.hangs.clear()
    mine.expect(keys)
    assert mine.storage.store.engine.stuck() == 0


def test_a_write_that_hangs_is_not_published_and_its_slot_not_given_away(usrbio, library):
    mine, keys = usrbio(usrbio_rings=1, lease_seconds=5.0), chain("a", 2)
    assert mine.hits(keys) == 0
    library.hangs.set()
    assert mine.put(keys, seconds=0.3) == [False] * 2
    assert mine.hits(keys) == 0
    library.hangs.clear()
    others = chain("b", 4)
    assert all(mine.put(others))
    mine.expect(others)


def test_a_page_longer_than_the_memory_is_a_miss(usrbio):
    mine = usrbio(usrbio_buffer="4KiB")
    assert mine.put(chain("a", 1)) == [False]
    assert mine.storage.fault_count() == 1


def test_nothing_is_left_behind(usrbio, library):
    # The name tells the process; others may be at work.
    before = {name for name in os.listdir("/dev/shm") if name.startswith(f"hicache-{os.getpid()}-")}
    mine = usrbio()
    assert all(mine.put(chain("a", 4)))
    assert library.registered
    mine.storage.close()
    assert not library.registered
    assert {
        name for name in os.listdir("/dev/shm") if name.startswith(f"hicache-{os.getpid()}-")
    } == before
    assert os.listdir(library.links) == []


def test_the_stand_in_finds_misuse(tmp_path):
    library = StandIn(tmp_path)
    with open(tmp_path / "file", "w+b") as file:
        number = file.fileno()
        pages = SharedPages(8192)
        vector, ring = (
            library.make_iovec(pages, str(tmp_path)),
            library.make_ioring(str(tmp_path), 1, True),
        )
        pages.unlink()
        for wrong, message in (
            (lambda: ring.prepare(vector[0:4096], True, number, 0), "not registered"),
            (lambda: library.register_fd(number) or library.register_fd(number), "twice"),
            (lambda: ring.prepare(vector[0:4096], False, number, 0), "the other way round"),
            (lambda: vector[0:9000], "beyond"),
            (lambda: ring.prepare(vector[0:4096], True, number, -1), "offset"),
            (lambda: ring.prepare(vector[0:4096], True, number, 100), "aligned differently"),
            (
                lambda: ring.prepare(vector[0:4096], True, number, 0).prepare(
                    vector[2048:4097], True, number, 0
                ),
                "share memory",
            ),
            (lambda: ring.wait(min_results=1, max_results=1), "for ever"),
            (
                lambda: ring.wait(min_results=2, max_results=1, timeout=timedelta(seconds=1)),
                "at least 2",
            ),
            (lambda: ring.submit().submit(), "nothing was prepared"),
            (lambda: library.make_iovec(pages, "/elsewhere"), "another mount point"),
            (lambda: library.deregister_fd(0), "not registered"),
        ):
            with pytest.raises(AssertionError, match=message):
                wrong()
        with pytest.raises(OSError, match="full"):
            ring.prepare(vector[4096:8192], True, number, 0)
        pages.close()


def test_auto_takes_posix_where_there_is_no_library(rig, monkeypatch):
    def absent():
        raise ImportError("hf3fs_fuse")

    monkeypatch.setattr(store_module, "load_library", absent)
    assert rig().store.engine.name == "posix"
