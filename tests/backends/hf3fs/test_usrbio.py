"""The USRBIO engine against a stand-in that checks every argument."""

from __future__ import annotations

import errno
import gc
import os
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from hicache_backends.hf3fs.slots.engine import IO_BYTES
from hicache_storage.spec import ConfigError
from tests.backends.file.harness import Hurried
from tests.backends.hf3fs.harness import chain
from tests.backends.hf3fs.usrbio_stand_in import StandIn
from tests.support.waiting import eventually


@pytest.fixture
def library(tmp_path, monkeypatch):
    made = StandIn(tmp_path)
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", made)
    yield made
    assert made.misuse == []


@pytest.fixture
def usrbio(rig, library):
    return lambda **options: rig(engine="usrbio", **options)


@pytest.mark.parametrize("components", [(1000, 3096), (IO_BYTES + 1000, IO_BYTES)])
def test_pages_come_back(usrbio, library, components):
    """Some waits have no result."""
    mine, keys = usrbio(components=components, pages=16), chain("a", 16)
    library.idle = 5
    assert all(mine.put(keys))
    library.idle = 5
    mine.expect(keys)
    assert library.idle == 0
    assert mine.storage.store.engine.name == "usrbio"
    assert {ring.for_read for ring in library.rings} == {True, False}


@pytest.mark.parametrize(("trouble", "value"), [("errors", [errno.EIO] * 2), ("short", 2)])
def test_a_request_that_fails_or_moves_less_fails_one_page(usrbio, library, trouble, value):
    """The first is of all pages, the second of one."""
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
    with open(mine.file.path, "r+b") as file:
        file.truncate(mine.file.offset(mine.slot(keys[2])))
    assert [page is None for page in mine.get(keys)].count(True) >= 1
    assert mine.storage.get_stats().pools["kv"].pages_damaged >= 1
    assert all(mine.put(keys))
    mine.expect(keys)


def test_the_memory_of_a_submission_that_fails_is_not_used_again(usrbio, library):
    mine, keys, others = usrbio(), chain("a", 1), chain("b", 1)
    assert all(mine.put(keys))
    library.refusals = [errno.EAGAIN]
    assert mine.get(keys) == [None]
    mine.expect(keys)
    library.refusals = [errno.EAGAIN]
    assert mine.put(others) == [False]
    assert all(mine.put(others))
    mine.expect(others)
    assert len(library.in_flight) == 2


def test_the_memory_of_requests_that_fail_is_given_back(usrbio, library):
    mine, keys = usrbio(), chain("a", 1)
    for _ in range(5):
        library.refusals = [errno.EAGAIN]
        assert mine.put(keys) == [False]
    library.in_flight.clear()
    library.rings.clear()
    assert all(mine.put(keys))
    gc.collect()
    # The mapping of the one buffer that is left, and the daemon's.
    assert Path("/proc/self/maps").read_text().count(f"/hicache-{os.getpid()}-") == 2


def test_requests_that_hang_delay_nobody(usrbio, library):
    mine, keys, others = usrbio(), chain("a", 4), chain("b", 4)
    assert all(mine.put(keys))
    engine = mine.store.engine
    mine.storage = layer = Hurried(mine.storage)
    layer.register_mem_host_pool_v2(mine.pool, "kv")
    library.hangs.set()
    layer.hurry(2.0)
    assert mine.get(keys) == [None] * 4
    assert mine.put(others) == [False] * 4
    assert engine.stuck() == 2
    library.hangs.clear()
    layer.be_patient()
    eventually(lambda: not engine.stuck())
    assert mine.hit(others) == 0
    assert all(mine.put(others))
    mine.expect([*keys, *others])


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


def test_without_its_library_it_says_what_is_missing(rig, monkeypatch):
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", None)
    with pytest.raises(ConfigError, match="hf3fs-py-usrbio"):
        rig(engine="usrbio").storage.open()
