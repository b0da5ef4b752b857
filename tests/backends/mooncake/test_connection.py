"""Requests that are repeated, and clients that are to be replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
    monkeypatch.setattr(connection, "warm_up", lambda exist: None)
    client = Connection(SimpleNamespace(master=None))
    places = [[0]] * 3, [[100]] * 3
    assert client.read_ranges(["a", "b", "c"], *places) == expected
    assert [list(names) for names in store.asked] == asked
    # Each of the others would take as long.
    monkeypatch.setattr(connection, "REPEAT_SECONDS", -1.0)
    store.codes, store.asked = [[100, FAILED, FAILED]], []
    assert client.read_ranges(["a", "b", "c"], *places) == [100, FAILED, FAILED]


class Clock:
    """Stands for `time`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Writes:
    """Stands for the library's client: each write takes a second, and answers one code."""

    def __init__(self, clock):
        self.clock, self.code = clock, library.TRANSFER_FAILED

    def batch_put_from_multi_buffer_ranges(self, names, addresses, sizes, offsets):
        self.clock.now += 1
        return [self.code]


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(connection, "time", made)
    monkeypatch.setattr(connection, "set_up", lambda settings: Writes(made))
    monkeypatch.setattr(connection, "warm_up", lambda exist: None)
    return made


def settings(*, protocol="tcp", global_segment_size=0, metadata_server="http://m/metadata"):
    return SimpleNamespace(
        master=None,
        protocol=protocol,
        global_segment_size=global_segment_size,
        metadata_server=metadata_server,
    )


def write_for(client, clock, seconds, *, pause=5):
    """Write, and wait for `pause` seconds, for so long."""
    until = clock.now + seconds
    while clock.now < until:
        client.transfer(["a"], [[0]], [[100]], [[0]])
        clock.now += pause


def test_a_client_whose_transfers_keep_failing_is_stale(clock):
    client = Connection(settings())
    write_for(client, clock, 12)
    assert not client.is_stale
    write_for(client, clock, 12)
    assert client.is_stale
    clock.now += connection.PAUSE_SECONDS
    assert not client.is_stale


@pytest.mark.parametrize(
    "others",
    [
        {"protocol": "rdma"},
        {"global_segment_size": 1 << 30},
        {"metadata_server": "P2PHANDSHAKE"},
    ],
    ids=["rdma", "lends memory", "ports in names"],
)
def test_a_client_that_is_never_replaced(clock, others):
    client = Connection(settings(**others))
    write_for(client, clock, 60)
    assert not client.is_stale


@pytest.mark.parametrize(("pause", "code"), [(11, library.TRANSFER_FAILED), (5, library.NO_ROOM)])
def test_failures_that_are_rare_or_no_transfers(clock, pause, code):
    client = Connection(settings())
    client._store.code = code
    write_for(client, clock, 60, pause=pause)
    assert not client.is_stale


def test_where_a_new_client_does_not_help_the_next_one_comes_later(clock):
    client = Connection(settings())
    write_for(client, clock, 20)
    assert client.next_stale_seconds == 2 * connection.STALE_SECONDS
    newer = Connection(settings(), client.next_stale_seconds)
    write_for(newer, clock, 20)
    assert not newer.is_stale
    write_for(newer, clock, 20)
    assert newer.is_stale
    assert newer.next_stale_seconds == 4 * connection.STALE_SECONDS
    last = Connection(settings(), connection.MAX_STALE_SECONDS)
    write_for(last, clock, 20)
    assert last.next_stale_seconds == connection.MAX_STALE_SECONDS
    # These have begun long after it was opened: it has served meanwhile.
    clock.now += 3600
    write_for(last, clock, 20)
    assert last.next_stale_seconds == connection.STALE_SECONDS
