"""Late writes: quarantine of slots that may still be written, and removal of damaged pages."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

import pytest

from hicache_backends.hf3fs.slots import engine
from hicache_storage.objects import Call
from tests.backends.hf3fs.harness import chain, interrupted
from tests.metadata_server import servers
from tests.support.metadata import Served
from tests.support.waiting import eventually

SLOTS, SLOT_BYTES = 4, 4608
PATIENCE_SECONDS = 60.0
MEMORY = f"{servers.SERVE} --quarantine-seconds 0.05"


@pytest.fixture
def mine(rig):
    """Storages of four slots on one store."""
    return lambda **more: rig(file_size=SLOTS * SLOT_BYTES, wait_seconds=0.0, **more)


@contextmanager
def held_up(one, keys, *, renews=True):
    """A set that has leased its slots and not written yet; what is yielded lets it go on."""
    engine, reached, goes_on = one.store.engine, threading.Event(), threading.Event()
    real = engine.write

    def slow(jobs, call):
        reached.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        if not renews:
            # The system call has begun in time, and is what stalls.
            for job in jobs:
                job.until = float("inf")
        real(jobs, Call(None))

    engine.write = slow
    writing = threading.Thread(target=lambda: one.put(keys, seconds=PATIENCE_SECONDS))
    writing.start()
    assert reached.wait(PATIENCE_SECONDS)

    def go_on():
        goes_on.set()
        writing.join(PATIENCE_SECONDS)
        assert not writing.is_alive()

    try:
        yield go_on
    finally:
        go_on()
        engine.write = real


def stored(other, keys, seconds):
    """Those of some pages that can be stored within that time."""
    until, done = time.monotonic() + seconds, set()
    while time.monotonic() < until and len(done) < len(keys):
        done |= {key for key, ok in zip(keys, other.put(keys), strict=True) if ok}
        time.sleep(0.05)
    return done


def test_a_clear_gives_nobody_a_slot_that_is_being_written(mine):
    one, other, keys = mine(), mine(), chain("b", SLOTS)
    with held_up(one, chain("a", 2)) as go_on:
        other.storage.clear()
        done = stored(other, keys, 0.5)
        go_on()
    assert len(done) == SLOTS - 2
    assert [page is not None for page in other.get(keys)] == [key in done for key in keys]
    assert not other.storage.get_stats().pools["kv"].pages_damaged


def test_a_server_that_lost_its_memory_gives_no_slot_that_is_being_written(rig):
    options = {"file_size": SLOTS * SLOT_BYTES, "wait_seconds": 0.0, "lease_seconds": 6.0}
    with Served(command=MEMORY) as server:
        one, keys = rig(metadata_url=server.url, **options), chain("b", SLOTS)
        assert all(one.put(chain("c", 1))), "a store that is new waits for nobody"
        with held_up(one, chain("a", 2)) as go_on:
            server.kill()
            server.start()
            other = rig(metadata_url=server.url, **options)
            assert stored(other, keys, 0.3) == set()
            go_on()
        assert stored(other, keys, PATIENCE_SECONDS) == set(keys)
        other.expect(keys)


def test_what_a_stalled_write_damages_is_deleted_when_it_comes_back(mine, caplog):
    """Its lease and the quarantine are over, and no file system refuses it."""
    one, other, keys = mine(lease_seconds=0.3), mine(lease_seconds=5.0), chain("b", SLOTS)
    assert other.hit(keys) == 0
    with held_up(one, chain("a", 2), renews=False) as go_on:
        assert stored(other, keys, PATIENCE_SECONDS) == set(keys)
        go_on()
    found = [slot >= 0 for slot in map(other.slot, keys)]
    assert found.count(False) == 2, "those in whose slots it has written, and no others"
    assert [page is not None for page in other.get(keys)] == found
    assert not other.storage.get_stats().pools["kv"].pages_damaged
    assert "2 pages of others were damaged" in caplog.text
    assert stored(other, keys, PATIENCE_SECONDS) == set(keys)
    other.expect(keys)


def test_a_client_that_initializes_a_scope_again_names_its_leases(rig):
    """Others may have written since a server knew the scope, also where the file looks empty."""
    one = rig(lease_seconds=7.0)
    with interrupted(one.store.metadata, "send") as sent:
        assert one.hit(chain("a", 1)) == 0
        one.store.metadata._initialized.clear()
        assert one.hit(chain("a", 1)) == 0
    asked = [request for path, request, *_ in sent if path == "/v2/initialize"]
    assert [request.earlier_lease_seconds for request in asked] == [[0.0], [7.0]]


def test_a_file_has_its_length_before_the_first_lease(rig, server):
    """A client that asks a server without memory anew names the leases of those who may still write."""
    one, other = (rig(metadata_url=server.url) for _ in range(2))
    leased = list[bool]()
    with interrupted(one.store.metadata, "reserve", lambda: leased.append(other.file.is_written())):
        assert all(one.put(chain("a", 1)))
    assert leased == [True]


def test_slots_are_not_written_through_a_link(rig, tmp_path):
    one, elsewhere = rig(lease_seconds=1.0), tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not yours")
    path = one.file.path
    os.symlink(elsewhere, path)
    assert one.put(chain("a", 2)) == [False, False]
    assert elsewhere.read_bytes() == b"not yours"
    os.unlink(path)
    # A file that was there before its scope may still be written, until leases of that time have
    # ended.
    eventually(lambda: all(one.put(chain("a", 2))))


def test_nothing_is_written_once_a_lease_has_ended(rig):
    one = rig()

    def end_lease():
        [[[job], _]] = writes
        job.until = 0.0

    with (
        interrupted(one.store.engine, "write", end_lease) as writes,
        interrupted(engine, "write_from") as written,
    ):
        assert one.put(chain("a", 1)) == [False]
    assert written == []
