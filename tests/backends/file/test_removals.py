"""Removals: what a storage reports of its own and of others, and what the store remembers."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from hicache_backends.file import removal_history
from hicache_storage.objects import Call, LookupBatch
from hicache_storage.spec import RemovalReason
from tests.backends.file.harness import (
    Rig,
    bundle_bytes,
    chain,
    failing,
    flip,
    interrupted,
)
from tests.support.waiting import eventually

EVICTED, DELETED, CLEARED, DAMAGED, UNKNOWN = RemovalReason


class FileListener:
    """The removals of a rig, from now on."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.cursor = rig.storage.removals().cursor
        assert self.cursor

    def hear(self) -> dict[str, RemovalReason]:
        """The reasons of the removals since the last call, by key."""
        answer = self.rig.storage.removals(self.cursor)
        assert not answer.lost
        self.cursor = answer.cursor
        reasons = {one.key: one.reason for one in answer.removed}
        assert len(reasons) == len(answer.removed)
        assert not any(self.rig.present(list(reasons)))
        for one in answer.removed:
            known = one.reason is not UNKNOWN
            assert (abs(one.seconds - time.time()) < 60, str(os.getpid()) in one.by) == (known,) * 2
        return reasons


def remembered(rig: Rig, keys: list[str]) -> list[tuple[str, RemovalReason]]:
    rig.storage.open()
    found = rig.storage.recall_removals([LookupBatch(rig.kv, keys)], Call())
    return [(one.key, one.reason) for one in found]


def all_of(keys: list[str], reason: RemovalReason) -> dict[str, RemovalReason]:
    return dict.fromkeys(keys, reason)


def test_pages_that_are_found_damaged(rig):
    a, b, keys = rig(), rig(), chain("a", 6)
    a.put(keys)
    own, others = FileListener(a), FileListener(b)
    flip(a.bundles()[0], 2 * a.page_bytes)
    assert a.versions(keys) == [0, 0, None, 0, 0, 0]
    assert own.hear() == {keys[2]: DAMAGED}
    assert others.hear() == {keys[2]: UNKNOWN}
    a.storage.delete([keys[0]])
    assert own.hear() == {keys[0]: DELETED}
    for one in (a, b):
        assert set(remembered(one, keys)) == {(keys[0], DELETED), (keys[2], DAMAGED)}


def test_a_copy_of_a_page_that_stays_keeps_it(rig):
    a, keys = rig(), chain("a", 3)
    a.put(keys)
    a.put_again(keys[:1], version=1)
    own = FileListener(a)
    [first, _] = sorted(a.bundles(), key=lambda path: -path.stat().st_size)
    a.store.publisher.remove(
        a.bundle_set,
        [one for one in a.bundle_set.bundles.values() if one.path == str(first)],
        EVICTED,
    )
    assert own.hear() == all_of(keys[1:], EVICTED)


def test_pages_that_another_removes_before_they_are_announced(rig):
    a, b, keys = rig(), rig(), chain("a", 3)
    a.put(chain("b", 1))
    own = FileListener(a)

    def clear():
        b.bundle_set.invalidate()
        b.storage.clear()
        # As another thread of the writer may do.
        a.catch_up()

    with interrupted(a.store.feed, "announce", clear):
        assert a.put(keys) == [True] * 3
    assert own.hear() == all_of([*chain("b", 1), *keys], UNKNOWN)


def test_a_store_that_was_deleted(rig):
    a, keys = rig(), chain("a", 3)
    a.put(keys)
    own = FileListener(a)
    a.delete_store()
    assert own.hear() == all_of(keys, UNKNOWN)
    a.put(keys)
    a.storage.delete(keys)
    assert own.hear() == all_of(keys, DELETED)


def test_an_index_that_is_not_read_in_time_keeps_removals_back(rig, monkeypatch):
    a, b, keys = rig(), rig(), chain("a", 24)
    a.put(keys)
    others, more = FileListener(b), chain("b", 24)
    a.storage.delete(keys[:1])
    a.put(more)
    calls = []

    def expired(call):
        calls.append(None)
        return len(calls) > 1

    with monkeypatch.context() as late:
        late.setattr(Call, "expired", expired)
        assert b.storage.removals(others.cursor).removed == []
    assert len(calls) > 1
    assert others.hear() == {keys[0]: UNKNOWN}


def test_a_store_remembers_removals_for_a_while(rig):
    a, keys = rig(capacity=4 * bundle_bytes(4)), chain("a", 4)
    a.put(keys)
    for number in range(8):
        a.put(chain(f"{number}", 4))
    assert not any(a.present(keys))
    a.storage.close()
    b = rig()
    assert sorted(remembered(b, keys)) == sorted((key, EVICTED) for key in keys)
    b.put(keys)
    b.storage.delete(keys[:2])
    found = b.storage.recall_removals([LookupBatch(b.kv, keys[:1])], Call())
    assert [one.reason for one in found] == [EVICTED, DELETED]
    assert found[0].seconds <= found[1].seconds
    assert remembered(b, chain("never stored", 2)) == []


def test_what_is_remembered_is_written_without_a_further_call(rig):
    a, keys = rig(), chain("a", 2)
    a.put(keys)
    a.storage.delete(keys[:1])
    b = rig()
    assert eventually(lambda: remembered(b, keys)) == [(keys[0], DELETED)]


def test_a_history_is_bounded_and_survives_torn_lines(rig, monkeypatch):
    monkeypatch.setattr(removal_history, "MAX_FILE_BYTES", 4096)
    monkeypatch.setattr(removal_history, "FLUSH_SECONDS", 0.0)
    a, every = rig(), []
    history = Path(a.store.paths.removals(a.namespace))
    for number in range(12):
        keys = chain(f"{number}", 16)
        every += keys
        a.put(keys)
        a.storage.delete(keys)
        a.store.feed.history.flush()
    assert 1 <= len(list(history.iterdir())) <= 2
    assert sum(path.stat().st_size for path in history.iterdir()) < 12 * 1024
    last = max(history.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    with last.open("ab") as file:
        file.write(b'{"seconds": 1.0, "rea')
    a.put(every[:1])
    a.storage.delete(every[:1])
    found = remembered(a, every)
    assert found[-1] == (every[0], DELETED)
    assert set(every[-16:]) <= {key for key, _ in found}
    os.utime(last, (1, 1))
    a.store._collect_logs()
    assert not last.exists()


def test_a_history_that_cannot_be_written_keeps_nobody(rig):
    a, keys = rig(), chain("a", 2)
    a.put(keys)
    with failing("open", errno.EROFS, when=lambda path, *_: "removals" in str(path)) as hits:
        assert a.storage.delete(keys[:1]) == [True]
        a.store.feed.history.flush()
        assert hits
    a.storage.delete(keys[1:])
    a.delete_store()
    a.store.feed.history.flush()
    assert not a.path.exists()
