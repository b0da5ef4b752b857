"""Clocks that disagree: the clock of the file server decides about eviction."""

from __future__ import annotations

import time

import pytest

from hicache_backends.file import store
from hicache_backends.file.paths import ProcessId
from hicache_backends.file.temp_files import ServerClock, TemporaryName
from tests.backends.file.harness import bundle_bytes, chain
from tests.support.waiting import eventually

YEAR_NS = 365 * 24 * 3600 * 1_000_000_000

TICK_SECONDS = 0.02
"""A file system's clock goes in steps of up to 10 ms: what is less apart may come in any order by a
clock that follows it."""


def skewed(offset_ns):
    return lambda: ServerClock(lambda: time.time_ns() + offset_ns)


@pytest.fixture
def node(rig, monkeypatch):
    """A rig of a node whose clock is wrong, with room for four batches of 8 pages."""

    def make(offset_ns=0, **options):
        monkeypatch.setattr(store, "ServerClock", skewed(offset_ns))
        made = rig(capacity=bundle_bytes(8) * 4, **options)
        made.storage.open()
        return made

    return make


def test_times_of_the_future_are_not_believed(node, monkeypatch):
    """Such as those of a node whose clock was set only after it had written."""
    with monkeypatch.context() as patch:
        patch.setattr(ServerClock, "adjust", lambda self, moment_ns: None)
        early = node(YEAR_NS)
    for name in "ab":
        early.put(chain(name, 8))
        early.store.flush_touches()
    right = node()
    for name in "cdef":
        right.put(chain(name, 8))
    assert [right.hit(chain(name, 8)) for name in "abcdef"] == [0, 0, 8, 8, 8, 8]


@pytest.mark.parametrize("offset_ns", [YEAR_NS, -YEAR_NS], ids=["ahead", "behind"])
def test_a_temporary_file_of_another_machine_is_as_old_as_the_server_says(node, offset_ns):
    a = node(offset_ns)
    foreign = TemporaryName(ProcessId("zzzzzzzz", 1, 1), "aaaaaaaaaa", 0, 100)
    path = a.path / "hicache-file-1" / "temporary" / str(foreign)
    path.write_bytes(b"x")
    assert a.store.temp_files.collect() == (100, 0)
    assert path.exists()


def test_a_clock_that_is_set_meanwhile_is_noticed(rig, monkeypatch):
    monkeypatch.setattr(store, "ADJUST_SECONDS", 0.0)
    a = rig()
    monkeypatch.setattr(a.store.clock, "source", lambda: time.time_ns() + YEAR_NS)
    a.hit(["x"])
    eventually(lambda: abs(a.store.clock.now_ns() - time.time_ns()) < 60_000_000_000)


def test_small_differences_are_none():
    clock = ServerClock(lambda: 10**18)
    for behind, corrected in ((2, 0), (6, 6)):
        clock.adjust(lambda behind=behind: 10**18 - behind * 10**9)
        assert clock.now_ns() == 10**18 - corrected * 10**9


@pytest.mark.parametrize("after", [False, True], ids=["asked late", "answered late"])
@pytest.mark.parametrize("wrong_ns", [0, YEAR_NS, -YEAR_NS], ids=["right", "ahead", "behind"])
def test_how_long_the_file_server_takes_to_answer_says_nothing_about_its_clock(after, wrong_ns):
    """A disk that stalls for a minute does not put a clock wrong by a minute."""
    now, minute_ns = [10**18], 60_000_000_000
    clock = ServerClock(lambda: now[0] + wrong_ns)
    clock.adjust(lambda: now[0])

    def slow():
        now[0] += 0 if after else minute_ns
        moment = now[0]
        now[0] += minute_ns if after else 0
        return moment

    clock.adjust(slow)
    assert clock.now_ns() == now[0]
