"""The driver on file systems that lack a call or refuse one."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hicache_backends.hf3fs.slots.names import store_id
from tests.backends.hf3fs.harness import chain
from tests.fuse.counting_fs import CountingMount


@pytest.fixture
def mount(tmp_path):
    """A file system without symbolic links, as some FUSE daemons' are."""
    with CountingMount(tmp_path / "backing", tmp_path / "mount") as mount:
        yield mount


def test_symbolic_links_are_not_needed(mount, rig):
    path, keys = mount.point / "store", chain("a", 20)
    with ThreadPoolExecutor(4) as threads:
        path.mkdir()
        assert len(set(threads.map(store_id, [str(path)] * 8))) == 1
    one, other = rig(path), rig(path)
    assert all(one.put(keys))
    other.expect(keys)
    assert sorted(name.suffix for name in path.iterdir()) == [".id", ".json", ".slots"]


@contextmanager
def read_only(source, point):
    """The same directory where it may only be read."""
    point.mkdir()
    subprocess.run(["mount", "--bind", source, point], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", point], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", point], check=True)


def test_a_reader_without_write_access_reads_and_is_refused(tmp_path, rig):
    options = {"file_size": 20 * 4608}
    writer, keys = rig(**options), chain("a", 20)
    assert all(writer.put(keys))
    with read_only(tmp_path / "store", tmp_path / "mount"):
        reader = rig(tmp_path / "mount", **options)
        reader.expect(keys)
        assert reader.put(chain("b", 5)) == [False] * 5
        # Nothing was evicted for what cannot be written.
        assert reader.hit(keys) == 20
        stats = reader.storage.get_stats()
        assert (stats.faults, stats.pools["kv"].pages_refused) == (0, 5)
        health = reader.storage.health()
        assert (health.ok, health.writable) == (True, False)
        assert "Read-only file system" in health.detail
        subprocess.run(["mount", "-o", "remount,bind,rw", tmp_path / "mount"], check=True)
        assert all(reader.put(chain("b", 5)))
        writer.expect(chain("b", 5))
        reader.storage.close()
