"""A store that was deleted, and perhaps made again, is recognized as another one."""

from __future__ import annotations

import errno
import os

import pytest

from hicache_backends.file import change_feed as feed_module
from hicache_backends.file.paths import BIRTH_NAME
from hicache_backends.posix.directories import Attributes
from tests.backends.file.harness import chain


@pytest.mark.parametrize("counter", ["read", "stale"])
def test_a_store_made_again_under_the_same_inode_number_is_another_one(rig, monkeypatch, counter):
    # As a file server may number it; on a local disk the open directory keeps its number taken.
    real, stale = feed_module.cached_attributes, list[None]()

    def numbered(descriptor):
        if stale:
            stale.pop()
            raise OSError(errno.ESTALE, "ESTALE")
        found = real(descriptor)
        return Attributes(found.links, 7, found.mtime_ns)

    monkeypatch.setattr(feed_module, "cached_attributes", numbered)
    a, keys = rig(), chain("a", 3)
    a.put(keys)
    assert a.holds(keys)
    a.delete_store()
    c = rig()
    c.put(chain("c", 2))
    if counter == "stale":
        stale.append(None)
        a.hit(keys)
    assert a.hit(keys) == 0
    assert a.hit(chain("c", 2)) == 2
    assert a.put(keys, version=1) == [True] * 3
    for side in (a, c, rig()):
        assert side.holds(keys, version=1)


def test_a_store_without_a_mark_gets_one_from_whoever_opens_it(rig):
    a, keys = rig(), chain("a", 3)
    a.put(keys)
    for name in filter(BIRTH_NAME.fullmatch, os.listdir(a.store.paths.writers)):
        os.unlink(f"{a.store.paths.writers}/{name}")
    b = rig()
    assert b.holds(keys)
    assert len(list(filter(BIRTH_NAME.fullmatch, os.listdir(a.store.paths.writers)))) == 1
    assert a.holds(keys)
