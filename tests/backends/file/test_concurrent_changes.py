"""Concurrent removals and replacements of one bundle: nothing is lost, nothing comes back."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from hicache_backends.file import bundle_set as bundle_set_module
from hicache_backends.file import page_index as page_index_module
from hicache_backends.file import rewriter as rewriter_module
from hicache_backends.file.bundle import BundleId, Claim, parse_bundle
from hicache_backends.file.events import Found
from hicache_backends.file.paths import ProcessId
from tests.backends.file.harness import Rig, chain
from tests.backends.file.test_processes import FORK

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = chain("k", 3)

REPLACED = 3
"""The step at which the new bundle is there."""


@pytest.fixture
def rigs(tmp_path):
    made = []

    def make() -> Rig:
        made.append(Rig(tmp_path))
        return made[-1]

    yield make
    for rig in made:
        rig.storage.close()


class Steps:
    """Does something before and after each rename and unlink of a bundle; what it does itself is
    left alone."""

    def __init__(self, monkeypatch, between: Callable[[int], None]):
        self.count, self._between, self._thread, self._busy = (
            0,
            between,
            threading.get_ident(),
            False,
        )
        for name in ("rename", "unlink"):
            monkeypatch.setattr(os, name, self._around(getattr(os, name)))

    def _around(self, real):
        def step(*paths):
            if (
                self._busy
                or threading.get_ident() != self._thread
                or "/bundles/" not in str(paths[-1])
            ):
                return real(*paths)
            self._look()
            try:
                return real(*paths)
            finally:
                self._look()

        return step

    def _look(self) -> None:
        self._busy = True
        try:
            self._between(self.count)
        finally:
            self._busy = False
            self.count += 1


def test_pages_that_stay_are_found_at_every_step_of_a_rewrite(rigs, monkeypatch):
    a, knows = rigs(), rigs()
    a.put(KEYS)
    assert knows.holds(KEYS)

    def look(step):
        # One that has to list, one that knows the bundle, and one that knows it and has no file
        # open.
        assert rigs().holds(KEYS[1:]), step
        knows.store.descriptors.close()
        assert knows.present(KEYS[1:]) == [True, True], step
        assert knows.holds(KEYS[1:]), step

    steps = Steps(monkeypatch, look)
    assert a.storage.delete(KEYS[:1]) == [True]
    assert steps.count == 6
    assert [rigs().present(KEYS), knows.present(KEYS)] == [[False, True, True]] * 2


def test_what_a_loser_has_prepared_is_never_seen(rigs, monkeypatch):
    a, b = rigs(), rigs()
    a.put(KEYS)
    assert b.holds(KEYS)
    deleted = []

    def look(step):
        if step == 0:
            # Wins the bundle that the other has already copied.
            deleted.extend(b.storage.delete(KEYS[1:2]))
        assert rigs().present(KEYS[1:2]) == [False], step

    steps = Steps(monkeypatch, look)
    assert a.storage.delete(KEYS[:1]) == [True]
    assert deleted == [True]
    assert steps.count > 2
    assert rigs().present(KEYS) == a.present(KEYS) == b.present(KEYS) == [False, False, True]


@pytest.mark.parametrize("last", range(6))
def test_whoever_is_killed_while_rewriting_loses_nothing_and_leaves_nothing(rigs, tmp_path, last):
    a = rigs()
    a.put(KEYS)
    child = FORK.Process(target=_die_while_deleting, args=(tmp_path, last))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    a.store.descriptors.close()
    b = rigs()
    for rig in (a, b):
        assert rig.holds(KEYS[1:])
    # Neither the claim nor what it was to be replaced by is in the way, and neither comes back.
    assert b.storage.delete(KEYS) == [last < REPLACED, True, True]
    assert a.present(KEYS) == b.present(KEYS) == rigs().present(KEYS) == [False] * 3
    assert list(a.bundles_path.iterdir()) == []


def _die_while_deleting(path: Path, last: int) -> None:
    def between(step: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    rig = Rig(path)
    with pytest.MonkeyPatch.context() as patch:
        Steps(patch, between)
        rig.storage.delete(KEYS[:1])


def test_a_bundle_that_another_removes_before_it_is_announced_does_not_stay(rigs, monkeypatch):
    a, b = rigs(), rigs()
    a.put(chain("other", 1))
    b.hit(KEYS)
    announce = a.store.feed.announce

    def late(*, always_advance=False):
        b.storage.clear()
        # Takes in what the other has told, as another thread of this process may at any time.
        a.store.bundle_sets.get(a.namespace).catch_up(a.store.feed.read())
        announce(always_advance=always_advance)

    with monkeypatch.context() as patch:
        patch.setattr(a.store.feed, "announce", late)
        a.put(KEYS)
    assert a.hit(KEYS) == 0
    assert a.put(KEYS) == [True] * 3
    assert a.holds(KEYS)
    assert b.holds(KEYS)


@pytest.mark.parametrize("later", [12, 80])
def test_a_bundle_that_is_removed_before_it_is_announced_stays_gone_for_others(
    rigs, monkeypatch, later
):
    a, b, knows = rigs(), rigs(), rigs()
    a.put(chain("other", 1))
    for rig in (b, knows):
        rig.hit(KEYS)
    announce, readers = a.store.feed.announce, [knows]

    def late(*, always_advance=False):
        # Held up for so long that another takes the writer for killed, finds the bundle by a
        # listing, and removes it.
        b.store.bundle_sets.get(b.namespace).invalidate()
        assert b.storage.delete(KEYS) == [True] * 3
        readers.append(rigs())
        for reader in (b, *readers):
            assert reader.present(KEYS) == [False] * 3
        announce(always_advance=always_advance)

    with monkeypatch.context() as patch:
        patch.setattr(a.store.feed, "announce", late)
        a.put(KEYS)
    # Behind by more events than a cursor's name holds, others read the event log.
    for number in range(later):
        a.put(chain(f"later {number}", 1))
    for reader in (a, b, *readers):
        assert reader.present(KEYS) == [False] * 3
    assert knows.put(KEYS) == [True] * 3
    assert rigs().holds(KEYS)


def test_a_delete_that_finds_nothing_tells_of_whoever_was_faster(rigs, monkeypatch):
    a, b, knows = rigs(), rigs(), rigs()
    a.put(KEYS)
    assert b.holds(KEYS)
    assert knows.holds(KEYS)
    announce = a.store.feed.announce
    seen = []

    def late(*, always_advance=False):
        if not seen:
            seen.append(None)
            b.storage.delete(KEYS)
            seen.append(knows.present(KEYS))
        announce(always_advance=always_advance)

    monkeypatch.setattr(a.store.feed, "announce", late)
    a.storage.delete(KEYS)
    assert seen == [None, [False] * 3]


def test_a_page_that_was_found_by_listing_is_found_by_everybody(rigs, monkeypatch):
    a, b, c = rigs(), rigs(), rigs()
    a.put(chain("other", 1))
    for rig in (b, c):
        rig.hit(KEYS)
    announce = a.store.feed.announce

    def late(*, always_advance=False):
        b.store.bundle_sets.get(b.namespace).invalidate()
        assert b.holds(KEYS)
        assert c.holds(KEYS)
        announce(always_advance=always_advance)

    monkeypatch.setattr(a.store.feed, "announce", late)
    assert a.put(KEYS) == [True] * 3


def test_a_bundle_that_two_writers_announce_is_added_once(rigs):
    a, b = rigs(), rigs()
    b.hit(KEYS)
    a.put(KEYS)
    (path,) = a.bundles()
    c = rigs()
    c.store.feed.queue(c.namespace, [Found(parse_bundle(path.name))])
    c.store.feed.announce()
    assert b.hit(KEYS) == 3
    a.storage.clear()
    assert b.present(KEYS) == [False] * 3


def test_new_bundles_are_added_before_old_ones_are_removed(rigs):
    a, b = rigs(), rigs()
    a.put(KEYS)
    b.hit(KEYS)
    bundle_set, seen = b.store.bundle_sets.get(b.namespace), []

    class Listener:
        def bundles_added(self, bundles):
            seen.append("added")

        def bundles_removed(self, bundles):
            seen.append("removed")

    listener = Listener()
    bundle_set.listen(listener)
    seen.clear()
    a.storage.delete(KEYS[:1])
    bundle_set.invalidate()
    assert b.hit(KEYS[1:]) == 2
    assert seen == ["added", "removed"]


@contextlib.contextmanager
def rewritten_whenever_opened(a: Rig, b: Rig, keys: list[str]):
    """One storage takes a page out of a bundle whenever the other is about to read its index."""
    left, real = list(keys), b.store.descriptors.open

    def opened(path, *args):
        if path.endswith((".bundle", ".claimed")) and left:
            assert a.storage.delete([left.pop(0)]) == [True]
        return real(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(b.store.descriptors, "open", opened)
        yield


def test_pages_whose_bundle_is_rewritten_again_and_again_are_found(rigs):
    a, b, keys = rigs(), rigs(), chain("k", 40)
    assert b.hit(keys) == 0
    a.put(keys)
    with rewritten_whenever_opened(a, b, keys[:30]):
        b.store.bundle_sets.get(b.namespace).invalidate()
        assert b.present(keys[30:]) == [True] * 10
    assert b.storage.get_stats().faults == 0


def test_misses_for_want_of_replacements_are_counted_as_a_fault(rigs, monkeypatch):
    """A bundle that was replaced faster than a call could read the replacements was dropped, and
    its pages were misses that nobody counted."""
    monkeypatch.setattr(bundle_set_module, "MAX_RELISTS", 1)
    monkeypatch.setattr(bundle_set_module, "MAX_CATCH_UPS", 4, raising=False)
    monkeypatch.setattr(page_index_module, "MAX_RELISTS", 1, raising=False)
    a, b, keys = rigs(), rigs(), chain("k", 40)
    a.put(keys)
    assert b.hit(keys) == 40
    with rewritten_whenever_opened(a, b, keys[1:30]):
        assert a.storage.delete(keys[:1]) == [True]
        assert b.hit(keys[30:]) == 0
        assert b.storage.get_stats().faults == 1
    assert b.hit(keys[30:]) == 10
    assert b.holds(keys[30:])


def test_a_file_gone_under_one_thread_makes_the_others_look_again(rigs, monkeypatch):
    a, b = rigs(), rigs()
    a.put(KEYS)
    assert b.holds(KEYS)
    (page_index,) = b.store.known_page_indexes([b.storage.pools["kv"].namespace])
    reading, waiting, answered = threading.Event(), threading.Event(), threading.Event()
    read_index, take_unread = page_index._read_index, page_index._take_unread
    index = page_index.bundle_set.index

    def read(bundle):
        if not reading.is_set():
            reading.set()
            assert waiting.wait(30)
            # A second rewrite: the bundle that is to be read here has been replaced.
            a.storage.delete(KEYS[1:2])
        return read_index(bundle)

    def take():
        bundles = take_unread()
        if not bundles:
            waiting.set()
        return bundles

    def index_and_stop(expired):
        index(expired)
        if threading.current_thread() is first:
            # The other thread goes on before this one lists the bundles.
            assert answered.wait(30)

    monkeypatch.setattr(page_index, "_read_index", read)
    monkeypatch.setattr(page_index, "_take_unread", take)
    monkeypatch.setattr(page_index.bundle_set, "index", index_and_stop)
    a.storage.delete(KEYS[:1])
    first = threading.Thread(target=b.hit, args=[KEYS[2:]])
    first.start()
    try:
        assert reading.wait(30)
        assert b.hit(KEYS[2:]) == 1
    finally:
        answered.set()
        first.join(30)
    assert b.holds(KEYS[2:])


def test_after_a_listing_a_delete_makes_everyone_list(rigs):
    a, b, c = rigs(), rigs(), rigs()
    a.put(KEYS)
    assert c.hit(KEYS) == 3
    # Somebody has removed it and does not say so.
    a.bundles()[0].unlink()
    assert b.storage.delete(KEYS) == [False] * 3
    assert c.present(KEYS) == [False] * 3
    told = a.store.feed.read().of(a.namespace)[b.store.feed.writer]
    assert b.storage.delete(KEYS) == [False] * 3
    assert a.store.feed.read().of(a.namespace)[b.store.feed.writer] == told


def test_a_file_gone_in_the_middle_of_a_clear_makes_everyone_list(rigs, monkeypatch):
    a, b = rigs(), rigs()
    a.put(KEYS)
    clear_listed = b.storage._clear_listed

    def clear(page_indexes, call):
        (page_index,) = page_indexes
        # Another clear of this storage ends: all storages list, and the bundle is still in place.
        page_index.bundle_set.force_relist()
        b.store.feed.announce()
        assert a.holds(KEYS)
        # A third process clears too, and does not say so yet; another thread of this storage was
        # about to read the bundle's index.
        a.bundles()[0].unlink()
        page_index.read_indexes(lambda: False)
        return clear_listed(page_indexes, call)

    monkeypatch.setattr(b.storage, "_clear_listed", clear)
    b.storage.clear()
    assert a.present(KEYS) == [False] * 3
    assert a.get(KEYS) == [None] * 3


def test_a_delete_that_finds_nothing_makes_others_look(rigs, monkeypatch):
    a, b, knows = rigs(), rigs(), rigs()
    a.put(KEYS)
    for rig in (b, knows):
        assert rig.holds(KEYS)
    seen = []
    moved = a.store.feed._move

    def move(before, after):
        moved(before, after)
        if not seen:
            seen.append(None)
            # Another reason to list the cursors now: the counter is still to be advanced.
            b.store.feed._known = None
            b.storage.delete(KEYS)
            seen.append(knows.present(KEYS))

    monkeypatch.setattr(a.store.feed, "_move", move)
    a.storage.delete(KEYS)
    assert seen == [None, [False] * 3]


def test_an_unlink_that_hangs_keeps_nobody_else(rigs, monkeypatch):
    a = rigs()
    others = chain("other", 3)
    a.put(KEYS)
    a.put(others)
    hangs, go_on, real = threading.Event(), threading.Event(), os.unlink

    def unlink(path):
        if "/bundles/" in str(path):
            hangs.set()
            assert go_on.wait(30)
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    deleting = threading.Thread(target=lambda: a.storage.delete(KEYS))
    deleting.start()
    try:
        assert hangs.wait(30)
        answers = list[object]()
        fresh = chain("fresh", 3)
        going_on = threading.Thread(
            target=lambda: answers.extend(
                [a.hit(others), a.put(fresh), a.holds(fresh), a.holds(others)]
            ),
            daemon=True,
        )
        going_on.start()
        going_on.join(30)
        assert answers == [3, [True] * 3, True, True]
    finally:
        go_on.set()
        deleting.join(30)
    assert a.present(KEYS) == rigs().present(KEYS) == [False] * 3
    assert a.holds(others)


def claimed_elsewhere(path: Path) -> Path:
    """Claim a bundle in the name of a process of another machine."""
    name = parse_bundle(path.name)
    assert name is not None
    claimed = path.with_name(
        str(structs.replace(name, claim=Claim(ProcessId("zzzzzzzz", 1, 1), BundleId("b" * 10, 1))))
    )
    path.rename(claimed)
    return claimed


def test_a_bundle_that_is_claimed_when_its_removal_begins_is_not_removed(rigs, monkeypatch):
    a = rigs()
    a.put(KEYS)
    bundle_set = a.store.bundle_sets.get(a.namespace)
    announce, claims = a.store.feed.announce, list[Path]()

    def late(*, always_advance=False):
        if not claims:
            claims.append(claimed_elsewhere(*a.bundles()))
            # Another thread of this storage lists, and learns the new name.
            bundle_set.invalidate()
            bundle_set.catch_up(a.store.feed.read())
        announce(always_advance=always_advance)

    monkeypatch.setattr(a.store.feed, "announce", late)
    assert a.store.publisher.remove(bundle_set, list(bundle_set.bundles.values())) == [False]
    assert claims[0].exists()


def test_what_another_machine_has_claimed_is_read_and_waited_for(rigs, monkeypatch):
    a = rigs()
    a.put(KEYS)
    claimed = claimed_elsewhere(a.bundles()[0])
    a.store.descriptors.close()
    for rig in (a, rigs()):
        assert rig.holds(KEYS)
    monkeypatch.setattr(rewriter_module, "WAIT_SECONDS", 0.0)
    assert a.storage.delete(KEYS[:1]) == [False]
    assert claimed.exists()
    assert a.holds(KEYS)
    a.store.publisher._abandoned_seconds = -1.0
    assert a.storage.delete(KEYS[:1]) == [True]
    for rig in (a, rigs()):
        assert rig.present(KEYS) == [False, True, True]
        assert rig.holds(KEYS[1:])


def test_others_are_evicted_instead_of_what_another_machine_has_claimed(tmp_path):
    probe = Rig(tmp_path / "probe")
    a = Rig(tmp_path / "store", capacity=4 * probe.bundle_bytes(8) + 100)
    try:
        batches = [chain(str(number), 8) for number in range(10)]
        for batch in batches[:3]:
            assert a.put(batch) == [True] * 8
        (oldest,) = [path for path in a.bundles() if parse_bundle(path.name).sequence == 1]
        claimed = claimed_elsewhere(oldest)
        for batch in batches[3:]:
            assert a.put(batch) == [True] * 8
            assert (
                sum(path.stat().st_size for path in a.bundles_path.iterdir())
                <= a.store.capacity.limit
            )
        assert claimed.exists()
        assert a.holds(batches[0])
        assert a.holds(batches[-1])
        # Nobody does anything with it any more: it goes as any other.
        a.store.publisher._abandoned_seconds = -1.0
        for number in range(10, 16):
            assert a.put(chain(str(number), 8)) == [True] * 8
        assert not claimed.exists()
    finally:
        a.storage.close()
        probe.storage.close()


def test_deleted_pages_stay_deleted_where_a_replacement_is_removed_at_once(rig, monkeypatch):
    """The bundle that it replaced must be gone by then: it holds the pages of both deletes."""
    a, keys = rig(), chain("a", 4)
    a.put(keys)
    before, seen = a.bundles(), []
    bundle_set = a.store.bundle_sets.get(a.namespace)

    def after_another_delete(step):
        def run(*arguments, **options):
            if not seen and {*a.bundles()} - {*before}:
                seen.append(None)
                seen.append(a.storage.delete(keys[1:]))
                bundle_set.invalidate()
                seen.append(a.present(keys))
            return step(*arguments, **options)

        return run

    # Steps after the replacement is in place.
    for where, name in ((bundle_set, "remove_files"), (a.store.feed, "announce")):
        monkeypatch.setattr(where, name, after_another_delete(getattr(where, name)))
    assert a.storage.delete(keys[:1]) == [True]
    assert seen[1:] == [[True] * 3, [False] * 4]
    assert a.present(keys) == [False] * 4


def test_deleted_pages_stay_deleted_where_another_storage_removes_the_replacement(rig, monkeypatch):
    """The other one has learnt of it from the feed, and the bundle that it replaced is still there."""
    a, b, keys = rig(), rig(), chain("a", 4)
    a.put(keys)
    assert b.present(keys) == [True] * 4
    before, seen, announce = a.bundles(), [], a.store.feed.announce

    def then_another_deletes(**options):
        announce(**options)
        if not seen and {*a.bundles()} - {*before}:
            seen.append(None)
            seen.append(b.storage.delete(keys[1:]))
            seen.append(rig().present(keys))

    monkeypatch.setattr(a.store.feed, "announce", then_another_deletes)
    assert a.storage.delete(keys[:1]) == [True]
    assert seen[1:] == [[True] * 3, [False] * 4]
    assert [one.present(keys) for one in (a, b, rig())] == [[False] * 4] * 3


@pytest.mark.long
def test_deletes_of_two_storages_in_many_threads(rig, caplog):
    a, b, other = storages = rig(), rig(), rig()
    for number in range(400):
        chance, keys = random.Random(number), chain(f"r{number}", 6)
        a.put(keys)
        assert b.present(keys) == [True] * 6
        asked = [chance.sample(keys, chance.randint(1, 3)) for _ in range(6)]
        at_once = threading.Barrier(6)

        def deleted(place, asked=asked, at_once=at_once):
            at_once.wait()
            return storages[place % 2].storage.delete(asked[place])

        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(deleted, range(6)))
        gone = [
            key
            for some, done in zip(asked, answers, strict=True)
            for key, ok in zip(some, done, strict=True)
            if ok
        ]
        for one in (a, b, other):
            assert not any(one.present([key])[0] for key in gone)
    assert "Error" not in caplog.text
