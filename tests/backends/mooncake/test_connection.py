"""Requests that are repeated, and stores that are left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_backends.mooncake import stores
from hicache_backends.mooncake.client import connection, library
from hicache_backends.mooncake.client.connection import Connection


class Ranges:
    """Stands for the library's client: its reads of ranges answer codes in turn."""

    def __init__(self, *codes):
        self.codes, self.asked = list(codes), []

    def batch_get_into_multi_buffer_ranges(self, names, addresses, sizes, offsets):
        self.asked.append(names)
        return self.codes.pop(0)


FAILED = library.TRANSFER_FAILED


@pytest.mark.parametrize(
    ("codes", "asked", "expected"),
    [
        ([[100, FAILED, 100], [100]], [["a", "b", "c"], ["b"]], [100, 100, 100]),
        (
            [[FAILED] * 3, [FAILED], [100, FAILED]],
            [["a", "b", "c"], ["a"], ["b", "c"]],
            [FAILED, 100, FAILED],
        ),
        ([[100, library.NOT_FOUND, 100]], [["a", "b", "c"]], [100, library.NOT_FOUND, 100]),
    ],
    ids=["arrives", "fails again", "is gone"],
)
def test_a_transfer_that_fails_is_repeated_once_and_alone(monkeypatch, codes, asked, expected):
    store = Ranges(*codes)
    monkeypatch.setattr(connection, "set_up", lambda settings: store)
    client = Connection(SimpleNamespace(master=None))
    places = [[0]] * 3, [[100]] * 3
    assert client.read_ranges(["a", "b", "c"], *places) == expected
    assert [list(names) for names in store.asked] == asked
    # Each of the others would take as long.
    monkeypatch.setattr(connection, "REPEAT_SECONDS", -1.0)
    store.codes, store.asked = [[100, FAILED, FAILED]], []
    assert client.read_ranges(["a", "b", "c"], *places) == [100, FAILED, FAILED]


@pytest.mark.parametrize("code", [FAILED, 100])
def test_a_transfer_of_a_set_that_fails_is_remembered(clock, monkeypatch, code):
    """For a while: the next objects are sent one by one."""
    store = SimpleNamespace(batch_put_from_multi_buffer_ranges=lambda *asked: [100, code])
    monkeypatch.setattr(connection, "set_up", lambda settings: store)
    client = Connection(SimpleNamespace(master=None))
    assert client.transfer(["a", "b"], [], [], []) == [True, code > 0]
    assert client.has_failed_lately == (code < 0)
    clock.now += 2 * connection.PAUSE_SECONDS
    assert not client.has_failed_lately


class Clock:
    """Stands for `time`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(connection, "time", made)
    monkeypatch.setattr(stores, "time", made)
    monkeypatch.setattr(connection, "set_up", lambda settings: None)
    return made


def test_where_one_store_keeps_all_pages_the_master_is_seldom_asked(clock, monkeypatch):
    where, asked, again = {"a": ["one"], "b": ["one"], "c": ["two"]}, [], []
    store = SimpleNamespace(batch_get_session_start=lambda names: again.append(names) or [0])
    monkeypatch.setattr(connection, "set_up", lambda settings: store)
    client = Connection(SimpleNamespace(master=None))

    def copies(names):
        asked.append(names)
        return {name: where[name] for name in names}

    client.copies = copies
    assert client.places(["a"]) == {"a": "one"}
    assert client.places(["b"]) == {"b": "one"}
    assert asked == [["a"]]
    clock.now += 2 * connection.LOOK_SECONDS
    assert client.places(["b", "c"]) == {"b": "one", "c": "two"}
    # From now on there are two, until one has not been seen for long.
    assert client.places(["b"]) == {"b": "one"}
    clock.now += 2 * connection.SEEN_SECONDS
    for _ in range(2):
        assert client.places(["b"]) == {"b": "one"}
    assert asked == [["a"], ["b", "c"], ["b"], ["b"]]
    assert not again
    client.stores.end("one", client.stores.begin("one", 0), failed=True)
    assert client.places(["b"]) == {"b": "one"}
    assert len(asked) == 5
    # While a store is left out, the lookup must not name one that the master has dropped since.
    assert again == [["b"]]


def test_a_failure_counts_unless_the_store_has_answered_since_it_began(clock):
    """The library may have asked another one, of which the master knows no more."""
    known = stores.Stores()
    first = known.begin("store", 0)
    clock.now += 1
    known.end("store", known.begin("store", 0), failed=False)
    clock.now += 1
    assert not known.is_out("store")
    known.end("store", first, failed=True)
    assert not known.any_out()
    known.end("store", known.begin("store", 0), failed=True)
    assert known.is_out("store")
    assert not known.is_lost("store")
    clock.now += 2 * stores.LOST_SECONDS
    assert known.is_lost("store")
