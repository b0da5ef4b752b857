"""Concurrent removals and replacements of one bundle: nothing is lost, nothing comes back."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from hicache_backends.file import bundle_set as bundle_set_module
from hicache_backends.file import publisher as publisher_module
from hicache_backends.file import rewriter as rewriter_module
from hicache_backends.file.bundle import BundleId, Claim, parse_bundle
from hicache_backends.file.paths import ProcessId
from hicache_storage.spec import RemovalReason
from tests.backends.file.harness import (
    Rig,
    at_steps,
    bundle_bytes,
    chain,
    counted,
    interrupted,
    replaced,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.file.page_index import PageIndex

KEYS = chain("k", 3)


def test_pages_that_stay_are_found_at_every_step_of_a_rewrite(rig):
    a, knows = rig(), rig()
    a.put(KEYS)
    assert knows.holds(KEYS)

    def look(step):
        # One that has to list, one that knows the bundle, and one that knows it and has no file
        # open.
        assert rig().holds(KEYS[1:]), step
        knows.store.descriptors.close()
        assert knows.present(KEYS[1:]) == [True, True], step
        assert knows.holds(KEYS[1:]), step

    with at_steps(look, within="/bundles/") as steps:
        assert a.storage.delete(KEYS[:1]) == [True]
    assert len(steps) == 6
    assert [rig().present(KEYS), knows.present(KEYS)] == [[False, True, True]] * 2


@pytest.mark.parametrize(("at", "wins"), [(0, True), (1, False)], ids=["copied", "claimed"])
def test_of_two_who_replace_a_bundle_the_first_to_claim_it_wins(rig, monkeypatch, at, wins):
    monkeypatch.setattr(rewriter_module, "WAIT_SECONDS", 0.0)
    a, b, deleted = rig(), rig(), []
    a.put(KEYS)
    assert b.holds(KEYS)

    def look(step):
        if step == at:
            deleted.extend(b.storage.delete(KEYS[1:2]))
        # What a loser has prepared is never seen.
        assert rig().present(KEYS[1:2]) == [not wins], step

    with at_steps(look, within="/bundles/") as steps:
        assert a.storage.delete(KEYS[:1]) == [True]
    assert deleted == [wins]
    assert len(steps) > 2
    for side in (a, b, rig()):
        assert side.present(KEYS) == [False, not wins, True]


@pytest.mark.parametrize("by", ["delete", "eviction"])
@pytest.mark.parametrize("later", [12, 80])
def test_a_bundle_that_is_removed_before_it_is_announced_stays_gone_for_others(rig, later, by):
    a, b, knows = rig(), rig(), rig()
    # More than once: the writer is trusted to have announced all that a listing has shown.
    for number in range(4):
        a.put(chain(f"before {number}", 1))
        for side in (b, knows):
            side.hit(KEYS)
    readers = [a, b, knows]

    def delete():
        # The writer is held up for so long that another takes it for killed, finds the bundle by a
        # listing, and removes it.
        b.bundle_set.invalidate()
        if by == "delete":
            assert b.storage.delete(KEYS) == [True] * 3
        else:
            assert b.hit(KEYS) == 3
            bundle = b.page_index.pages[KEYS[0]][0]
            assert b.store.publisher.remove(b.bundle_set, [bundle], RemovalReason.EVICTED) == [True]
        readers.append(rig())
        for reader in readers[1:]:
            assert reader.present(KEYS) == [False] * 3

    with interrupted(a.store.feed, "announce", delete):
        a.put(KEYS)
    # Behind by more events than a cursor's name holds, others read the event log.
    for number in range(later):
        a.put(chain(f"later {number}", 1))
    for reader in readers:
        assert reader.present(KEYS) == [False] * 3
    assert knows.put(KEYS) == [True] * 3
    assert rig().holds(KEYS)


def test_a_bundle_is_found_here_no_earlier_than_elsewhere(rig):
    a, b, seen = rig(), rig(), []
    a.put(chain("other", 1))
    b.hit(KEYS)
    with interrupted(a.store.feed, "announce", lambda: seen.extend([a.hit(KEYS), b.hit(KEYS)])):
        a.put(KEYS)
    assert seen == [0, 0]
    assert a.holds(KEYS)
    assert b.holds(KEYS)


def test_a_bundle_that_is_renamed_past_a_long_listing_is_found(rig, monkeypatch):
    monkeypatch.setattr(bundle_set_module, "ATOMIC_LISTING_BYTES", 0)
    a, b = rig(), rig()
    a.put(KEYS)
    assert b.holds(KEYS)
    (path,) = a.bundles()
    claimed_elsewhere(path)
    b.store.descriptors.close()
    # The second one has passed the new name, and the old one is gone.
    listings = [[path.name], []]

    def listed(real):
        def names(where):
            return listings.pop(0) if listings and where == str(path.parent) else real(where)

        return names

    with replaced(b.store.paths, "list_names", listed):
        b.catch_up(listing=True)
        assert b.present(KEYS) == [True] * 3
    assert not listings


def test_a_page_that_was_found_by_listing_is_synced_and_found_by_everybody(rig):
    a, b, c = rig(), rig(fsync=True), rig()
    a.put(chain("other", 1))
    for side in (b, c):
        side.hit(KEYS)

    def find():
        b.bundle_set.invalidate()
        with counted("fsync", "/bundles") as synced:
            assert b.holds(KEYS)
        assert synced
        assert c.holds(KEYS)

    with interrupted(a.store.feed, "announce", find):
        assert a.put(KEYS) == [True] * 3


def test_new_bundles_are_added_before_old_ones_are_removed(rig):
    a, b = rig(), rig()
    a.put(KEYS)
    b.hit(KEYS)
    seen = []

    def look():
        seen.append(f"removed, {len(b.page_index.pages)} pages left")

    a.storage.delete(KEYS[:1])
    b.bundle_set.invalidate()
    with (
        interrupted(b.bundle_set, "on_added", lambda: seen.append("added")),
        interrupted(b.bundle_set, "on_removed", look, late=True),
    ):
        assert b.hit(KEYS[1:]) == 2
    assert seen == ["added", "removed, 2 pages left"]


def rewritten_whenever_opened(a: Rig, b: Rig, keys: list[str]):
    """One storage takes a page out of a bundle whenever the other is about to read its index."""
    left = list(keys)

    def make(real):
        def opened(path, *args):
            if path.endswith((".bundle", ".claimed")) and left:
                assert a.storage.delete([left.pop(0)]) == [True]
            return real(path, *args)

        return opened

    return replaced(b.store.descriptors, "open", make)


def test_pages_whose_bundle_is_rewritten_again_and_again_are_found(rig):
    a, b, keys = rig(), rig(), chain("k", 40)
    assert b.hit(keys) == 0
    a.put(keys)
    with rewritten_whenever_opened(a, b, keys[:30]):
        b.bundle_set.invalidate()
        assert b.present(keys[30:]) == [True] * 10
    assert b.stats().pages_missed == b.storage.get_stats().faults == 0


def test_misses_for_want_of_replacements_are_counted_as_a_fault(rig, monkeypatch):
    """A bundle that was replaced faster than a call could read the replacements was dropped, and
    its pages were misses that nobody counted."""
    monkeypatch.setattr(bundle_set_module, "MAX_RELISTS", 1)
    monkeypatch.setattr(bundle_set_module, "MAX_CATCH_UPS", 4, raising=False)
    a, b, keys = rig(), rig(), chain("k", 40)
    a.put(keys)
    assert b.hit(keys) == 40
    with rewritten_whenever_opened(a, b, keys[1:30]):
        assert a.storage.delete(keys[:1]) == [True]
        assert b.hit(keys[30:]) == 0
        assert b.storage.get_stats().faults == 1
    assert b.hit(keys[30:]) == 10
    assert b.holds(keys[30:])


def test_a_clear_in_the_middle_of_a_clear(rig):
    a, b = rig(), rig()
    a.put(KEYS)

    def meanwhile(clear_listed):
        def clear(page_indexes, call):
            rig().storage.clear()
            # Another thread of this storage was about to read the bundle's index.
            page_indexes[0].read_indexes(lambda: False)
            return clear_listed(page_indexes, call)

        return clear

    with replaced(b.storage, "_clear_listed", meanwhile):
        b.storage.clear()
    for side in (a, b, rig()):
        assert side.present(KEYS) == [False] * 3
        assert side.get(KEYS) == [None] * 3


def test_an_unlink_that_hangs_keeps_nobody_else(rig, monkeypatch):
    a, others, fresh = rig(), chain("other", 3), chain("fresh", 3)
    a.put(KEYS)
    a.put(others)
    hangs, go_on, real = threading.Event(), threading.Event(), os.unlink

    def unlink(path):
        if "/bundles/" in str(path):
            hangs.set()
            assert go_on.wait(30)
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    with ThreadPoolExecutor(2) as threads:
        deleting = threads.submit(a.storage.delete, KEYS)
        try:
            assert hangs.wait(30)
            going_on = threads.submit(
                lambda: [a.hit(others), a.put(fresh), a.holds(fresh), a.holds(others)]
            )
            assert going_on.result(30) == [3, [True] * 3, True, True]
        finally:
            go_on.set()
        deleting.result(30)
    assert a.present(KEYS) == rig().present(KEYS) == [False] * 3
    assert a.holds(others)


def claimed_elsewhere(path: Path) -> Path:
    """Claim a bundle in the name of a process of another machine."""
    claim = Claim(ProcessId("zzzzzzzz", 1, 1), BundleId("b" * 10, 1))
    claimed = path.with_name(str(structs.replace(parse_bundle(path.name), claim=claim)))
    path.rename(claimed)
    return claimed


def test_a_bundle_that_is_claimed_when_its_removal_begins_is_not_removed(rig):
    a, claims = rig(), list[Path]()
    a.put(KEYS)
    bundles = list(a.bundle_set.bundles.values())

    def claim() -> None:
        claims.append(claimed_elsewhere(*a.bundles()))
        # Another thread of this storage lists, and learns the new name.
        a.catch_up(listing=True)

    with interrupted(a.store.feed, "announce", claim):
        assert a.store.publisher.remove(a.bundle_set, bundles, RemovalReason.EVICTED) == [False]
    assert claims[0].exists()


def test_what_another_machine_has_claimed_is_read_and_waited_for(rig, monkeypatch):
    a = rig()
    a.put(KEYS)
    claimed = claimed_elsewhere(a.bundles()[0])
    a.store.descriptors.close()
    for side in (a, rig()):
        assert side.holds(KEYS)
    monkeypatch.setattr(rewriter_module, "WAIT_SECONDS", 0.0)
    assert a.storage.delete(KEYS[:1]) == [False]
    assert claimed.exists()
    assert a.holds(KEYS)
    monkeypatch.setattr(publisher_module, "ABANDONED_SECONDS", -1.0)
    assert a.storage.delete(KEYS[:1]) == [True]
    for side in (a, rig()):
        assert side.present(KEYS) == [False, True, True]
        assert side.holds(KEYS[1:])


def test_others_are_evicted_instead_of_what_another_machine_has_claimed(rig, monkeypatch):
    a = rig(capacity=4 * bundle_bytes(8) + 100)
    batches = [chain(str(number), 8) for number in range(16)]
    for batch in batches[:3]:
        assert a.put(batch) == [True] * 8
    (oldest,) = [path for path in a.bundles() if parse_bundle(path.name).sequence == 1]
    claimed = claimed_elsewhere(oldest)
    for batch in batches[3:10]:
        assert a.put(batch) == [True] * 8
        used = sum(path.stat().st_size for path in a.bundles_path.iterdir())
        assert used <= a.store.capacity.limit
    assert claimed.exists()
    assert a.holds(batches[0])
    assert a.holds(batches[9])
    # Nobody does anything with it any more: it goes as any other.
    monkeypatch.setattr(publisher_module, "ABANDONED_SECONDS", -1.0)
    for batch in batches[10:]:
        assert a.put(batch) == [True] * 8
    assert not claimed.exists()


@pytest.mark.parametrize("left", [0, 1], ids=["removed", "replaced"])
@pytest.mark.parametrize("by", ["this storage", "another"])
def test_deleted_pages_stay_deleted_where_a_replacement_goes_at_once(rig, monkeypatch, by, left):
    """The bundle that it replaced must be gone by then: it holds the pages of both deletes. Another
    storage has learnt of the replacement from the feed."""
    a, b, keys = rig(), rig(), chain("a", 4)
    a.put(keys)
    assert b.present(keys) == [True] * 4
    before, seen = a.bundles(), []

    def make(step):
        def run(*arguments, **options):
            answer = None if by == "this storage" else step(*arguments, **options)
            if not seen and {*a.bundles()} - {*before}:
                seen.append(None)
                other = a if by == "this storage" else b
                seen.append(other.storage.delete(keys[1 : 4 - left]))
                a.bundle_set.invalidate()
                seen.append((a if by == "this storage" else rig()).present(keys))
            return step(*arguments, **options) if by == "this storage" else answer

        return run

    # Steps after the replacement is in place.
    monkeypatch.setattr(a.store.feed, "announce", make(a.store.feed.announce))
    if by == "this storage":
        monkeypatch.setattr(a.bundle_set, "remove_files", make(a.bundle_set.remove_files))
    assert a.storage.delete(keys[:1]) == [True]
    there = [False] * (4 - left) + [True] * left
    assert seen[1:] == [[True] * (3 - left), there]
    assert [one.present(keys) for one in (a, b, rig())] == [there] * 3


def test_a_delete_beside_a_removal_that_does_not_succeed(rig):
    """Another storage claims the bundle whose removal is announced, and keeps the page."""
    a, b = rig(), rig()
    a.put(KEYS)
    assert b.hit(KEYS) == 3
    bundle, announced = a.page_index.pages[KEYS[0]][0], threading.Event()

    def claim(step: int) -> None:
        if step == 0:
            announced.set()
            # Time for the delete, which has to wait for the removal to end.
            looked.wait(0.2)
            # It has not heard of the removal.
            known = b.page_index.pages[KEYS[0]][0]
            b.store.rewriter.drop(b.page_index, known, KEYS[:1], RemovalReason.DELETED)

    def remove() -> list[bool | OSError]:
        with at_steps(claim, ("unlink",), within="/bundles/"):
            return a.store.publisher.remove(a.bundle_set, [bundle], RemovalReason.EVICTED)

    def make(real):
        def drop_all(page_index: PageIndex, find: Callable, reason: RemovalReason) -> None:
            removing.append(thread.submit(remove))
            assert announced.wait(30)
            real(page_index, lambda: (looked.set(), find())[1], reason)

        return drop_all

    removing, looked = list[Future](), threading.Event()
    with ThreadPoolExecutor(1) as thread, replaced(a.store.rewriter, "drop_all", make):
        assert a.storage.delete(KEYS[1:2]) == [True]
    assert removing[0].result() == [False]
    for side in (a, b, rig()):
        assert side.present(KEYS) == [False, False, True]
