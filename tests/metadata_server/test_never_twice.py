"""Numbers of leases, generations and pins are never given twice, whatever of a store survives a
restart."""

from __future__ import annotations

import shutil
import time

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.scope import Scope
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.storage.factory import open_store

NOW = 1_800_000_000.0
SCOPES = [p.ScopeGeometry(scope="0:kv", slots=8)]


@pytest.fixture(autouse=True)
def time_passes(monkeypatch):
    """A second between two looks at the clock: a restart takes that long."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (NOW + next(seconds))))


class Server:
    """A server that is started, used and killed."""

    def __init__(self, address):
        self.store = open_store(address)
        self.service = MetadataService(DEFAULTS, durability=self.store.durability)
        self.service.restore(self.store.recover(NOW), self.store.rows, NOW)
        self.service.initialize(p.Initialize(scopes=SCOPES), NOW)

    def reserve(self, *keys):
        leased = self.service.reserve(
            p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=list(keys))]), NOW
        ).scopes[0]
        self.keep()
        return leased

    def commit(self, leases):
        part = p.CommitScope(
            scope="0:kv", leases=leases, lengths=[1] * len(leases), checksums=[1] * len(leases)
        )
        done = self.service.commit(p.Commit(scopes=[part]), NOW).scopes[0].states
        self.keep()
        return done

    def pin(self, *keys):
        return self.service.lookup(
            p.Lookup(scopes=[p.LookupScope(scope="0:kv", keys=list(keys))], pin_seconds=9), NOW
        ).pin

    def keep(self):
        self.store.write(self.service.take_changes())


def lose_nothing(directory, before):
    pass


def lose_all(directory, before):
    for file in directory.iterdir():
        file.unlink()


def go_back(directory, before):
    """As a disk that was set back does: the files are those of before, and not copies."""
    for file in before.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(
    ("store", "loss"),
    [
        ("memory:", lose_nothing),
        ("sqlite:///{}/m.db", lose_nothing),
        ("sqlite:///{}/m.db", lose_all),
        ("sqlite:///{}/m.db", go_back),
    ],
)
def test_an_old_lease_is_stale_for_good(tmp_path, store, loss):
    directory, before = tmp_path / "store", tmp_path / "before"
    directory.mkdir()
    leases, generations, pins = set(), {}, set()
    for number in range(3):
        server = Server(store.format(directory))
        if not before.exists():
            server.keep()
            shutil.copytree(directory, before)
        given = server.reserve("a", f"only-{number}")
        assert not leases & set(given.leases)
        for slot, generation in zip(given.slots, given.generations, strict=True):
            assert slot < 0 or generation > generations.get(slot, 0)
            generations[slot] = generation
        old = sorted(leases)
        if loss is lose_nothing and store != "memory:":
            assert server.commit(given.leases[1:]) == [p.Settled.DONE]
        else:
            assert set(server.commit(old)) <= {p.Settled.STALE}
            assert set(server.commit(given.leases)) == {p.Settled.DONE}
            pin = server.pin("a")
            assert pin not in pins
            pins.add(pin)
        leases |= {lease for lease in given.leases if lease}
        server.store.close()
        loss(directory, before)


def test_numbers_are_exact_in_json():
    service = MetadataService(DEFAULTS)
    service.initialize(p.Initialize(scopes=SCOPES), NOW)
    given = service.reserve(
        p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=["a"])]), NOW
    ).scopes[0]
    assert 0 < given.leases[0] < 2**53
    assert 0 < given.generations[0] < 2**53
    assert msgspec.json.decode(msgspec.json.encode(float(given.leases[0]))) == given.leases[0]


def test_generations_grow_where_a_slot_is_ahead_of_the_leases():
    """A store may come from a server whose clock was ahead."""
    scope = Scope(SCOPES[0], 0.0)
    ahead = 2**52
    for number, keys in enumerate((["a", "b"], ["c", "d"], ["e", "f"])):
        _, slots, leases = scope.reserve(keys, (), "", 100 * (number + 1), NOW, NOW + 1)
        assert [scope.table.generations[slot] for slot in slots] == (
            [100, 101] if not number else [ahead + number, 200 + 100 * (number - 1) + 1]
        )
        scope.abort(leases, NOW)
        if not number:
            scope.table.generations[0] = ahead
