"""The change feed: every announced event is applied, by cursors, logs, or a listing where these
leave gaps."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hicache_backends.file import change_feed as feed_module
from hicache_backends.file import events as events_module
from hicache_backends.file.bundle import BundleName
from hicache_backends.file.bundle_set import BundleSet
from hicache_backends.file.change_feed import ChangeCounter, ChangeFeed
from hicache_backends.file.events import Added, Found, Removed, Unlisted, parse_cursor
from hicache_backends.file.paths import BIRTH_NAME, StorePaths, random_writer
from hicache_backends.file.temp_files import ServerClock
from hicache_backends.posix.directories import Attributes
from tests.backends.file.harness import chain, failing, flip

NAMESPACE = "0123456789abcdef" * 2


class Participant:
    """One storage's view of a directory, without the pages."""

    def __init__(self, paths: StorePaths):
        self.paths = paths
        self.feed = ChangeFeed(paths, random_writer())
        self.counter = self.feed.counter
        self.bundle_set = BundleSet(NAMESPACE, self.feed)

    def publish(self, *, announce: bool = True) -> BundleName:
        name = BundleName(self.feed.writer, self.feed.next_sequence(NAMESPACE), 10, 1, 7)
        path = Path(self.bundle_set.directory, str(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.bundle_set.add([self.bundle_set.bundle(name)])
        self.feed.queue(NAMESPACE, [Added(name)])
        if announce:
            self.feed.announce()
        return name

    def remove(self, name: BundleName) -> None:
        bundle = self.bundle_set.bundles[name.id]
        os.unlink(bundle.path)
        self.bundle_set.remove([bundle.id])
        self.feed.queue(NAMESPACE, [Removed(name.id)])
        self.feed.announce()

    def sees(self) -> set[BundleName]:
        self.bundle_set.catch_up(self.feed.read())
        return {bundle.name for bundle in self.bundle_set.bundles.values()}


@pytest.fixture(params=[False, True], ids=["local", "asks_server"])
def party(request, tmp_path):
    paths = StorePaths(str(tmp_path), asks_server=request.param)
    paths.create()
    return lambda: Participant(paths)


@pytest.fixture
def listings(monkeypatch):
    """The listings of directories of bundles."""
    listed, real = [], StorePaths.list_names

    def counting(self, path):
        listed.extend([path] if path.endswith("/bundles") else [])
        return real(self, path)

    monkeypatch.setattr(StorePaths, "list_names", counting)
    return listed


def test_events_are_told_without_listing_the_bundles(party, listings, monkeypatch):
    """By the cursor, or where these are too many by the log, which goes on in another file."""
    monkeypatch.setattr(events_module, "SEGMENT_EVENTS", 16)
    a, b = party(), party()
    names = {a.publish()}
    assert b.sees() == names
    listings.clear()
    for turn in (3, 100, *range(20)):
        names |= {a.publish() for _ in range(turn)}
        a.remove(gone := min(names, key=lambda name: name.sequence))
        names.discard(gone)
        assert b.sees() == names
    assert listings == []
    assert len(a.feed.logs.segments(NAMESPACE)) == 19


def log_of(party) -> Path:
    (path,) = Path(party.paths.events(NAMESPACE)).iterdir()
    return path


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: flip(path, path.stat().st_size // 2),
        lambda path: path.write_bytes(b""),
    ],
    ids=["gone", "cut", "flipped", "empty"],
)
def test_who_finds_a_gap_in_a_log_lists(party, listings, damage):
    a, b = party(), party()
    b.sees()
    names = {a.publish() for _ in range(30)}
    damage(log_of(a))
    listings.clear()
    assert b.sees() == names
    assert len(listings) == 1
    # What was damaged is behind, and the log is of use again.
    names |= {a.publish() for _ in range(30)}
    assert b.sees() == names
    names |= {a.publish() for _ in range(30)}
    assert b.sees() == names
    assert len(listings) <= 2


def test_a_log_that_cannot_be_written_fails_nothing(party, listings):
    a, b = party(), party()
    names = {a.publish()}
    assert b.sees() == names
    with failing("pwrite", errno.ENOSPC) as hits:
        names |= {a.publish() for _ in range(60)}
    assert hits
    assert b.sees() == names
    names |= {a.publish() for _ in range(20)}
    listings.clear()
    assert b.sees() == names


def test_what_an_announcement_that_failed_has_logged_is_not_logged_twice(party, listings):
    a, b = party(), party()
    names = {a.publish()}
    assert b.sees() == names
    listings.clear()
    names |= {a.publish(announce=False) for _ in range(60)}
    sizes = set[int]()
    with failing("rename", errno.ENOSPC):
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                a.feed.announce()
            sizes.add(log_of(a).stat().st_size)
    assert len(sizes) == 1
    assert len(b.sees()) == 1
    names |= {a.publish() for _ in range(20)}
    assert b.sees() == names
    assert listings == []


def test_logs_of_bundles_that_are_gone_are_removed(party, monkeypatch):
    monkeypatch.setattr(events_module, "SEGMENT_EVENTS", 16)
    a, b = party(), party()
    names = [a.publish() for _ in range(64)]
    assert b.sees() == set(names)
    for name in names[:40]:
        a.remove(name)
    for side in (a, b):
        side.sees()
        side.bundle_set.collect_logs(side.feed.read())
    # 2 and 3 tell of bundles that are there, and 6 is the one that is written to.
    assert {number for _, number in a.feed.logs.segments(NAMESPACE)} | {6} == {2, 3, 6}
    names.append(a.publish())
    assert b.sees() == set(names[40:])
    assert party().sees() == set(names[40:])


def test_a_removal_by_a_second_writer_counts_though_its_cursor_is_read_first(party):
    # Whichever of the two cursors is listed first, the third storage must not report the bundle.
    for _ in range(20):
        a, b, c = party(), party(), party()
        c.sees()
        name = a.publish()
        assert name in b.sees()
        b.remove(name)
        assert name not in c.sees()


def age(path: Path, monkeypatch, seconds: float) -> None:
    """Make a file look as if it had changed so long ago; its ctime cannot be set."""
    real = os.stat

    def older(target, *args, **kwargs):
        found = real(target, *args, **kwargs)
        if str(target) == str(path):
            return os.stat_result(
                list(found), {"st_ctime_ns": found.st_ctime_ns - int(seconds * 1e9)}
            )
        return found

    monkeypatch.setattr(os, "stat", older)


def test_cursors_of_idle_writers_are_retired(party, listings, monkeypatch):
    monkeypatch.setattr(feed_module, "MANY_CURSORS", 3)
    silent, knows, others = party(), party(), [party() for _ in range(3)]
    gone, *some = [silent.publish() for _ in range(3)]
    assert knows.sees() == others[0].sees() == {gone, *some}
    names = {*some, silent.publish()}
    others[0].remove(gone)
    (cursor,) = Path(silent.paths.writers).glob(f"*.{silent.feed.writer}.*")
    names |= {other.publish() for other in others}
    last = party()
    stranger = Path(last.paths.writers) / "not-a-cursor"
    stranger.touch()
    last.feed.retire_idle_cursors(ServerClock())
    assert cursor.exists()
    age(cursor, monkeypatch, 2 * feed_module.IDLE_WRITER_SECONDS)
    last.feed.retire_idle_cursors(ServerClock())
    assert not cursor.exists()
    assert stranger.exists()
    listings.clear()
    names |= {others[0].publish()}
    # Also the events of the retired cursor that it had not read.
    assert knows.sees() == names
    assert len(listings) == 1
    # A new storage finds its bundles, and has nothing to announce.
    fresh = party()
    monkeypatch.setattr(
        fresh.feed, "announce", lambda **_: pytest.fail("announced events that every storage knows")
    )
    assert fresh.sees() == names
    # The idle writer goes on, and makes a new cursor; what was known before is not new.
    listings.clear()
    names |= {silent.publish()}
    assert knows.sees() == names
    assert listings == []


def test_a_file_that_came_and_was_to_go_since_the_last_look_is_counted(party):
    a, killed, knows = party(), party(), party()
    first = a.publish()
    assert knows.sees() == {first}
    name = a.publish()
    # Killed before it could unlink the file.
    killed.feed.announce_removal(NAMESPACE, [name.id], lambda: None)
    assert knows.sees() == {first}
    assert knows.bundle_set.leaving_bytes() == name.size


def test_a_file_whose_removal_was_announced_last_is_nobodys(party, monkeypatch):
    monkeypatch.setattr(feed_module, "MANY_CURSORS", 1)
    a, killed, knows, last = party(), party(), party(), party()
    name, other = a.publish(), a.publish()
    assert knows.sees() == {name, other}
    # Killed before it could unlink the file.
    killed.feed.announce_removal(NAMESPACE, [name.id], lambda: None)
    (cursor,) = Path(a.paths.writers).glob(f"*{killed.feed.writer}*")
    age(cursor, monkeypatch, 2 * feed_module.IDLE_WRITER_SECONDS)
    last.feed.retire_idle_cursors(ServerClock())
    assert cursor.exists()
    file = Path(a.bundle_set.directory, str(name))
    assert file.exists()
    assert knows.sees() == {other}
    assert knows.bundle_set.leaving_bytes() == name.size
    # A process that lists removes it.
    assert party().sees() == {other}
    assert not file.exists()
    assert knows.bundle_set.leaving_bytes() == 0
    last.feed.retire_idle_cursors(ServerClock())
    assert not cursor.exists()
    assert party().sees() == knows.sees() == {other}


def test_a_retired_cursor_goes_with_the_last_bundle_of_its_writer(party):
    a, b = party(), party()
    name, other = a.publish(), b.publish()
    retired = Path(a.paths.retired)
    retired.mkdir()
    for path in Path(a.paths.writers).iterdir():
        if parse_cursor(path.name):
            path.rename(retired / path.name)
    c = party()
    assert c.sees() == {name, other}
    c.remove(name)
    c.bundle_set.collect_logs(c.feed.read())
    assert [parse_cursor(path.name).writer for path in retired.iterdir()] == [other.writer]


@pytest.mark.parametrize("asks_server", [False, True])
def test_the_counter_changes_with_every_advance(tmp_path, asks_server):
    path = tmp_path / "stamp"
    path.mkdir()
    counter, other = (ChangeCounter(str(path), asks_server=asks_server) for _ in range(2))
    seconds = set()
    for _ in range(300):
        other.advance()
        seconds.add(counter.read().mtime_ns // 1_000_000_000)
    # Also where times are kept in whole seconds, of 31 bits.
    assert len(seconds) == 300
    assert all(0 < second < 2**31 for second in seconds)
    assert counter.read() == other.read()


def test_a_counter_of_another_owner_is_replaced(tmp_path):
    path = tmp_path / "stamp"
    path.mkdir()
    counter, other = (ChangeCounter(str(path), asks_server=False) for _ in range(2))
    seen = {other.read()}
    with failing("utime", errno.EPERM, when=lambda target: target == str(path)):
        for _ in range(2):
            counter.advance()
            seen.add(other.read())
    assert len(seen) == 3
    assert os.listdir(tmp_path) == ["stamp"]


def test_a_reader_confirms_the_counter_of_a_writer_killed_before_it_advanced_it(party, monkeypatch):
    a, b = party(), party()
    a.publish()
    assert len(b.sees()) == 1
    with monkeypatch.context() as killed:
        killed.setattr(a.counter, "advance", lambda value: None)
        last = a.publish()
    assert last not in b.sees()
    # A page that the third storage reports, the others must find too.
    assert last in party().sees()
    assert last in b.sees()


def test_who_has_read_the_former_value_takes_no_cursor_before_it_is_confirmed(party, monkeypatch):
    a, b, c = party(), party(), party()
    first = a.publish()
    c.sees()
    former = c.counter.read()
    with monkeypatch.context() as killed:
        killed.setattr(a.counter, "advance", lambda value: None)
        a.publish()
    b.publish()
    seen = []

    def meanwhile():
        with monkeypatch.context() as late:
            late.setattr(c.counter, "read", lambda: former)
            seen.append(c.feed.read().of(NAMESPACE)[first.writer].sequence)

    monkeypatch.setattr(c.counter, "advance", meanwhile)
    c.feed.read()
    assert seen == [first.sequence]


def test_a_cursor_whose_counter_value_was_seen_needs_no_other(party, monkeypatch):
    a, b = party(), party()
    a.publish()
    b.sees()
    monkeypatch.setattr(
        b.counter, "advance", lambda value=None: pytest.fail("advanced the counter")
    )
    for _ in range(5):
        assert a.publish() in b.sees()


@pytest.mark.parametrize(
    ("event", "read"),
    [
        (Found(BundleName("../../../b", 1, 10, 1, 7)), [Unlisted()]),
        (Found(BundleName("b" * 10, 1, 1 << 45, 1, 7)), [Unlisted()]),
        (Added(BundleName("a" * 10, 1, 1 << 45, 1, 7)), [Unlisted()]),
    ],
    ids=["path", "length found", "length added"],
)
def test_an_event_log_names_no_file_that_no_listing_would(party, event, read):
    a = party()
    a.feed.logs.append(NAMESPACE, "a" * 10, 1, [event])
    assert a.feed.logs.since(NAMESPACE, "a" * 10, 0, 1) == read


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
