"""A store into which nothing can be written says so, and serves what it has."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache_storage.testing import BytePool
from tests.backends.file.harness import Rig, bundle_bytes, chain, identity
from tests.metadata_server.full_disks import small_disk


@contextmanager
def bound(path: Path):
    """Mount a directory over itself: no rename crosses its border."""
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def assert_only_reads(rig: Rig, reason: str) -> None:
    health = rig.storage.health()
    assert (health.ok, health.writable) == (True, False)
    assert reason in health.detail


def assert_writes(rig: Rig) -> None:
    health = rig.storage.health()
    assert (health.ok, health.writable, health.detail) == (True, True, "")


@pytest.mark.parametrize("served", [True, False], ids=["with pages", "empty"])
def test_a_rename_that_the_file_system_refuses_evicts_nothing_and_is_told(rig, served):
    """mergerfs, project quotas and encrypted directories refuse renames from one directory of a
    mount to another: no set succeeded, and the health was fine."""
    capacity, keys = 2 * bundle_bytes(8), chain("a", 8)
    a, other = rig(capacity=capacity), rig(who=identity(model="other"), capacity=capacity)
    if served:
        assert a.put(keys) == [True] * 8
        a.storage.close()
        a = rig(capacity=capacity)
    assert other.put(keys) == [True] * 8
    assert_writes(a)
    with bound(Path(a.store.paths.temporaries)):
        for _ in range(3):
            assert a.put(chain("b", 8)) == [False] * 8
        assert other.hit(keys) == 8
        assert a.hit(keys) == 8 * served
        health = a.storage.health()
        assert (health.ok, health.writable) == (served, False)
        assert "no file can be renamed from" in health.detail
    stats = a.storage.get_stats()
    assert (stats.faults, stats.pools["kv"].pages_refused) == (0, 24)
    assert a.temporaries() == []
    assert a.put(chain("b", 8)) == [True] * 8
    assert a.holds(chain("b", 8))
    assert_writes(a)


def test_a_full_or_read_only_disk_is_told_of_before_a_set(rig, tmp_path):
    with small_disk(tmp_path) as disk:
        a, keys = rig(disk.path / "store", min_free=0), chain("a", 8)
        assert a.put(keys) == [True] * 8
        assert_writes(a)
        disk.fill()
        assert_only_reads(a, "full")
        disk.empty()
        assert_writes(a)
        for mode, reason in (("ro", "read-only"), ("rw", "")):
            subprocess.run(["mount", "-o", f"remount,{mode}", str(disk.path)], check=True)
            assert_only_reads(a, reason) if reason else assert_writes(a)
            assert a.holds(keys)
        a.storage.close()


def give_up_privileges() -> None:
    """Let permissions count for this thread of a superuser, as for any other user."""
    none = struct.pack("<6I", 0, 0, 0, 0, 0, 0)
    assert ctypes.CDLL(None).capset(struct.pack("<Ii", 0x20080522, 0), none) == 0


def test_a_directory_without_permission_to_write_is_told_of(rig):
    a = rig()
    a.put(chain("a", 8))
    os.chmod(a.store.paths.temporaries, 0o555)
    with ThreadPoolExecutor(1, initializer=give_up_privileges) as user:
        user.submit(assert_only_reads, a, "not writable for this user").result()
    os.chmod(a.store.paths.temporaries, 0o755)
    with ThreadPoolExecutor(1, initializer=give_up_privileges) as user:
        user.submit(assert_writes, a).result()


def test_a_pool_whose_pages_are_too_large_does_not_hide_another(rig):
    a = rig(capacity="1MiB")
    a.put(chain("a", 8))
    a.storage.register_mem_host_pool_v2(BytePool(pages=1, components=(2 << 20,)), "large")
    assert_only_reads(a, "pages of pool large are larger than the capacity")
    assert a.holds(chain("a", 8))
