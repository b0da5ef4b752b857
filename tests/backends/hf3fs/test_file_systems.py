"""The driver on file systems that lack a call or refuse one."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache_backends.hf3fs.slots.checking import SlotFileSet
from hicache_backends.hf3fs.slots.files import SlotFile
from hicache_backends.hf3fs.slots.geometry import SlotGeometry
from hicache_backends.hf3fs.slots.scopes import store_id
from hicache_backends.posix.files import Handle
from tests.backends.hf3fs.harness import chain
from tests.fuse.counting_fs import CountingMount

needs_fuse = pytest.mark.skipif(
    not os.path.exists("/dev/fuse") or shutil.which("fusermount3") is None,
    reason="needs /dev/fuse and fusermount3",
)


@pytest.fixture
def mount(tmp_path):
    """A file system without fallocate and symbolic links, as some FUSE daemons' are."""
    with CountingMount(tmp_path / "backing", tmp_path / "mount") as mount:
        yield mount


@needs_fuse
def test_symbolic_links_are_not_needed(mount, rig, server):
    path, keys = mount.point / "store", chain("a", 20)
    with ThreadPoolExecutor(4) as threads:
        path.mkdir()
        assert len(set(threads.map(store_id, [str(path)] * 8))) == 1
    one, other, local = (rig(path, metadata_url=url) for url in (server.url, server.url, ""))
    assert all(one.put(keys))
    other.expect(keys)
    assert all(local.put(keys))
    local.expect(keys)
    assert SlotFileSet(str(path)).file_of(one.scope.geometry) is not None
    assert sorted(name.suffix for name in path.iterdir()) == [
        *(".id", ".json", ".json", ".lock", ".slots", ".slots")
    ]


@needs_fuse
def test_preallocation_writes_nothing_where_there_is_no_fallocate(mount, caplog):
    """glibc's emulation writes zeros into each block, over pages that others store meanwhile."""
    files = [
        SlotFile(
            f"{mount.point}/{name}.slots", SlotGeometry(4096, 64), Handle, {}, preallocates=True
        )
        for name in ("a", "b")
    ]
    for file in files:
        file.borrow()
        assert os.stat(file.path).st_size == 64 * 4096
        # Its description alone.
        assert mount.counts()["write"] == 1 + files.index(file)
        file.close()
    assert "stays sparse" in caplog.text
