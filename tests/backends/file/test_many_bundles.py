"""A store of many bundles is read in steps, each within the deadline of a call."""

from __future__ import annotations

import os
import shutil
import threading

import pytest

from hicache_backends.file import page_index as page_index_module
from hicache_backends.file.bundle import parse_bundle
from hicache_storage.objects import Call
from tests.backends.file.harness import Rig, chain, counted, interrupted

BUNDLES = 30


def fill(rig: Rig, *, logged: bool) -> list[str]:
    """Many small bundles, whose indexes an event log has or has not."""
    keys = chain("k", BUNDLES)
    for key in keys:
        assert rig.put([key]) == [True]
    if not logged:
        shutil.rmtree(rig.store.paths.events(rig.namespace))
    return keys


class Deadline(Call):
    """Passes after so many looks at it."""

    def __init__(self, looks: int):
        super().__init__()
        self.looks = looks

    def expired(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(page_index_module, "BUNDLES_PER_STEP", 4)
    monkeypatch.setattr(page_index_module, "MANY_UNREAD", 8)


def test_a_call_ends_at_its_deadline_and_the_next_one_goes_on(rig):
    keys = fill(rig(), logged=False)
    b, found = rig(), list[int]()
    b.storage.open()
    while not found or found[-1] < BUNDLES:
        found.append(sum(b.look_up(keys, Deadline(2))))
    assert found == [8, 16, 24, 30]
    assert b.holds(keys)
    assert b.look_up(keys, Deadline(0)) == [True] * BUNDLES


def test_what_is_not_looked_into_yet_is_counted_and_cleared(rig):
    a = rig()
    keys = fill(a, logged=False)
    b = rig(capacity="1GiB")
    b.storage.open()
    assert sum(b.look_up(keys, Deadline(1))) == 4
    assert b.bundle_set.used == sum(path.stat().st_size for path in a.bundles())
    b.storage.clear()
    assert a.bundles() == []
    for side in (a, b, rig()):
        assert side.hit(keys) == 0


def test_a_delete_that_could_not_look_everywhere_says_so(rig, monkeypatch):
    a = rig()
    keys = fill(a, logged=False)
    b = rig()
    b.storage.open()
    with monkeypatch.context() as patch:
        # Not yet when the call begins.
        begins = iter([False])
        patch.setattr(Call, "expired", lambda self: next(begins, True))
        assert b.storage.delete(keys[:1]) == [False]
    assert b.storage.get_stats().faults == 1
    assert b.storage.delete(keys[:1]) == [True]
    for side in (a, b, rig()):
        assert side.present(keys[:2]) == [False, True]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_of_two_copies_the_newer_one_counts_in_whatever_order_they_are_read(rig, order):
    a, keys = rig(), chain("k", 2)
    for version in range(3):
        a.put_again(keys, version)
    hidden = {path: path.with_suffix(".hidden") for path in a.bundles()}
    age = {path: parse_bundle(path.name).created_us for path in hidden}
    for path, aside in hidden.items():
        path.rename(aside)
    b = rig()
    for number in order:
        path = sorted(hidden, key=age.get)[number]
        hidden[path].rename(path)
        b.bundle_set.invalidate()
        assert b.hit(keys) == 2
    assert b.versions(keys, range(3)) == [2, 2]
    copies = [bundle.name.created_us for bundle, _ in b.page_index.copies(keys[0])]
    assert copies == sorted(age.values(), reverse=True)


@pytest.mark.parametrize("opened", [True, False], ids=["behind", "opened later"])
def test_the_log_tells_what_is_in_small_bundles(rig, opened):
    a, b = rig(), rig()
    if opened:
        assert b.hit(["x"]) == 0
    keys = fill(a, logged=True)
    with counted("open", ".bundle") as read:
        assert b.hit(keys) == BUNDLES
    # The last few are in the cursor's name alone.
    assert len(read) < 8
    assert b.holds(keys)
    # Deletes and rewrites are told of in the log too.
    assert a.storage.delete(keys[::2]) == [True] * (BUNDLES // 2)
    assert b.present(keys) == [False, True] * (BUNDLES // 2)
    assert b.holds(keys[1::2])


def test_a_thread_that_hangs_in_an_index_keeps_no_other_past_its_deadline(rig, monkeypatch):
    keys = fill(rig(), logged=False)
    b, real = rig(), os.pread
    b.storage.open()
    hangs, go_on = threading.Event(), threading.Event()
    first = threading.get_ident()

    def hang(*args):
        if threading.get_ident() != first and not hangs.is_set():
            hangs.set()
            assert go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(os, "pread", hang)
    thread = threading.Thread(target=lambda: b.hit(keys))
    thread.start()
    try:
        assert hangs.wait(60)
        found = b.look_up(keys, Deadline(50))
        # All but those that the other one is at.
        assert BUNDLES - 8 <= sum(found) < BUNDLES
        # It may be in what the other one is at.
        assert b.put(["new"], seconds=0.1) == [False]
    finally:
        go_on.set()
        thread.join(60)
    assert b.hit(keys) == BUNDLES
    assert b.holds(keys)


def test_what_another_thread_leaves_unread_is_no_answer_from_memory(rig):
    """Between two looks of a lookup without I/O another thread takes in bundles, and its deadline
    passes."""
    keys = fill(rig(), logged=False)
    b = rig()
    b.storage.open()
    assert b.look_up(["other"], Call()) == [False]
    page_index = b.page_index
    more = chain("more", 4)
    assert rig().put(more) == [True] * 4
    snapshot = b.store.feed.read()
    with interrupted(
        page_index.bundle_set, "is_current", lambda: page_index.catch_up(snapshot, lambda: True)
    ):
        assert not page_index.is_current(snapshot)
    assert not page_index.complete
    assert b.look_up([*keys, *more], Call()) == [True] * (BUNDLES + 4)
