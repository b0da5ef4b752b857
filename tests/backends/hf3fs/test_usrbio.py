"""The USRBIO engine against a stand-in that checks every argument."""

from __future__ import annotations

import errno
import math
import os
from copy import deepcopy

import pytest

from hicache_backends.hf3fs import store as store_module
from hicache_backends.hf3fs.slots import usrbio as usrbio_module
from hicache_storage.objects import Call
from hicache_storage.spec import ConfigError
from tests.backends.hf3fs.harness import chain
from tests.backends.hf3fs.usrbio_stand_in import StandIn


@pytest.fixture
def library(tmp_path, monkeypatch):
    made = StandIn(tmp_path)
    monkeypatch.setattr(store_module, "load_library", lambda: made)
    yield made
    assert made.misuse == []


@pytest.fixture
def usrbio(rig, library, monkeypatch):
    monkeypatch.setattr(usrbio_module, "ENTRIES", 8)
    monkeypatch.setattr(usrbio_module, "RING_BYTES", 256 << 10)
    return lambda **options: rig(engine="usrbio", **options)


def test_pages_come_back_whatever_the_order_of_results(usrbio, library):
    """Some waits have none."""
    mine, keys = usrbio(), chain("a", 64)
    library.idle = 5
    assert all(mine.put(keys))
    library.idle = 5
    mine.expect(keys)
    assert library.idle == 0
    assert mine.storage.store.engine.name == "usrbio"
    assert {ring.for_read for ring in library.rings} == {True, False}


@pytest.mark.parametrize(
    ("trouble", "value"), [("errors", [errno.EIO]), ("excess", 1), ("short", 1)]
)
def test_one_request_that_fails_or_tells_of_another_length_fails_one_page(
    usrbio, library, trouble, value
):
    mine, keys = usrbio(), chain("a", 8)
    setattr(library, trouble, deepcopy(value))
    assert sorted(mine.put(keys)) == [False] + [True] * 7
    assert all(mine.put(keys))
    setattr(library, trouble, deepcopy(value))
    assert [page is not None for page in mine.get(keys)].count(False) == 1
    mine.expect(keys)


def test_a_file_that_ends_before_a_slot_is_damage(usrbio):
    mine, keys = usrbio(), chain("a", 4)
    assert all(mine.put(keys))
    with open(mine.scope.file.path, "r+b") as file:
        file.truncate(mine.scope.file.offset(mine.slot(keys[2])))
    assert [page is None for page in mine.get(keys)].count(True) >= 1
    assert mine.storage.get_stats().pools["kv"].pages_damaged >= 1
    assert all(mine.put(keys))
    mine.expect(keys)


def test_a_submission_that_fails_is_a_miss_and_the_ring_comes_back(usrbio, library):
    mine, keys = usrbio(), chain("a", 4)
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
    mine, keys = usrbio(), chain("a", 6)
    assert all(mine.put(keys))
    library.kept = 2
    found = mine.get(keys, seconds=3.0)
    assert found.count(None) == 2
    assert mine.storage.store.engine.stuck() == 2
    library.kept = 0
    mine.expect(keys)


def test_requests_that_hang_keep_nobody_and_no_memory_is_used_twice(usrbio, library):
    mine, keys = usrbio(), chain("a", 4)
    assert all(mine.put(keys))
    library.hangs.set()
    assert mine.get(keys, seconds=3.0) == [None] * 4
    # The stand-in lets nothing go by itself.
    assert mine.get(keys, seconds=0.3) == [None] * 4
    assert mine.storage.store.engine.stuck() == 4
    library.hangs.clear()
    mine.expect(keys)
    assert mine.storage.store.engine.stuck() == 0


def test_a_write_that_hangs_is_not_published_and_its_slot_not_given_away(usrbio, library):
    mine, keys = usrbio(lease_seconds=5.0), chain("a", 2)
    assert mine.hit(keys) == 0
    library.hangs.set()
    assert mine.put(keys, seconds=0.3) == [False] * 2
    assert mine.hit(keys) == 0
    library.hangs.clear()
    others = chain("b", 4)
    assert all(mine.put(others))
    mine.expect(others)


def test_a_page_longer_than_the_memory_is_a_miss(usrbio, monkeypatch):
    monkeypatch.setattr(usrbio_module, "RING_BYTES", 4 << 10)
    mine = usrbio()
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


def test_without_its_library_auto_takes_posix_and_usrbio_says_what_is_missing(rig, monkeypatch):
    def absent():
        raise ImportError("hf3fs_fuse")

    monkeypatch.setattr(store_module, "load_library", absent)
    assert rig().store.engine.name == "posix"
    with pytest.raises(ConfigError, match="hf3fs-py-usrbio"):
        rig(engine="usrbio").storage.open()


def test_calls_take_turns(usrbio, library):
    """One that finds the ring busy waits for it, until its deadline."""
    mine, keys = usrbio(), chain("a", 4)
    assert all(mine.put(keys))
    with mine.store.engine._reading.lend(Call(5), math.inf):
        assert mine.get(keys, seconds=0.3) == [None] * 4
    mine.expect(keys)
