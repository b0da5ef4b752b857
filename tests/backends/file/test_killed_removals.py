"""A process killed at any step of a removal: what others have acknowledged afterwards is there.

A process that knows the pages and has listed nothing since sets them again, and is believed.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from hicache_storage.spec import StorageUnavailableError
from tests.backends.file.harness import Rig, at_steps, bundle_bytes, chain, failing

if TYPE_CHECKING:
    from pathlib import Path

FORK = multiprocessing.get_context("fork")
KEYS = chain("k", 4)
NEW = chain("new", 6)
CAPACITY = bundle_bytes(6) + 300
"""Of the four, all go for six new ones."""


def _die_at(step: int, path: Path, change: str) -> None:
    """Make a change, killed before or after one of its renames, unlinks and changes of a time."""
    rig = Rig(path, capacity=CAPACITY if change == "evict" else None)
    assert rig.hit(KEYS) == 4
    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    with at_steps(lambda number: number == step and kill(), ("rename", "unlink", "utime")):
        if change == "clear":
            rig.storage.clear()
        elif change == "evict":
            assert rig.put(NEW) == [True] * 6
        else:
            rig.storage.delete(KEYS if change == "delete" else KEYS[2:3])
    os._exit(0)


@pytest.mark.parametrize("change", ["delete", "shorten", "clear", "evict"])
def test_what_is_set_after_the_kill_is_found(tmp_path, change):
    for step in itertools.count():
        path = tmp_path / str(step)
        writer, knows, fresh = Rig(path), Rig(path), Rig(path)
        bundles = {}
        for keys in (KEYS[:1], KEYS[1:2], KEYS[2:]):
            writer.put(keys)
            (bundle,) = set(writer.bundles()) - set(bundles)
            bundles[bundle] = keys
        assert knows.hit(KEYS) == 4
        child = FORK.Process(target=_die_at, args=(step, path, change))
        child.start()
        child.join(30)
        assert child.exitcode in (0, -signal.SIGKILL)
        there = " ".join(path.name for path in writer.bundles_path.iterdir())
        gone = [key for file, keys in bundles.items() if file.name not in there for key in keys]
        assert knows.put(KEYS) == [True] * 4
        assert fresh.holds(gone), step
        # A file that was left behind may go with the first listing, and all agree about it.
        found = fresh.present(KEYS)
        assert knows.present(KEYS) == writer.present(KEYS) == found, step
        assert knows.put(KEYS) == [True] * 4
        for rig in (knows, fresh, writer):
            assert rig.holds(KEYS), step
        assert knows.storage.delete(KEYS) == [True] * 4
        for rig in (knows, fresh, writer, late := Rig(path)):
            assert rig.present(KEYS) == [False] * 4, step
        assert not list(late.bundles_path.glob("*.claimed"))
        for rig in (knows, fresh, writer, late):
            rig.storage.close()
        if child.exitcode == 0:
            break
    assert step > 5


@pytest.mark.parametrize("change", ["delete", "clear", "evict"])
@pytest.mark.parametrize("name", ["rename", "utime"])
def test_a_removal_that_cannot_be_announced_removes_nothing(rig, change, name):
    a = rig(capacity=CAPACITY) if change == "evict" else rig()
    knows = rig()
    a.put(KEYS)
    assert knows.hit(KEYS) == 4
    with failing(name, errno.EIO, when=lambda *paths: "/bundles/" not in str(paths[-1])):
        if change == "clear":
            with pytest.raises(StorageUnavailableError):
                a.storage.clear()
        elif change == "delete":
            assert a.storage.delete(KEYS) == [False] * 4
        else:
            assert a.put(NEW) == [False] * 6
        assert knows.holds(KEYS)
        assert knows.put(KEYS) == [True] * 4
    # What could not be announced is no removal, also where another storage knows of it.
    assert a.put(NEW[:1]) == [True]
    for side in (a, knows, rig()):
        assert side.holds(KEYS)
        assert side.holds(NEW[:1])
