"""Reads that hang: with bounce buffers a get returns, and nothing is written later."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from hicache_backends.file import store
from hicache_backends.posix import files
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.directories import Mount
from hicache_storage.objects import Call, ObjectRead
from hicache_storage.spec import CancellationToken, HungReads
from tests.backends.file.harness import COMPONENTS, PATIENCE_SECONDS, chain
from tests.support.waiting import eventually


@pytest.fixture
def hung(monkeypatch):
    """Lets `preadv` hang, and counts the reads that do and that come back; released at the end of
    the test at the latest."""

    class Hung:
        def __init__(self):
            self.release, self.reads, self.back = threading.Event(), 0, 0

        def begin(self):
            real = os.preadv

            def hang(*args):
                self.reads += 1
                self.release.wait(2 * PATIENCE_SECONDS)
                self.back += 1
                return real(*args)

            monkeypatch.setattr(files.os, "preadv", hang)

        def end(self):
            monkeypatch.undo()
            self.release.set()

    made = Hung()
    yield made
    made.end()


@pytest.mark.parametrize(
    "components", [(1000, 3096), (300_000, 900_000)], ids=["short-pages", "long-pages"]
)
@pytest.mark.parametrize("verifies", [True, False], ids=["verified", "unverified"])
def test_pages_come_through_buffers_whole(rig, components, verifies):
    a, keys = (
        rig(components=components, pages=8, hung_reads="bounce_buffer", verify_checksums=verifies),
        chain("a", 8),
    )
    a.put(keys)
    assert a.store.buffers is not None
    assert a.holds(keys)
    assert a.versions([keys[5], "missing", keys[0], keys[7]]) == [0, None, 0, 0]
    assert a.store.hung_reads() == 0


@pytest.mark.parametrize(
    "components", [(1000, 3096), (300_000, 900_000)], ids=["short-pages", "long-pages"]
)
def test_a_hung_get_returns_and_nothing_arrives_later(guarded, hung, components):
    a, keys = guarded(hung_reads="bounce_buffer", components=components, pages=8), chain("a", 8)
    a.put(keys)
    hung.begin()
    a.storage.hurry()
    assert a.get(keys) == [None] * 8
    # On a busy machine the deadline may pass before the first read has begun.
    while not hung.reads:
        assert a.get(keys) == [None] * 8
    assert not hung.back
    assert a.bare.store.hung_reads() >= 1
    assert "hang" in a.bare.health().detail
    a.pool.memory[:] = b"\x77" * len(a.pool.memory)
    hung.end()
    a.storage.be_patient()
    eventually(lambda: a.bare.store.hung_reads() == 0)
    assert set(a.pool.memory) == {0x77}
    assert a.stats().pages_damaged == 0
    assert a.holds(keys)


def test_hung_reads_are_bounded_and_fail_fast_beyond(guarded, hung, monkeypatch):
    a, keys = guarded(hung_reads="bounce_buffer"), chain("a", 4)
    a.put(keys)
    monkeypatch.setattr(a.bare.store.buffers, "_limit", 3)
    hung.begin()
    a.storage.hurry()
    while hung.reads < 3:
        assert a.get(keys) == [None] * 4
    missed = a.storage.get_stats().deadlines_missed
    a.storage.be_patient()
    assert a.get(keys) == [None] * 4
    assert (hung.reads, hung.back) == (3, 0)
    assert a.storage.get_stats().deadlines_missed == missed
    hung.end()
    eventually(lambda: a.holds(keys))


def test_a_read_of_someone_else_goes_on_beside_a_hung_one(guarded, monkeypatch):
    a, stuck, well = (
        guarded(hung_reads="bounce_buffer", components=(600_000,), pages=40, threads=4),
        chain("stuck", 2),
        chain("well", 36),
    )
    a.put(well)
    before = {str(path) for path in a.path.rglob("*.bundle")}
    a.put(stuck)
    release, real = threading.Event(), os.preadv
    (path,) = {str(path) for path in a.path.rglob("*.bundle")} - before

    def hang(descriptor, *args):
        if os.readlink(f"/proc/self/fd/{descriptor}") == path:
            release.wait(2 * PATIENCE_SECONDS)
        return real(descriptor, *args)

    monkeypatch.setattr(files.os, "preadv", hang)
    a.storage.hurry()
    for _ in range(6):
        assert a.get(stuck) == [None] * 2
    a.storage.be_patient()
    assert a.holds(well)
    release.set()


def test_closing_waits_for_no_hung_read(guarded, hung):
    a, keys = guarded(hung_reads="bounce_buffer"), chain("a", 4)
    a.put(keys)
    hung.begin()
    a.storage.hurry()
    while not hung.reads:
        a.get(keys)
    a.storage.close()
    a.storage.close()
    assert not hung.back
    hung.end()


@pytest.mark.parametrize(
    ("kind", "option", "hung_reads", "may_hang"),
    [
        ("ext4", "auto", HungReads.BOUNCE_BUFFER, True),
        ("ext4", "wait", HungReads.WAIT, True),
        ("ext4", "bounce_buffer", HungReads.BOUNCE_BUFFER, True),
        ("nfs4", "auto", HungReads.BOUNCE_BUFFER, True),
        ("nfs4", "wait", HungReads.WAIT, True),
        ("tmpfs", "auto", HungReads.WAIT, False),
        ("tmpfs", "bounce_buffer", HungReads.BOUNCE_BUFFER, True),
    ],
)
def test_whatever_has_a_device_below_may_hang(rig, monkeypatch, kind, option, hung_reads, may_hang):
    monkeypatch.setattr(store, "mount_of", lambda path: Mount(kind))
    a = rig(hung_reads=option)
    assert a.storage.capabilities.may_hang
    a.storage.open()
    assert (a.storage.capabilities.hung_reads, a.storage.capabilities.may_hang) == (
        hung_reads,
        may_hang,
    )
    assert (a.store.buffers is None) == (hung_reads is HungReads.WAIT)


def test_a_straight_read_keeps_its_caller(rig, hung):
    """The first get may open the store, behind a deadline, before it is known that nothing is below
    that could stall."""
    a, keys = rig(hung_reads="wait"), chain("a", 4)
    a.put(keys)
    hung.begin()
    token, cancelled = CancellationToken(), threading.Event()
    call = Call(cancellation=token)
    reads = [
        ObjectRead(a.kv, key, [memoryview(bytearray(length)) for length in COMPONENTS], call=call)
        for key in keys
    ]
    extents = a.page_index.locate(reads)
    reading = threading.Thread(target=lambda: a.store.reader.read(extents, call))
    reading.start()
    eventually(lambda: hung.reads)
    cancelling = threading.Thread(target=lambda: (token.cancel(), cancelled.set()))
    cancelling.start()
    assert not cancelled.wait(0.05)
    hung.end()
    assert cancelled.wait(PATIENCE_SECONDS)
    reading.join(PATIENCE_SECONDS)


def test_buffers_are_used_again():
    buffers, seen = Buffers(4096, limit=2), set()
    for _ in range(10):
        with buffers.lend(Call()) as one, buffers.lend(Call()) as two:
            assert len(one) == len(two) == 4096
            seen |= {id(one), id(two)}
    assert len(seen) == 2


def test_who_waits_for_a_buffer_gets_the_next_one():
    buffers, order = Buffers(4096, limit=1), []

    def second():
        with buffers.lend(Call(PATIENCE_SECONDS)):
            order.append("second")

    with buffers.lend(Call()):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.02)
        order.append("first")
    waiting.join(PATIENCE_SECONDS)
    assert order == ["first", "second"]


def test_no_buffer_is_waited_for_that_only_hung_reads_have():
    buffers, late = Buffers(4096, limit=1), Call(0.0)
    token = CancellationToken()
    with buffers.lend(Call(cancellation=token)):
        token.cancel()
        assert buffers.stuck() == 1
        with pytest.raises(OSError, match="reads hang") as error, buffers.lend(Call(60.0)):
            pass
        assert error.value.errno == errno.EBUSY
        with pytest.raises(OSError, match="deadline"), buffers.lend(late):
            pass
    assert buffers.stuck() == 0
