"""Storages learn exactly of what others have announced: by the stamp, the markers, and a listing where these leave gaps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hicache_backends.file import board as board_module
from hicache_backends.file import stamp as stamp_module
from hicache_backends.file.attributes import list_directory, server_attributes
from hicache_backends.file.board import Board
from hicache_backends.file.clock import Clock
from hicache_backends.file.names import Added, BundleName, Removed, random_writer
from hicache_backends.file.shelf import Shelf
from hicache_backends.file.stamp import Stamp
from hicache_backends.file.tree import Tree

NAMESPACE = "0123456789abcdef" * 2


class Party:
    """One storage's view of a directory, without the pages."""

    def __init__(self, tree: Tree, *, asks_server: bool = False):
        self.tree = tree
        self.stamp = Stamp(tree.stamp, asks_server=asks_server)
        self.board = Board(tree, self.stamp, random_writer(), asks_server=asks_server)
        self.shelf = Shelf(NAMESPACE, tree, self.board, asks_server=asks_server)

    def publish(self, *, announce: bool = True) -> BundleName:
        name = BundleName(self.board.writer, self.board.next_sequence(NAMESPACE), 10, 1, 7)
        path = Path(self.tree.bundle(NAMESPACE, name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.shelf.add([self.shelf.bundle(name)])
        self.board.queue(NAMESPACE, [Added(name)])
        if announce:
            self.board.announce()
        return name

    def remove(self, name: BundleName) -> None:
        bundle = self.shelf.bundles[name.id]
        os.unlink(bundle.path)
        self.shelf.remove([bundle])
        self.board.queue(NAMESPACE, [Removed(name.id)])
        self.board.announce()

    def sees(self) -> set[BundleName]:
        self.shelf.catch_up(self.board.read())
        return {bundle.name for bundle in self.shelf.bundles.values()}


@pytest.fixture(params=[False, True], ids=["local", "asks_server"])
def party(request, tmp_path):
    tree = Tree(str(tmp_path))
    tree.create()
    return lambda: Party(tree, asks_server=request.param)


@pytest.fixture
def listings(monkeypatch):
    """How often directories of bundles are listed."""
    listed = []

    def counting(path, *, asks_server):
        listed.append(path)
        return list_directory(path, asks_server=asks_server)

    monkeypatch.setattr("hicache_backends.file.shelf.list_directory", counting)
    return listed


def test_what_one_publishes_the_other_sees_at_once(party):
    a, b = party(), party()
    for _ in range(200):
        name = a.publish()
        assert name in b.sees()


def test_what_one_removes_the_other_misses_at_once(party):
    a, b = party(), party()
    names = [a.publish() for _ in range(5)]
    assert b.sees() == set(names)
    b.remove(names[2])
    assert a.sees() == set(names) - {names[2]}


def test_a_few_events_are_told_without_listing_the_bundles(party, listings):
    a, b = party(), party()
    a.publish()
    b.sees()
    listings.clear()
    names = [a.publish() for _ in range(4)]
    a.remove(names[0])
    assert b.sees() >= set(names[1:])
    assert listings == []


def test_many_events_at_once_make_the_reader_list(party, listings):
    a, b = party(), party()
    b.sees()
    listings.clear()
    names = {a.publish() for _ in range(100)}
    assert b.sees() == names
    assert len(listings) == 1


def test_an_unchanged_store_is_asked_about_the_stamp_only(party, monkeypatch):
    a, b = party(), party()
    a.publish()
    expected = b.sees()
    monkeypatch.setattr(board_module, "list_directory", lambda *_, **__: pytest.fail("listed the markers"))
    assert b.sees() == expected


def test_a_removal_by_a_second_writer_counts_though_its_marker_is_read_first(party):
    # Whichever of the two markers is listed first, the third one must not believe in the bundle.
    for _ in range(20):
        a, b, c = party(), party(), party()
        c.sees()
        name = a.publish()
        assert name in b.sees()
        b.remove(name)
        assert name not in c.sees()


def test_an_announcement_that_failed_is_made_good(party, monkeypatch):
    a, b = party(), party()
    monkeypatch.setattr(stamp_module.os, "utime", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "EIO")))
    with pytest.raises(OSError, match="EIO"):
        a.publish()
    monkeypatch.undo()
    a.board.announce()
    assert len(b.sees()) == 1


def test_a_bundle_that_was_never_announced_is_found_when_the_shelf_is_distrusted(party):
    a, b = party(), party()
    b.sees()
    name = a.publish(announce=False)
    assert b.sees() == set()
    b.shelf.distrust()
    assert b.sees() == {name}


def test_a_marker_that_was_collected_loses_nothing(party):
    a, b = party(), party()
    first = a.publish()
    assert b.sees() == {first}
    second = a.publish()
    for path in Path(a.tree.writers).iterdir():
        path.unlink()
    c = party()
    third = c.publish()
    assert b.sees() == {first, second, third}
    fourth = a.publish()
    assert b.sees() == {first, second, third, fourth}


def test_markers_that_nobody_needs_are_collected(party, monkeypatch):
    monkeypatch.setattr(board_module, "MANY_MARKERS", 3)
    for _ in range(4):
        party().publish()
    last = party()
    last.board.collect_forgotten(Clock())
    assert len(os.listdir(last.tree.writers)) == 4
    monkeypatch.setattr(board_module, "FORGOTTEN_SECONDS", -1.0)
    stranger = Path(last.tree.writers) / "not-a-marker"
    stranger.touch()
    last.board.collect_forgotten(Clock())
    assert os.listdir(last.tree.writers) == [stranger.name]
    assert len(last.sees()) == 4


def test_a_deleted_store_is_an_empty_one_and_a_new_one_is_noticed(party):
    a, b = party(), party()
    a.publish()
    assert len(b.sees()) == 1
    shutil.rmtree(a.tree.root)
    assert b.sees() == set()
    a.tree.create()
    assert b.sees() == set()
    c = party()
    name = c.publish()
    assert b.sees() == {name}
    assert name in a.sees()


def test_strangers_among_the_markers_are_ignored(party):
    a, b = party(), party()
    for name in ("README", f"{NAMESPACE}.aaaaaaaaaa.zz.", ".hidden"):
        (Path(a.tree.writers) / name).touch()
    name = a.publish()
    assert b.sees() == {name}


@pytest.mark.parametrize("asks_server", [False, True])
def test_the_stamp_changes_with_every_renewal(tmp_path, asks_server):
    path = tmp_path / "stamp"
    path.mkdir()
    stamp, other = Stamp(str(path), asks_server=asks_server), Stamp(str(path), asks_server=asks_server)
    values = {stamp.read()}
    for _ in range(300):
        other.renew()
        values.add(stamp.read())
    assert len(values) == 301
    assert stamp.read() == other.read()


def test_the_stamp_differs_even_where_times_are_kept_in_whole_seconds(tmp_path):
    path = tmp_path / "stamp"
    path.mkdir()
    stamp, seconds = Stamp(str(path), asks_server=False), set()
    for _ in range(300):
        stamp.renew()
        seconds.add(stamp.read().mtime_ns // 1_000_000_000)
    assert len(seconds) == 300
    assert all(0 < second < 2**31 for second in seconds)


def test_a_stamp_of_another_owner_is_replaced(tmp_path, monkeypatch):
    path = tmp_path / "stamp"
    path.mkdir()
    stamp, other = Stamp(str(path), asks_server=False), Stamp(str(path), asks_server=False)
    before, real = other.read(), os.utime

    def refuse(target, *args, **kwargs):
        if target == str(path):
            raise PermissionError(1, "not the owner")
        real(target, *args, **kwargs)

    monkeypatch.setattr(os, "utime", refuse)
    stamp.renew()
    after = other.read()
    assert after != before
    stamp.renew()
    assert other.read() != after
    assert os.listdir(tmp_path) == ["stamp"]


def test_a_stamp_that_was_mounted_over_is_noticed_after_a_while(tmp_path, monkeypatch):
    path = tmp_path / "stamp"
    path.mkdir()
    stamp = Stamp(str(path), asks_server=False)
    stamp.read()
    os.rename(path, tmp_path / "below")
    path.mkdir()
    fresh = Stamp(str(path), asks_server=False)
    fresh.renew()
    monkeypatch.setattr(stamp_module, "REVALIDATION_SECONDS", -1.0)
    assert stamp.read() == fresh.read()


def test_a_missing_stamp_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError):
        Stamp(str(tmp_path / "none"), asks_server=False).read()


def test_attributes_that_the_server_tells_agree_with_the_kernels(tmp_path):
    descriptor = os.open(tmp_path, os.O_PATH)
    try:
        status, found = os.fstat(descriptor), server_attributes(descriptor)
        assert found == (status.st_nlink, status.st_ino, status.st_mtime_ns)
    finally:
        os.close(descriptor)


def test_without_statx_the_kernels_attributes_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr("hicache_backends.file.attributes._statx", None)
    descriptor = os.open(tmp_path, os.O_PATH)
    try:
        assert server_attributes(descriptor).inode == os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)


def test_who_finds_a_marker_whose_writer_was_killed_before_the_stamp_tells_everyone(party, monkeypatch):
    a, b = party(), party()
    a.publish()
    assert len(b.sees()) == 1
    with monkeypatch.context() as killed:
        killed.setattr(a.stamp, "renew", lambda value: None)
        last = a.publish()
    assert last not in b.sees()
    # Whatever it promises of the bundle, the others keep.
    assert last in party().sees()
    assert last in b.sees()


def test_a_marker_whose_stamp_was_seen_is_believed_without_another(party, monkeypatch):
    a, b = party(), party()
    a.publish()
    b.sees()
    monkeypatch.setattr(b.stamp, "renew", lambda value=None: pytest.fail("renewed the stamp"))
    for _ in range(5):
        assert a.publish() in b.sees()
