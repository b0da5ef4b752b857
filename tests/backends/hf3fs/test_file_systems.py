"""The driver on file systems that lack a call or refuse one."""

from __future__ import annotations

import os
import shutil

import pytest

from hicache_backends.hf3fs.slots.files import SlotFile
from hicache_backends.hf3fs.slots.geometry import SlotGeometry
from hicache_backends.posix.files import Handle
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
