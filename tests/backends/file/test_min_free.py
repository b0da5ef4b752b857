"""Others get their room on the file system: pages go, then sets are refused."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from hicache_backends.file import capacity as capacity_module
from tests.backends.file.harness import (
    Rig,
    bundle_bytes,
    chain,
    counted,
    fill,
    hits,
    interrupted,
    replaced,
)
from tests.metadata_server.full_disks import SmallDisk, small_disk
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIN_FREE = 1 << 20
BATCH_BYTES = bundle_bytes(8)
BACK_SECONDS = 20.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path) as made:
        yield made


@pytest.fixture
def engine(rig, disk):
    """Open rigs on the small disk, of which a third is left to others."""
    return lambda **options: rig(disk.path / "store", **{"min_free": MIN_FREE, **options})


def free_bytes(disk: SmallDisk) -> int:
    status = os.statvfs(disk.path)
    return status.f_bavail * status.f_frsize


def watchers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "hicache-file-room"]


def test_a_store_without_a_capacity_leaves_room_and_evicts_the_oldest(engine, disk):
    a, names = engine(), [f"{number}" for number in range(100)]
    for name in names:
        fill(a, [name])
        assert a.hit(chain("0", 8)) == 8
        # Files take whole blocks, which is noticed once a second.
        assert free_bytes(disk) > MIN_FREE // 2
    eventually(lambda: free_bytes(disk) >= MIN_FREE, seconds=BACK_SECONDS)
    found = hits(a, names)
    left = sum(found) // 8
    # The one that is used stays, and otherwise the latest are there.
    assert 20 < left < 70
    assert found == [8] + [0] * (len(names) - left) + [8] * (left - 1)
    assert a.stats().pages_evicted == 8 * (len(names) - left)
    assert a.storage.capabilities.evicts


@pytest.mark.parametrize("capacity", [None, 40 * BATCH_BYTES], ids=["unlimited", "below capacity"])
def test_others_who_fill_the_disk_get_their_room_without_a_call(engine, disk, capacity):
    """An idle engine, and one that keeps files open which the other evicts."""
    a, b = engine(capacity=capacity), engine(capacity=capacity)
    fill(a, "abcdefghij")
    for name in "abcdefghij":
        assert b.holds(chain(name, 8))
    disk.fill(leave=MIN_FREE - 3 * BATCH_BYTES)
    eventually(lambda: free_bytes(disk) >= MIN_FREE, seconds=BACK_SECONDS)
    found = hits(b, "abcdefghij")
    assert found == sorted(found)
    # Both may have evicted for the same bytes.
    assert 16 <= 80 - sum(found) <= 64
    assert sum(one.stats().pages_evicted for one in (a, b)) == 80 - sum(found)


def test_where_nothing_is_left_sets_are_refused_counted_and_said_once(
    engine, disk, caplog, monkeypatch
):
    monkeypatch.setattr(capacity_module, "MEASURE_SECONDS", 0.0)
    a = engine()
    fill(a, "abc")
    disk.fill()
    with (
        caplog.at_level(logging.INFO, "hicache_storage"),
        caplog.at_level(logging.INFO, "hicache_backends"),
    ):
        for _ in range(5):
            assert a.put(chain("d", 8)) == [False] * 8
    assert [text.split(":")[1] for text in caplog.messages] == [
        " evicting pages",
        " sets are refused",
    ]
    assert "min_free is 1,048,576" in caplog.messages[-1]
    stats = a.storage.get_stats()
    assert (stats.faults, stats.pools["kv"].pages_refused) == (0, 40)
    assert stats.pools["kv"].pages_evicted == 24
    assert a.temporaries() == []
    # One that opens meanwhile knows it without a set.
    for side in (a, engine()):
        side.storage.open()
        health = side.storage.health()
        assert not health.writable
        assert "min_free is 1,048,576" in health.detail
    disk.empty()
    fill(a, "d")
    assert a.storage.health().writable


def test_a_disk_that_becomes_full_in_the_middle_of_a_set_has_room_for_the_next(engine, disk):
    a = engine()
    fill(a, [f"{number}" for number in range(45)])
    with interrupted(a.store.writer, "write", disk.fill):
        assert a.put(chain("new", 8)) == [False] * 8
    fill(a, ["new"])
    assert a.holds(chain("new", 8))
    assert a.stats().pages_evicted >= MIN_FREE // BATCH_BYTES * 8
    assert (a.storage.get_stats().faults, a.stats().pages_refused) == (0, 8)


def test_a_set_with_enough_room_measures_nothing(engine, disk):
    a = engine()
    fill(a, "a")
    with counted("statvfs", "") as measured, counted("scandir", "temporary") as listed:
        started = time.monotonic()
        for number in range(20):
            fill(a, [f"{number}"])
        seconds = time.monotonic() - started
    assert len(measured) <= 1 + seconds / capacity_module.MEASURE_SECONDS
    assert listed == []


@pytest.fixture
def free(monkeypatch):
    """The free bytes of a huge file system."""
    monkeypatch.setattr(capacity_module, "MEASURE_SECONDS", 0.0)
    free = [1 << 30]
    with replaced(
        os,
        "statvfs",
        lambda _: (
            lambda path: SimpleNamespace(f_blocks=1 << 30, f_frsize=1, f_bavail=free[0], f_files=0)
        ),
    ):
        yield free


def test_what_is_freed_late_is_not_evicted_again_and_again(rig, free, monkeypatch):
    """Some file systems free the bytes of removed files in the background."""
    monkeypatch.setattr(capacity_module, "LATE_SECONDS", 2.0)
    a = rig(min_free=MIN_FREE)
    fill(a, "abcdefghij")
    free[0] = MIN_FREE - BATCH_BYTES
    for _ in range(5):
        a.store.capacity.keep_free()
    assert a.stats().pages_evicted == 8
    monkeypatch.setattr(capacity_module, "LATE_SECONDS", 0.0)
    eventually(lambda: a.store.capacity.keep_free() or a.stats().pages_evicted == 16)


def test_what_others_free_is_not_taken_for_what_was_freed_late(rig, free):
    """Room that was taken and freed by others once counted twice, and was written to."""
    a = rig(min_free=MIN_FREE)
    fill(a, "abcdefghij")
    free[0] = MIN_FREE - 4 * BATCH_BYTES
    a.store.capacity.keep_free()
    assert a.stats().pages_evicted == 4 * 8
    free[0] = MIN_FREE
    fill(a, "klm")
    assert a.stats().pages_evicted == 7 * 8


def test_a_file_system_without_a_size_is_not_short(rig):
    """FUSE daemons that do not know report zeros."""
    zeros = SimpleNamespace(f_blocks=0, f_frsize=4096, f_bavail=0, f_files=0)
    with replaced(os, "statvfs", lambda _: lambda path: zeros):
        a = rig()
        fill(a, "abc")
    assert a.stats().pages_evicted == 0


def test_min_free_of_nothing_evicts_nothing_and_watches_nothing(rig, disk):
    before = watchers()
    a = rig(disk.path / "store", min_free=0)
    fill(a, "abc")
    disk.fill()
    assert a.put(chain("d", 8)) == [False] * 8
    assert hits(a, "abc") == [8, 8, 8]
    assert not a.storage.capabilities.evicts
    assert "the file system is full" in a.storage.health().detail
    assert watchers() == before


def test_the_thread_ends_with_the_store_also_with_one_that_was_only_dropped(tmp_path):
    eventually(lambda: not watchers())
    for ends in (lambda one: one.storage.close(), lambda one: None):
        one = Rig(tmp_path / "store")
        fill(one, "a")
        assert watchers()
        ends(one)
        del one
        gc.collect()
        eventually(lambda: not watchers())
