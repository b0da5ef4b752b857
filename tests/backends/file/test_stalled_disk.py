"""A local disk that stalls: calls end at their deadline, or are served from memory; with bounce buffers
nothing is written later."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache_backends.file import reader, store
from hicache_backends.posix import files
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.directories import Mount
from hicache_backends.posix.files import is_cached, read_cached_into
from hicache_storage.objects import Call, ObjectRead
from hicache_storage.spec import CancellationToken, HiCacheError, HungReads
from tests.backends.file.harness import (
    COMPONENTS,
    PATIENCE_SECONDS,
    Rig,
    chain,
    failing,
    path_of,
    replaced,
)
from tests.support.waiting import eventually

LENGTHS = pytest.mark.parametrize(
    "components", [(1000, 3096), (300_000, 900_000)], ids=["short-pages", "long-pages"]
)


OPERATIONS = (
    *("open", "rename", "unlink", "utime", "listdir", "pwritev", "close", "posix_fadvise"),
    "preadv",
)


class Disk:
    """A disk below the system calls of this process, whose names and attributes are in memory, and
    which can stall."""

    def __init__(self, monkeypatch):
        self.cached = True
        self.operations, self.thawed = 0, 0
        self._stalled, self._path, self._thaw = (), None, threading.Event()
        monkeypatch.setattr(store, "mount_of", lambda path: Mount("ext4"))
        monkeypatch.setattr(reader, "is_cached", lambda *args: self.cached)
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._around(name))

    def stall(self, *names, path=None):
        """Let operations hang: those of these names, or all; on one file, or all."""
        self._stalled, self._path = names or OPERATIONS, path

    def thaw(self):
        self._stalled = ()
        self._thaw.set()

    def _around(self, name):
        real = getattr(os, name)

        def waiting(target, *args, **kwargs):
            # What is read with flags is in the page cache.
            in_memory = name == "preadv" and len(args) > 2
            if (
                name in self._stalled
                and not in_memory
                and (self._path or path_of(target)) == path_of(target)
            ):
                self.operations += 1
                self._thaw.wait(PATIENCE_SECONDS)
                self.thawed += 1
            return real(target, *args, **kwargs)

        return waiting


@pytest.fixture
def disk(monkeypatch):
    made = Disk(monkeypatch)
    yield made
    made.thaw()


def threads_that_look(rig: Rig) -> list[threading.Thread]:
    """The threads that look pages up without I/O from now on."""
    looked, threads = rig.bare.store.cached_page_indexes, []
    rig.bare.store.cached_page_indexes = lambda namespaces: (
        threads.append(threading.current_thread()),
        looked(namespaces),
    )[1]
    return threads


CALLS = {
    "exists": lambda rig, keys: rig.hit([*keys, *chain("of another", 2)]),
    "set": lambda rig, keys: rig.put(chain("new", 3)),
    "get": lambda rig, keys: rig.get(keys),
    "delete": lambda rig, keys: rig.storage.delete(keys[:1]),
    "clear": lambda rig, keys: rig.storage.clear(),
    "health": lambda rig, keys: rig.storage.health(),
    "close": lambda rig, keys: rig.storage.close(),
}


@pytest.mark.parametrize("capacity", [None, "1GiB"], ids=["unlimited", "evicting"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_at_its_deadline(guarded, disk, name, capacity):
    """FT-3, LC-2."""
    a, keys = guarded(capacity=capacity), chain("a", 4)
    assert a.put(keys) == [True] * 4
    assert a.holds(keys)
    disk.cached = False
    # So that reading the counter is due.
    a.bare.store.feed.counter.close()
    a.storage.hurry()
    disk.stall()

    def hangs():
        # A clear may say that it did not happen.
        with contextlib.suppress(HiCacheError):
            CALLS[name](a, keys)
        return disk.operations

    # On a busy machine the deadline may pass before a thread has begun.
    eventually(hangs)
    assert not disk.thawed


def test_what_is_known_is_answered_while_the_disk_stalls(guarded, disk):
    """In the caller's own thread: a thread costs twice as much as the answer."""
    a, keys = guarded(capacity="1GiB"), chain("a", 4)
    a.put(keys)
    assert a.hit(keys) == 4
    threads = threads_that_look(a)
    disk.stall()
    assert (a.hit(keys), a.hit(chain("b", 1)), a.hit([*keys, "more"])) == (4, 0, 4)
    assert set(threads) == {threading.current_thread()}
    assert not disk.operations


def test_a_background_task_that_hangs_is_not_started_again(guarded, disk, monkeypatch):
    monkeypatch.setattr(store, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(store, "LOCAL_THREADS", 4)
    a, keys = guarded(capacity="1GiB"), chain("a", 4)
    a.put(keys)
    disk.stall("utime")
    for _ in range(5):
        assert a.holds(keys)
    # Behind the tasks that were started.
    assert a.bare.store.thread_pool.submit(lambda: None).wait(PATIENCE_SECONDS)
    eventually(lambda: disk.operations)
    assert disk.operations == 1
    disk.thaw()
    disk.stall("utime")
    assert eventually(lambda: a.holds(keys) and disk.operations > 1)


def test_a_lookup_behind_a_hung_announcement_ends_at_its_deadline(guarded, disk):
    a, keys = guarded(), chain("a", 2)
    a.put(keys)
    assert a.hit(keys) == 2
    hangs, go_on, counter = threading.Event(), threading.Event(), a.bare.store.paths.counter

    def make(real):
        def utime(path, *args, **kwargs):
            if path == counter:
                hangs.set()
                go_on.wait(PATIENCE_SECONDS)
            real(path, *args, **kwargs)

        return utime

    with replaced(os, "utime", make), ThreadPoolExecutor(1) as threads:
        putting = threads.submit(a.bare.delete, keys[1:])
        assert hangs.wait(PATIENCE_SECONDS)
        a.storage.hurry()
        assert a.hit(keys) == 0
        go_on.set()
        assert putting.result(PATIENCE_SECONDS) == [True]
    a.storage.be_patient()
    assert a.hit(keys) == 1


@LENGTHS
@pytest.mark.parametrize("opened", [True, False])
def test_what_is_in_the_page_cache_is_read_while_the_disk_stalls(guarded, disk, components, opened):
    a, keys = guarded(components=components, pages=3), chain("a", 3)
    a.put(keys)
    assert a.holds(keys)
    if not opened:
        a.bare.store.descriptors.close()
    threads = threads_that_look(a)
    disk.stall()
    # The caller's own thread reads.
    a.bare.read_objects = None
    assert a.holds(keys)
    assert set(threads) == {threading.current_thread()}
    assert not disk.operations
    assert a.stats().pages_read == 6


@LENGTHS
@pytest.mark.parametrize(
    ("name", "number", "when"),
    [
        ("preadv", errno.EAGAIN, lambda *args: len(args) == 4 and args[3]),
        ("preadv", errno.EOPNOTSUPP, lambda *args: len(args) == 4 and args[3]),
        # Reading somebody else's file may set its time of access, which waits for the journal.
        ("open", errno.EPERM, lambda _, flags, *__: flags & os.O_NOATIME),
    ],
    ids=["evicted", "unsupported", "somebody else's"],
)
def test_what_the_page_cache_does_not_give_comes_through_buffers(
    guarded, monkeypatch, components, name, number, when
):
    a, keys = guarded(components=components, pages=8), chain("a", 8)
    a.put(keys)
    if name == "open":
        monkeypatch.setattr(files, "_open_cached", lambda path, flags: None)
        monkeypatch.setattr(reader, "read_cached_into", None)
    with failing(name, number, when=when) as refused:
        assert a.holds(keys)
    assert refused


@LENGTHS
def test_a_hung_get_returns_and_nothing_arrives_later(guarded, disk, components):
    a, keys = guarded(components=components, pages=8), chain("a", 8)
    a.put(keys)
    disk.cached = False
    disk.stall("preadv")
    a.storage.hurry()
    assert a.get(keys) == [None] * 8
    # On a busy machine the deadline may pass before the first read has begun.
    while not disk.operations:
        assert a.get(keys) == [None] * 8
    assert not disk.thawed
    assert a.bare.store.buffers.stuck() >= 1
    a.pool.memory[:] = b"\x77" * len(a.pool.memory)
    disk.thaw()
    a.storage.be_patient()
    eventually(lambda: a.bare.store.buffers.stuck() == 0)
    assert set(a.pool.memory) == {0x77}
    assert a.stats().pages_damaged == 0
    assert a.holds(keys)


def test_hung_reads_are_bounded_and_fail_fast_beyond(guarded, disk, monkeypatch):
    a, keys = guarded(), chain("a", 4)
    a.put(keys)
    monkeypatch.setattr(a.bare.store.buffers, "_limit", 3)
    disk.cached = False
    disk.stall("preadv")
    a.storage.hurry()
    while disk.operations < 3:
        assert a.get(keys) == [None] * 4
    missed = a.storage.get_stats().deadlines_missed
    a.storage.be_patient()
    assert a.get(keys) == [None] * 4
    assert (disk.operations, disk.thawed) == (3, 0)
    assert a.storage.get_stats().deadlines_missed == missed
    disk.thaw()
    eventually(lambda: a.holds(keys))


def test_a_read_of_someone_else_goes_on_beside_a_hung_one(guarded, disk, monkeypatch):
    monkeypatch.setattr(store, "LOCAL_THREADS", 4)
    a, stuck, well = (
        guarded(components=(600_000,), pages=40),
        chain("stuck", 2),
        chain("well", 36),
    )
    a.put(well)
    before = {str(path) for path in a.path.rglob("*.bundle")}
    a.put(stuck)
    (path,) = {str(path) for path in a.path.rglob("*.bundle")} - before
    disk.cached = False
    disk.stall("preadv", path=path)
    a.storage.hurry()
    for _ in range(6):
        assert a.get(stuck) == [None] * 2
    a.storage.be_patient()
    assert a.holds(well)


@pytest.mark.parametrize("kind", ["ext4", "nfs4", "tmpfs"])
def test_whatever_has_a_device_below_may_hang(rig, monkeypatch, kind):
    monkeypatch.setattr(store, "mount_of", lambda path: Mount(kind))
    a, hangs = rig(), kind != "tmpfs"
    assert a.storage.capabilities.may_hang
    a.storage.open()
    assert a.storage.capabilities.may_hang is hangs
    assert (a.storage.capabilities.hung_reads is HungReads.BOUNCE_BUFFER) is hangs


def test_a_straight_read_keeps_its_caller(rig, disk, monkeypatch):
    """The first get may open the store, behind a deadline, before it is known that nothing is below
    that could stall."""
    monkeypatch.setattr(store, "mount_of", lambda path: Mount("tmpfs"))
    a, keys = rig(), chain("a", 4)
    a.put(keys)
    disk.stall("preadv")
    token, cancelled = CancellationToken(), threading.Event()
    call = Call(cancellation=token)
    reads = [
        ObjectRead(a.kv, key, [memoryview(bytearray(length)) for length in COMPONENTS], call=call)
        for key in keys
    ]
    extents = a.page_index.locate(reads)
    reading = threading.Thread(target=lambda: a.store.reader.read(extents, call))
    reading.start()
    eventually(lambda: disk.operations)
    cancelling = threading.Thread(target=lambda: (token.cancel(), cancelled.set()))
    cancelling.start()
    assert not cancelled.wait(0.05)
    disk.thaw()
    assert cancelled.wait(PATIENCE_SECONDS)
    reading.join(PATIENCE_SECONDS)


def test_who_waits_for_a_buffer_gets_the_next_one():
    buffers, order = Buffers(4096, limit=1), []

    def second():
        with buffers.lend(Call(PATIENCE_SECONDS)) as again:
            # Used again, and not another one beside it.
            assert again is buffer
            order.append("second")

    with buffers.lend(Call()) as buffer:
        assert len(buffer) == 4096
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.02)
        order.append("first")
    waiting.join(PATIENCE_SECONDS)
    assert order == ["first", "second"]


def test_the_page_cache_is_asked(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOATIME)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert not is_cached(descriptor, 8192, 8192)
        os.pread(descriptor, 16384, 0)
        some = [memoryview(bytearray(5)), memoryview(bytearray(6))]
        # Before Linux 6.5, and in a container that forbids the call, nobody can tell.
        if is_cached(descriptor, 4090, 11) and read_cached_into(descriptor, some, 4090) is not None:
            assert b"".join(some) == (bytes(range(256)) * 64)[4090:4101]
            assert read_cached_into(descriptor, some, 16380) is False
        assert not is_cached(descriptor, 4090, 1 << 20)
    finally:
        os.close(descriptor)


def test_a_file_is_opened_from_memory_within_the_limit(tmp_path, monkeypatch):
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(b"abc")
    descriptors = files.Descriptors(2)
    kept = [descriptors.borrow_cached(str(path), os.O_NOATIME) for path in paths[:2]]
    assert [os.pread(handle.descriptor, 3, 0) for handle in kept] == [b"abc"] * 2
    assert descriptors.borrow_cached(str(paths[0]), os.O_NOATIME) is kept[0]
    # A third would close one of them, which may wait.
    assert descriptors.borrow_cached(str(paths[2]), os.O_NOATIME) is None
    descriptors.forget(str(paths[0]))
    assert descriptors.borrow_cached(str(tmp_path / "missing"), os.O_NOATIME) is None
    # A number that no kernel has, as 437 is before Linux 5.6.
    monkeypatch.setattr(files, "_OPENAT2", 1 << 20)
    assert descriptors.borrow_cached(str(paths[2]), os.O_NOATIME) is None
