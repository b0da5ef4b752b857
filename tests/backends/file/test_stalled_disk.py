"""A local disk that stalls: calls end at their deadline, or are served from memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache_backends.file import reader, store
from hicache_backends.posix import files
from hicache_backends.posix.directories import Mount
from hicache_backends.posix.files import is_cached, read_cached_into
from hicache_storage.spec import HiCacheError
from tests.backends.file.harness import PATIENCE_SECONDS, Rig, chain, flip, replaced

HUNG_SECONDS = 10.0
LENGTHS = pytest.mark.parametrize(
    "components", [(1000, 3096), (300_000, 900_000)], ids=["short-pages", "long-pages"]
)


class Disk:
    """A disk below the system calls of this process, whose names and attributes are in memory, and
    which can stall."""

    def __init__(self, monkeypatch):
        self.cached = True
        self.operations, self.thawed = 0, 0
        self._stalls, self._thaw = False, threading.Event()
        monkeypatch.setattr(store, "mount_of", lambda path: Mount("ext4"))
        monkeypatch.setattr(reader, "is_cached", lambda *args: self.cached)
        for name in (
            "open",
            "rename",
            "unlink",
            "utime",
            "listdir",
            "pwritev",
            "close",
            "posix_fadvise",
        ):
            monkeypatch.setattr(os, name, functools.partial(self._waiting, getattr(os, name)))
        real = os.preadv
        monkeypatch.setattr(
            os,
            "preadv",
            lambda fd, buffers, at, flags=0: (
                real if flags else functools.partial(self._waiting, real)
            )(fd, buffers, at),
        )

    def stall(self):
        self._stalls = True

    def thaw(self):
        self._stalls = False
        self._thaw.set()

    def _waiting(self, real, *args, **kwargs):
        if self._stalls:
            self.operations += 1
            self._thaw.wait(HUNG_SECONDS)
            self.thawed += 1
        return real(*args, **kwargs)


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
    a.bare.store.feed.close()
    a.storage.hurry()
    disk.stall()
    # A clear may say that it did not happen.
    with contextlib.suppress(HiCacheError):
        CALLS[name](a, keys)
    assert disk.operations
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


def test_a_lookup_that_needs_the_disk_ends_at_its_deadline(guarded, rig, disk):
    a, keys = guarded(), chain("a", 4)
    a.put(keys[:2])
    assert a.hit(keys) == 2
    rig().put(keys[2:])
    disk.stall()
    a.storage.hurry()
    assert a.hit(keys) == 0
    assert not disk.thawed
    disk.thaw()
    a.storage.be_patient()
    assert a.hit(keys) == 4


def test_a_lookup_behind_a_hung_announcement_ends_at_its_deadline(guarded, disk):
    a, keys = guarded(), chain("a", 2)
    a.put(keys)
    assert a.hit(keys) == 2
    hangs, go_on, counter = threading.Event(), threading.Event(), a.bare.store.paths.counter

    def make(real):
        def utime(path, *args, **kwargs):
            if path == counter:
                hangs.set()
                go_on.wait(HUNG_SECONDS)
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
    a, keys = guarded(components=components, pages=8), chain("a", 8)
    a.put(keys)
    assert a.holds(keys)
    if not opened:
        a.bare.store.descriptors.close()
    threads = threads_that_look(a)
    disk.stall()
    # With a deadline that a worker thread would not keep: the caller's own thread reads.
    a.storage.hurry()
    a.bare.read_objects = None
    assert a.holds(keys)
    assert set(threads) == {threading.current_thread()}
    assert not disk.operations
    assert a.stats().pages_read == 16


@LENGTHS
def test_damage_in_the_page_cache_is_found_and_counted_once(guarded, disk, components):
    a, keys = guarded(components=components, pages=4), chain("a", 4)
    a.put(keys)
    assert a.holds(keys)
    (bundle,) = a.path.rglob("*.bundle")
    flip(bundle, 0)
    assert a.versions(keys) == [None, 0, 0, 0]
    assert a.stats().pages_damaged == 1


@pytest.mark.parametrize("idle", [False, True])
def test_reads_from_the_page_cache_close_idle_files_in_another_thread(
    guarded, disk, monkeypatch, idle
):
    a, keys = guarded(), chain("a", 4)
    a.put(keys)
    assert a.holds(keys)
    threads = []
    expire = a.bare.store.descriptors.expire
    monkeypatch.setattr(
        a.bare.store.descriptors,
        "expire",
        lambda: (threads.append(threading.current_thread()), expire())[1],
    )
    if idle:
        monkeypatch.setattr(files, "IDLE_SECONDS", -1.0)
    assert a.holds(keys)
    a.bare.store.thread_pool.close(PATIENCE_SECONDS)
    assert bool(threads) is idle
    assert threading.current_thread() not in threads


@LENGTHS
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP], ids=["evicted", "unsupported"])
def test_what_has_left_the_page_cache_comes_through_buffers(
    guarded, monkeypatch, components, number
):
    a, keys = guarded(components=components, pages=8), chain("a", 8)
    a.put(keys)
    real, refused = os.preadv, []

    def refuse(*args):
        if len(args) == 4 and args[3]:
            refused.append(number)
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, "preadv", refuse)
    assert a.holds(keys)
    assert refused


def test_somebody_elses_files_are_read_through_buffers(guarded, monkeypatch):
    """Reading them may set their time of access, which waits where the journal stalls."""
    a, keys = guarded(), chain("a", 4)
    a.put(keys)
    real, flags = os.open, []

    def refuse(path, mode, *rest, **named):
        if mode & os.O_NOATIME:
            flags.append(mode)
            raise PermissionError(1, "not the owner")
        return real(path, mode, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(files, "_open_cached", lambda path, flags: None)
    monkeypatch.setattr(reader, "read_cached_into", None)
    assert a.holds(keys)
    assert flags


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


def test_threads_that_open_a_file_at_the_same_moment_share_it(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    descriptors, faster = files.Descriptors(2), []
    real = files._open_cached

    def slow(path, flags):
        descriptor = real(path, flags)
        faster.append(descriptors.borrow(path, flags))
        return descriptor

    monkeypatch.setattr(files, "_open_cached", slow)
    assert descriptors.borrow_cached(str(path), os.O_NOATIME) is faster[0]
