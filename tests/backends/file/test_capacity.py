"""The capacity is kept by LRU eviction, tails before heads, and counts every byte once."""

from __future__ import annotations

import errno
import heapq
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicache_backends.file import bundle_set, store, temp_files
from hicache_backends.file import capacity as capacity_module
from hicache_backends.file.events import WriterCursor
from hicache_backends.file.paths import ProcessId
from hicache_backends.file.temp_files import TemporaryName
from tests.backends.file.harness import (
    Rig,
    at_steps,
    bundle_bytes,
    chain,
    counted,
    failing,
    hits,
    interrupted,
    raising,
    replaced,
)
from tests.backends.file.harness import fill as write

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_BYTES = bundle_bytes(8)
HUGE = 1 << 40


def disk_bytes(rig: Rig) -> int:
    """Bytes of the driver's files, as the file system counts them."""
    files = [*rig.path.rglob("*.bundle"), *rig.path.rglob("*.temporary")]
    return sum(file.stat().st_size for file in files if file.is_file())


def fill(rig: Rig, names: str) -> None:
    """Write a batch of 8 pages for each letter; the capacity is kept."""
    for name in names:
        write(rig, name)
        assert disk_bytes(rig) <= (rig.store.capacity.limit or HUGE)


def temporary(rig: Rig, process: ProcessId, size: int, content: bytes = b"", age: int = 0) -> Path:
    """A file that a process has left in the middle of a write, so many seconds ago."""
    path = Path(rig.store.temp_files.path(TemporaryName(process, "a" * 10, 0, size)))
    path.write_bytes(content)
    os.utime(path, (time.time() - age,) * 2)
    return path


FOREIGN = ProcessId("zzzzzzzz", 1, 1)
"""Of another machine."""


@pytest.fixture
def room(rig):
    """Make a rig with room for a number of batches of 8 pages."""
    return lambda count, **options: rig(capacity=int(BATCH_BYTES * count), **options)


@pytest.mark.parametrize("by", ["flush", "close"])
def test_use_by_another_process_counts_once_it_has_been_told(room, monkeypatch, by):
    a = room(3)
    fill(a, "abc")
    monkeypatch.setattr(store, "FLUSH_SECONDS", 0.0 if by == "flush" else 3600.0)
    b = room(3)
    assert b.holds(chain("a", 8))
    if by == "close":
        b.storage.close()
    else:
        b.store.thread_pool.close(5)
    fill(a, "d")
    assert hits(a, "abcd") == [8, 0, 8, 8]


def test_a_rewritten_copy_is_as_old_as_the_bundle_was(room):
    """To others as well: a rewrite is no use."""
    a = room(3)
    fill(a, "abc")
    assert a.storage.delete(chain("a", 1)) == [True]
    b = room(3)
    fill(b, "d")
    assert [b.hit(chain("a", 8)[1:]), *hits(b, "bcd")] == [0, 8, 8, 8]


def test_a_file_that_is_no_bundle_goes_first(room):
    a = room(3)
    fill(a, "a")
    junk = a.bundles_path / f"aaaaaaaaaa-1-{BATCH_BYTES:x}-fffffffffff-5.bundle"
    junk.write_bytes(b"x" * BATCH_BYTES)
    b = room(3)
    fill(b, "b")
    assert junk.exists()
    fill(b, "c")
    assert not junk.exists()
    assert hits(b, "abc") == [8, 8, 8]


def test_leftovers_of_another_machine_count_until_they_are_old(room):
    a = room(2)
    fill(a, "a")
    path = temporary(a, FOREIGN, BATCH_BYTES, b"x" * BATCH_BYTES)
    fill(a, "b")
    assert path.exists()
    assert hits(a, "ab") == [0, 8]
    os.utime(path, (time.time() - 3610,) * 2)
    fill(a, "c")
    assert not path.exists()
    assert hits(a, "bc") == [8, 8]
    # One that is not written any more counts with its length, and not with that in its name.
    path = temporary(a, FOREIGN, BATCH_BYTES, b"x" * 10, age=61)
    assert sum(a.store.capacity.count()) == 2 * BATCH_BYTES + 10
    assert path.exists()


def stranger(a: Rig, size: int = HUGE, *, own: bool = True) -> Path:
    """A path with the name of a bundle of so many bytes, of this model's pages or another's."""
    bundles = a.bundles_path if own else Path(a.store.paths.bundles("0" * 32))
    bundles.mkdir(parents=True, exist_ok=True)
    return bundles / f"aaaaaaaaaa-1-{size:x}-{1 << 52:x}-5.bundle"


def absurd(numbers: str) -> Callable[[Rig], None]:
    """Numbers that no system call takes, or no writer gives."""
    return lambda a: (a.bundles_path / f"aaaaaaaaaa-{numbers}.bundle").touch()


def announced(a: Rig) -> None:
    for number, event in enumerate(("a1-5-5", f"a{HUGE:x}-{1 << 52:x}-5"), start=1):
        cursor = WriterCursor("0" * 32, "aaaaaaaaaa", number, (event,), 1)
        Path(a.store.paths.writers, str(cursor)).write_bytes(b"")
    a.store.feed.counter.advance()


def numbered_alike(a: Rig) -> None:
    (path,) = a.bundles()
    writer, number, size, created, rest = path.name.split("-")
    for sequence in (number, "ff"):
        path.with_name(f"{writer}-{sequence}-{'f' * len(size)}-{created}-{rest}").touch()


@pytest.mark.parametrize(
    "place",
    [
        lambda a: temporary(a, FOREIGN, HUGE),
        lambda a: temporary(a, a.store.temp_files.process, HUGE),
        lambda a: stranger(a).mkdir(),
        lambda a: stranger(a, 1 << 15).mkdir(),
        lambda a: stranger(a).touch(),
        lambda a: stranger(a, own=False).mkdir(),
        lambda a: stranger(a, 1 << 15, own=False).mkdir(),
        lambda a: stranger(a, own=False).touch(),
        absurd("1-ffffffffffffffff-0-0"),
        absurd("1-100000000001-0-0"),
        absurd("1-1000-ffffffffffffffff-0"),
        absurd("ffffffffffffffff-0-0-ffffffffffffffff"),
        announced,
        numbered_alike,
    ],
)
def test_what_a_name_claims_is_not_believed(room, place):
    """A directory, or an empty file, with the name of a bundle or a temporary file evicted the
    whole store, and every set was refused."""
    a = room(3)
    fill(a, "a")
    place(a)
    b = room(3)
    fill(a, "b")
    fill(b, "c")
    for side in (a, b):
        assert hits(side, "abc") == [8, 8, 8]
    assert b.holds(chain("a", 8))
    fill(b, "d")
    assert hits(b, "cd") == [8, 8]


def test_a_bundle_that_was_never_announced_is_counted_in_the_end(room, monkeypatch):
    monkeypatch.setattr(capacity_module, "RELIST_SECONDS", 0.0)
    monkeypatch.setattr(capacity_module, "RELIST_SHARE", 0)
    a, b = room(2), room(2)
    fill(a, "a")
    with replaced(b.store.feed, "announce", lambda _: lambda: None):
        fill(b, "b")
    assert sum(a.store.capacity.count()) == 2 * BATCH_BYTES
    fill(a, "c")


def test_pages_that_go_before_anyone_has_read_their_index_are_counted(room):
    """As those of a bundle that another thread has just found, or whose index no call had the time
    to read."""
    a, b = room(3), room(3)
    fill(a, "abc")
    b.storage.open()
    assert b.page_index.bundle_set.bundles == {}
    with replaced(b.page_index.bundle_set, "index", lambda _: lambda expired: None):
        fill(b, "d")
    assert b.stats().pages_evicted == 8


def test_pages_that_were_counted_before_their_pool_was_registered_are_found(room):
    a, b, keys = room(9), room(9), chain("a", 8)
    a.storage.register_mem_host_pool_v2(a.pool, "mamba")
    assert all(a.storage.batch_set_v2([replace(a.transfer(keys), name="mamba")])["mamba"])
    fill(b, "b")
    b.storage.register_mem_host_pool_v2(b.pool, "mamba")
    assert b.storage.batch_present(keys, pool="mamba") == [True] * 8


def test_bytes_and_uses_are_known_without_asking_for_each_file(room):
    a = room(26)
    fill(a, "abcdefghijklmnopqrstuvwxyz")
    expected, b = disk_bytes(a), room(26)
    with counted("lstat", ".bundle") as looked, counted("stat", ".bundle") as asked:
        assert sum(b.store.capacity.count()) == expected
        assert asked == []
        a.put(chain("more", 8))
    assert looked == []
    assert len(asked) <= 3
    with counted("utime", "") as told:
        for _ in range(100):
            assert a.holds(chain("z", 8))
    assert told == []


def test_what_cannot_be_removed_is_left_and_something_else_goes(room):
    a = room(3)
    fill(a, "abc")
    first = a.page_index.pages[chain("a", 1)[0]][0].path
    with failing("unlink", 1, when=lambda path: str(path) == first):
        fill(a, "d")
    assert hits(a, "abcd") == [8, 0, 8, 8]
    assert a.put(chain("e", 16)) == [True] * 16
    assert disk_bytes(a) <= a.store.capacity.limit


@pytest.mark.parametrize("exited", [False, None, True])
def test_a_removal_is_left_to_its_process_unless_that_has_exited(room, monkeypatch, exited):
    """A process that listed the bundles meanwhile removed them, and no one counted their pages."""
    monkeypatch.setattr(temp_files, "has_exited", lambda process: exited)
    a, b = room(3), room(3)
    fill(a, "abc")
    assert hits(b, "abc") == [8, 8, 8]
    before, taken = a.bundles(), list[bool]()

    def look(step: int) -> None:
        if step == 0:
            b.catch_up(listing=True)
            taken.append(a.bundles() != before)

    with at_steps(look, ("unlink",), within="/bundles/"):
        fill(a, "d")
    assert taken == [exited is True]
    assert a.stats().pages_evicted == (0 if exited else 8)
    for side in (a, b):
        assert hits(side, "abcd") == [0, 8, 8, 8]
    assert len(a.bundles()) == 3


@pytest.mark.parametrize("full", [False, True])
def test_a_delete_is_left_to_its_process_too(room, full):
    """It writes no file of its own, and the disk may have no room for an empty one."""
    a, b = room(3), room(3)
    fill(a, "a")
    assert hits(b, "a") == [8]
    there = list[int]()

    def look(step: int) -> None:
        if step == 0:
            b.catch_up(listing=True)
            there.append(len(a.bundles()))

    no_file = failing("open", errno.ENOSPC, when=lambda path, *_: str(path).endswith(".temporary"))
    with no_file if full else nullcontext(), at_steps(look, ("unlink",), within="/bundles/"):
        a.storage.delete(chain("a", 8))
    assert there == [0 if full else 1]
    assert (hits(a, "a"), hits(b, "a"), a.bundles()) == ([0], [0], [])


def test_a_bundle_that_comes_back_is_in_the_queue_twice(room):
    """It seemed to be gone, as one does that is claimed while its index is read; the old entry goes
    only in its turn."""
    a, b = room(3), room(3)
    fill(a, "a")
    fill(b, "b")
    b.bundle_set.remove(list(b.bundle_set.bundles))
    b.bundle_set.invalidate()
    fill(b, "cdef")
    assert hits(b, "abcdef") == [0, 0, 0, 8, 8, 8]


def test_who_only_reads_keeps_nothing_of_what_others_evict(room, monkeypatch):
    for module in (bundle_set, capacity_module):
        monkeypatch.setattr(module, "MAX_GONE", 4)
    a, b = room(3), room(3)
    for name in "abcdefghijkl":
        fill(a, name)
        assert hits(b, name) == [8]
    assert len(b.bundle_set.bundles) == 3
    assert len(b.bundle_set.added) <= 2 * 3 + 4
    # Nor what goes before any eviction.
    c = room(99)
    for name in "abcdefghijkl":
        fill(c, name)
        c.storage.clear()
    assert len(c.store.capacity._queue._heap) <= 2 * 3 + 4


def test_whatever_goes_wrong_while_room_is_made_leaves_no_file(room):
    a = room(3)
    fill(a, "a")
    with (
        replaced(a.store.capacity, "make_room", lambda _: raising(KeyboardInterrupt())),
        pytest.raises(KeyboardInterrupt),
    ):
        a.put(chain("b", 8))
    assert a.temporaries() == []


def test_a_victim_whose_eviction_is_interrupted_goes_with_the_next_set(room):
    a = room(1)
    fill(a, "a")
    stop = interrupted(heapq, "heappop", raising(KeyboardInterrupt()), late=True)
    with stop, pytest.raises(KeyboardInterrupt):
        a.put(chain("b", 8))
    fill(a, "c")
    assert hits(a, "abc") == [0, 0, 8]
