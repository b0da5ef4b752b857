"""Damaged files: a get returns the right bytes or `False`, and the next set repairs."""

from __future__ import annotations

import errno
import os
import time

import pytest

from hicache_backends.file import page_index as page_index_module
from tests.backends.file.harness import (
    Rig,
    chain,
    counted,
    failing,
    flip,
    interrupted,
    path_of,
    raising,
    replaced,
)
from tests.support.waiting import eventually


def undroppable(a: Rig):
    return replaced(a.store.rewriter, "drop", lambda _: raising(errno.EROFS))


def unreadable(a: Rig):
    """The pages beside it, after the read that has found the damage."""
    return failing("preadv", errno.EIO, after=1)


@pytest.mark.parametrize("fault", [undroppable, unreadable])
def test_a_damaged_page_that_cannot_be_dropped_is_hidden_until_it_is_written_anew(rig, fault):
    a, keys = rig(), chain("a", 4)
    a.put(keys)
    flip(a.bundles()[0], 2 * a.page_bytes)
    with fault(a):
        assert a.versions(keys) == [0, 0, None, 0]
        assert a.present(keys) == [True, True, False, True]
    assert a.put(keys, version=1) == [True] * 4
    for side in (a, rig()):
        assert side.versions(keys, (0, 1)) == [0, 0, 1, 0]
    # The new copy hides the damaged one, until both are deleted.
    assert a.storage.delete(keys) == [True] * 4
    assert a.bundles() == []


def test_of_copies_written_at_one_moment_the_later_one_counts_for_everybody(rig, monkeypatch):
    a, keys, now = rig(), chain("a", 3), time.time_ns()
    monkeypatch.setattr(a.store.clock, "now_ns", lambda: now)
    a.put(keys)
    a.put_again(keys, 1)
    assert a.storage.delete(keys[1:2]) == [True]
    for side in (a, rig(), rig(), rig()):
        assert side.versions(keys, (0, 1)) == [1, None, 1]


def test_of_several_copies_no_older_one_takes_the_place_of_a_damaged_one(rig):
    a, keys = rig(), chain("a", 3)
    a.put(keys)
    a.put_again(keys, 1)
    for path in a.bundles():
        flip(path, a.page_bytes + 7)
    assert a.versions(keys, (0, 1)) == [1, None, 1]
    for side in (a, rig()):
        assert side.present(keys) == [True, False, True]
    assert a.put(keys, version=2) == [True] * 3
    for side in (a, rig()):
        assert side.versions(keys, (0, 1, 2)) == [1, 2, 1]


@pytest.mark.parametrize("verifies", [True, False])
def test_a_damaged_page_that_is_copied_beside_others_stays_damaged(rig, verifies):
    a, keys = rig(verify_checksums=verifies), chain("a", 4)
    a.put(keys)
    (bundle,) = a.bundles()
    if verifies:
        flip(bundle, a.page_bytes + 7)
    os.truncate(bundle, 3 * a.page_bytes)
    assert a.storage.delete(keys[:1]) == [True]
    for side in (rig(verify_checksums=verifies), a):
        assert side.versions(keys) == [None, None if verifies else 0, 0, None]
        assert side.present(keys) == [False, not verifies, True, False]
    assert a.put(keys) == [True] * 4
    assert rig().holds(keys)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_repair_by_another_is_not_dropped_for_the_copy_that_was_damaged(rig, dropped):
    a, b, keys = rig(), rig(), chain("a", 4)
    a.put(keys)
    flip(a.bundles()[0], 2 * a.page_bytes)

    def repair():
        if dropped:
            assert b.versions(keys) == [0, 0, None, 0]
        b.put_again(keys[2:3], 0)

    with interrupted(a.storage, "discard_objects", repair):
        assert a.versions(keys) == [0, 0, None, 0]
    assert a.storage.get_stats().faults == 0
    for side in (a, b, rig()):
        assert side.holds(keys)


def test_the_index_of_another_bundle_is_not_taken_for_a_bundles_own(rig, monkeypatch):
    a, one, other = rig(), chain("one", 3), chain("other", 3)
    a.put(one)
    (first,) = a.bundles()
    a.put(other)
    (second,) = set(a.bundles()) - {first}
    monkeypatch.setattr(page_index_module, "RETRY_SECONDS", 0.2)
    fresh, real = rig(), os.pread

    def lie(descriptor, count, offset):
        if path_of(descriptor) != str(first):
            return real(descriptor, count, offset)
        with second.open("rb") as file:
            return real(file.fileno(), count, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lie)
        assert fresh.hit(other) == 3
        assert fresh.holds(other)
        assert fresh.present(one) == [False] * 3
        assert fresh.store.ignored() == 1
    # The disk had lied: the bundle itself is in order, and found so before long.
    eventually(lambda: fresh.holds(one))
    assert fresh.store.ignored() == 0
    assert fresh.holds(other)
    assert sorted(a.bundles()) == sorted([first, second])


def test_what_is_no_bundle_is_looked_at_again_only_so_often(rig, monkeypatch):
    a, keys = rig(), chain("a", 2)
    (a.bundles_path).mkdir(parents=True)
    (a.bundles_path / "aaaaaaaaaa-1-64-3-4.bundle").write_bytes(b"x" * 100)
    monkeypatch.setattr(page_index_module, "RETRY_SECONDS", 0.0)
    with counted("pread", ".bundle") as asked:
        for _ in range(3 * page_index_module.MAX_RECHECKS):
            assert a.hit(keys) == 0
    assert len(asked) == 1 + page_index_module.MAX_RECHECKS
    assert a.store.ignored() == 1


@pytest.mark.parametrize(
    "garbage", [b"", b"x", b"\0" * 100, b"HCBUNDLE" * 5000], ids=["empty", "byte", "zeros", "magic"]
)
def test_garbage_under_a_bundles_name_is_ignored_and_counted(rig, garbage, caplog):
    a, keys = rig(), chain("a", 4)
    a.put(keys)
    for number in range(3):
        (a.bundles_path / f"aaaaaaaaaa-{number:x}-{max(1, len(garbage)):x}-3-4.bundle").write_bytes(
            garbage
        )
    b = rig()
    assert b.holds(keys)
    assert b.store.ignored() == 3
    assert b.storage.health().detail == "3 damaged bundles ignored"
    assert b.storage.health().ok
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1


def test_a_link_to_nothing_on_a_mount_is_ignored(rig):
    """A listing there does not tell it from a file, and each lookup took it for a bundle that is
    replaced again and again."""
    a, keys = rig(), chain("a", 4)
    a.put(keys)
    (a.bundles_path / "aaaaaaaaaa-1-64-3-4.bundle").symlink_to("nothing")
    b = rig()
    b.store.paths.asks_server = True
    assert b.holds(keys)
    assert (b.store.ignored(), b.storage.get_stats().faults) == (1, 0)


@pytest.mark.parametrize(
    "left", [0, 1, 2 * 4096 + 7, -1], ids=["none", "byte", "two pages", "most"]
)
def test_a_file_that_is_cut_is_read_as_far_as_it_goes(rig, left):
    """By one that knows its index; who opens later finds no index."""
    a, keys = rig(), chain("a", 5)
    a.put(keys)
    (bundle,) = a.bundles()
    os.truncate(bundle, left if left >= 0 else bundle.stat().st_size + left)
    whole = left // a.page_bytes if left >= 0 else 5
    for side, found in ((rig(), 0), (a, whole)):
        assert side.versions(keys) == [0] * found + [None] * (5 - found)
        assert side.present(keys) == [True] * found + [False] * (5 - found)
        assert side.storage.get_stats().faults == 0
    assert a.put(keys) == [True] * 5
    for side in (a, rig()):
        assert side.put(keys) == [True] * 5
        assert side.holds(keys)
