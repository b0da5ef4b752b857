"""Faults of the environment: answers are `False`, and the store recovers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from types import SimpleNamespace

import pytest

from hicache_backends.file import capacity, page_index
from hicache_backends.file.events import Unlisted
from hicache_backends.file.paths import ProcessId
from hicache_backends.file.temp_files import TemporaryName
from hicache_storage.objects import batches
from hicache_storage.spec import ConfigError, StorageUnavailableError, is_refusal
from tests.backends.file.harness import chain, failing, interrupted, path_of
from tests.metadata_server.full_disks import small_disk
from tests.support.waiting import eventually


@contextlib.contextmanager
def limited(resources, number):
    """Let this process have no more of something."""
    soft, hard = resource.getrlimit(resources)
    resource.setrlimit(resources, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resources, (soft, hard))


def in_store(path):
    return lambda *args: str(args[0]).startswith(str(path))


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EFBIG]
)
@pytest.mark.parametrize(
    "function", ["pwritev", "open", "rename", "close", "posix_fallocate", "utime"]
)
def test_a_failed_write_leaves_nothing_and_the_next_one_succeeds(rig, function, number):
    a, b, keys = rig(), rig(), chain("a", 4)
    a.put(chain("before", 2))
    b.hit(keys)
    when = {
        "open": in_store(a.path),
        "rename": in_store(a.path),
        "utime": in_store(a.path),
        "close": lambda descriptor: path_of(descriptor).endswith(".temporary"),
    }.get(function, lambda *_: True)
    with failing(function, number, when=when):
        answer = a.put(keys)
    assert answer == [False] * 4
    assert a.temporaries() == []
    assert b.versions(keys) == [None] * 4
    assert a.storage.get_stats().pools["kv"].pages_refused == 4
    assert (a.storage.get_stats().faults == 0) is is_refusal(OSError(number, ""))
    assert a.holds(chain("before", 2))
    assert a.put(keys) == [True] * 4
    assert a.holds(keys)
    assert b.holds(keys)


def test_one_bundles_failure_leaves_the_others(rig, monkeypatch):
    from hicache_backends.file import writer

    monkeypatch.setattr(writer, "MAX_BUNDLE_BYTES", 20_000)
    a, keys = rig(), chain("a", 16)
    with failing("pwritev", errno.EIO, after=3):
        answer = a.put(keys)
    assert any(answer)
    assert not all(answer)
    assert a.versions(keys) == [0 if ok else None for ok in answer]
    assert a.stats().pages_refused == answer.count(False)
    assert a.put(keys) == [True] * 16
    assert a.holds(keys)


def test_one_pages_failure_leaves_its_neighbours(rig):
    a, keys = rig(), chain("a", 6)
    a.put(keys)
    bad = 2 * a.page_bytes
    with failing(
        "preadv",
        errno.EIO,
        when=lambda fd, buffers, at, *flags: at <= bad < at + sum(map(len, buffers)),
    ):
        assert a.versions(keys) == [0, 0, None, 0, 0, 0]
    # Other pages of the file could be read, so it is the page: it is gone, and can be set anew.
    assert a.present(keys) == [True, True, False, True, True, True]
    assert a.put(keys) == [True] * 6
    assert a.holds(keys)


def test_a_file_size_limit_refuses_what_does_not_fit(rig):
    """The last write before the limit is cut short."""
    a, keys = rig(pages=64), chain("a", 64)
    a.put(chain("first", 1))
    with limited(resource.RLIMIT_FSIZE, 100_000):
        assert a.put(keys) == [False] * 64
        assert a.put(keys[:16]) == [True] * 16
    assert a.versions(keys) == [0] * 16 + [None] * 48
    assert a.temporaries() == []
    assert a.put(keys) == [True] * 64
    assert a.holds(keys)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path, "300k") as made:
        yield made.path


@pytest.mark.parametrize("min_free", [0, "5%"])
@pytest.mark.parametrize("kind", ["bytes", "inodes"])
def test_a_disk_that_is_full_below_the_capacity_evicts(rig, disk, kind, min_free, monkeypatch):
    monkeypatch.setattr(capacity, "MEASURE_SECONDS", 0.0)
    a, gone = rig(disk / "store", capacity=250_000, min_free=min_free), chain("gone", 1)
    # The history of removals has its file before: its thread could take an inode that an eviction
    # frees before the set does, which would be refused.
    assert a.put(gone) == a.storage.delete(gone) == [True]
    a.store.feed.history.flush()
    assert a.put(chain("before", 16)) == [True] * 16
    if kind == "bytes":
        (disk / "other").write_bytes(bytes(150_000))
    else:
        subprocess.run(["mount", "-o", "remount,nr_inodes=40", str(disk)], check=True)
        with contextlib.suppress(OSError):
            for number in range(40):
                (disk / f"{number}").touch()
        assert a.storage.health().writable
        # Not even one for the set's own file.
        assert a.put(chain("first", 16)) == [True] * 16
        (disk / "0").unlink()
    for number in range(12):
        keys = chain(f"{number}", 16)
        assert a.put(keys) == [True] * 16
        assert a.holds(keys)
    assert a.temporaries() == []
    assert a.stats().pages_evicted >= 8 * 16


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_for_no_known_reason_evicts_once(rig, number):
    """Such as a quota, or what another program takes as fast: the whole store would go."""
    a = rig(capacity=1 << 20)
    for batch in range(8):
        assert a.put(chain(f"{batch}", 4)) == [True] * 4
    with failing("pwritev", number):
        assert a.put(chain("new", 8)) == [False] * 8
    assert a.put(chain("new", 8)) == [True] * 8
    assert a.stats().pages_evicted == 8
    with failing("pwritev", number):
        for _ in range(3):
            assert a.put(chain("newer", 8)) == [False] * 8
    assert a.stats().pages_evicted == 8
    assert a.temporaries() == []
    for batch in range(2, 8):
        assert a.holds(chain(f"{batch}", 4))


def test_a_delete_on_a_full_disk_removes_what_need_not_be_rewritten(rig):
    a, first, second = rig(), chain("first", 4), chain("second", 4)
    a.put(first)
    a.put(second)
    with failing("open", errno.ENOSPC, when=lambda path, *_: str(path).endswith(".temporary")):
        assert a.storage.delete([first[0], *second]) == [False] * 5
    for side in (a, rig()):
        assert side.holds(first)
        assert side.present(second) == [False] * 4


def test_nothing_is_published_after_the_deadline(rig, monkeypatch):
    a, b, keys = rig(), rig(), chain("a", 4)
    a.put(chain("first", 1))
    with monkeypatch.context() as patch, interrupted(os, "pwritev") as writes:
        slow = SimpleNamespace(monotonic=lambda: 0.05 * len(writes))
        patch.setattr(batches, "time", slow)
        assert a.put(keys, seconds=0.03) == [False] * 4
    assert b.hit(keys) == 0
    assert a.temporaries() == []
    assert len(a.bundles()) == 1
    assert a.put(keys, seconds=30) == [True] * 4
    assert b.holds(keys)


def test_a_path_that_is_a_file_is_a_mistake_of_the_configuration(rig, tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    a = rig(path)
    with pytest.raises(ConfigError, match="is a file; name a directory"):
        a.storage.open()
    assert a.hit(["k"]) == 0
    assert a.get(["k"]) == [None]
    assert a.put(["k"]) == [False]
    assert not a.storage.health().ok


def test_a_directory_that_cannot_be_made_is_reported_and_tried_again(rig, tmp_path):
    a = rig(tmp_path / "store")
    with failing("mkdir", errno.EACCES):
        with pytest.raises(StorageUnavailableError, match="Permission denied"):
            a.storage.open()
        assert a.put(["k"]) == [False]
    a.storage.open()
    assert a.put(["k"]) == [True]
    assert a.holds(["k"])


def test_too_few_descriptors_are_made_do_with(rig):
    a = rig()
    chains = [chain(str(number), 1) for number in range(40)]
    for keys in chains:
        a.put(keys)
    everything = [key for keys in chains for key in keys]
    with limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 6):
        for keys in chains:
            assert a.holds(keys)
        assert a.holds(everything)
        assert a.put(chain("more", 2)) == [True] * 2
    assert a.holds(everything)


def test_an_index_that_could_not_be_read_is_tried_again_soon(rig):
    """FT-4."""
    a, keys, others = rig(), chain("a", 4), chain("b", 2)
    a.put(keys)
    a.put(others)
    path = a.page_index.pages[keys[0]][0].path
    b = rig()
    with failing("pread", errno.EIO, when=lambda descriptor, *_: path_of(descriptor) == path):
        assert b.hit(keys) == 0
        assert b.holds(others)
    assert eventually(lambda: b.hit(keys), seconds=10 * page_index.RETRY_SECONDS)
    assert b.holds(keys)


@pytest.mark.parametrize("kind", ["description", "log"])
def test_a_symbolic_link_in_the_place_of_a_file_is_not_written_through(rig, tmp_path, kind):
    """Somebody else who may write in the directory cannot point the driver's writes at a file
    outside of it."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"untouched")
    a = rig()
    paths = a.store.paths
    if kind == "description":
        temporary = TemporaryName(ProcessId("a" * 8, 1, 1), "a" * 10, 1, 0)
        os.symlink(outside, a.store.temp_files.path(temporary))
        with pytest.raises(FileExistsError):
            a.store.temp_files.create(temporary)
    else:
        os.makedirs(paths.events(a.namespace))
        os.symlink(outside, f"{paths.events(a.namespace)}/{'a' * 10}-0.events")
        with pytest.raises(OSError, match="symbolic"):
            a.store.feed.logs.append(a.namespace, "a" * 10, 1, [Unlisted()])
    assert outside.read_bytes() == b"untouched"
