"""Copies and backups of shared stores."""

from __future__ import annotations

import random
import time
from contextlib import closing

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.backup.offline import opened_store, snapshot_of
from hicache_metadata_server.backup.redis import SharedStoreClient
from hicache_metadata_server.backup.target import fill, open_target
from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.snapshot_parts import Pages
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.metadata_server.test_snapshots import Engine, address, live, write
from tests.support.commands import run_metadata


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def url(place):
    with place.client() as client:
        client.flushall()
    return place.url


def filled(steps=80, seed=7, slots=60):
    engine = Engine(MetadataService(), random.Random(seed), slots=slots)
    engine.now = time.time()
    for _ in range(steps):
        engine.step()
    return engine


def bare(pages):
    """Without generations, which are others in a shared store."""
    return {place: (page[0], *page[2:]) for place, page in pages.items()}


def pages_of(store):
    found = {}
    for scope in store.call("/v2/scopes", None, p.Scopes).scopes:
        told = store.call(
            "/v2/inspect", p.Inspect(scope=scope.scope, slots=list(range(scope.slots))), p.Inspected
        ).slots
        found |= {
            (scope.scope, one.key): (one.slot, one.length, one.checksum, one.prefix)
            for one in told
            if one.state is p.SlotState.LIVE
        }
    return found


def test_there_and_back(url, tmp_path):
    engine = filled()
    engine.service.tenants.of_scope["1:kv"] = "acme"
    models = {"0:kv": "org/модель", "1:kv": ""}
    engine.service.describe(p.Describe(scope="0:kv", model=models["0:kv"]), engine.now)
    write(tmp_path / "a.db", engine.service)
    done = run_metadata("copy", address(tmp_path / "a.db"), url)
    assert done.exit_code == 0, done.output
    assert run_metadata("fsck", "--store", url).exit_code == 0
    assert "holds scopes already" in run_metadata("copy", address(tmp_path / "a.db"), url).output
    with SharedStoreClient(url) as store:
        assert pages_of(store) == bare(live(engine.service))
        told = store.call("/v2/scopes", None, p.Scopes).scopes
        assert {one.scope: one.tenant for one in told} == engine.service.tenants.of_scope
        assert {one.scope: one.model for one in told} == models
        for name in ("0:kv", "1:kv"):
            scope = engine.service.scopes[name]
            held = [slot for slot, state in enumerate(scope.table.states) if state == 1]
            told = store.call("/v2/inspect", p.Inspect(scope=name, slots=held), p.Inspected).slots
            assert {one.state for one in told} <= {p.SlotState.QUARANTINED}, (
                "an old writer may still write there"
            )
            used = [slot for slot in range(len(scope.table)) if scope.table.generations[slot]]
            told = store.call("/v2/inspect", p.Inspect(scope=name, slots=used), p.Inspected).slots
            assert all(one.generation > scope.table.generations[one.slot] for one in told)
        # What is used last goes last.
        reserved = store.do(
            store.service.reserve(p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=["new"])]))
        )
        assert reserved.scopes[0].states[0] in (p.Reserved.LEASED, p.Reserved.FULL)
    back = run_metadata("copy", url, address(tmp_path / "b.db"))
    assert back.exit_code == 0, back.output
    with opened_store(address(tmp_path / "b.db")) as service:
        assert service.tenants.of_scope == engine.service.tenants.of_scope
        assert {name: scope.model for name, scope in service.scopes.items()} == models
        missing = bare(live(engine.service)).items() - bare(live(service)).items()
        assert len(missing) <= 1, "one may have gone to make room"
        assert service.counters().lease > max(reserved.scopes[0].leases)
        order = list(service.scopes["1:kv"].lru)
    before = [
        key for key in engine.service.scopes["1:kv"].lru if ("1:kv", key) in live(engine.service)
    ]
    by_lease = sorted(
        before,
        key=lambda key: engine.service.scopes["1:kv"].table.leases[
            live(engine.service)["1:kv", key][0]
        ],
    )
    assert order == by_lease, "the order of use is that of the leases, as after a restart"


def test_a_scope_is_left_behind(url, tmp_path):
    """By a copy of the store, and where that takes the store's own place."""
    engine = filled()
    write(tmp_path / "a.db", engine.service)
    assert run_metadata("copy", address(tmp_path / "a.db"), url).exit_code == 0
    done = run_metadata("copy", url, address(tmp_path / "b.db"), "--without", "1:kv")
    assert done.exit_code == 0, done.output
    assert run_metadata("copy", address(tmp_path / "b.db"), url, "--replace").exit_code == 0
    with SharedStoreClient(url) as store:
        assert [one.scope for one in store.call("/v2/scopes", None, p.Scopes).scopes] == ["0:kv"]
        assert pages_of(store) == {
            place: page for place, page in bare(live(engine.service)).items() if place[0] == "0:kv"
        }


def test_a_backup_of_a_shared_store(url, tmp_path):
    engine = filled(seed=3)
    write(tmp_path / "a.db", engine.service)
    assert run_metadata("copy", address(tmp_path / "a.db"), url).exit_code == 0
    done = run_metadata("backup", url, tmp_path / "r.backup")
    assert done.exit_code == 0, done.output
    assert run_metadata("restore", tmp_path / "r.backup", url).exit_code == 2
    assert run_metadata("restore", tmp_path / "r.backup", url, "--replace").exit_code == 0
    assert run_metadata("fsck", "--store", url).exit_code == 0
    with SharedStoreClient(url) as store:
        assert pages_of(store) == bare(live(engine.service))


def test_slots_that_nobody_has_used_between_others(url):
    """An imported store has them."""
    head = next(snapshot_of(filled(0).service, 0.0))
    pages = Pages(
        [3, 50, 20],
        [1, 1, 1],
        [1, 2, 3],
        [7, 7, 7],
        [8, 2**64 - 1, 9],
        ["a", "b\0", "ключ"],
        ["", "a", ""],
    )
    with closing(open_target(url, replace=False)) as target:
        fill(target, [head, pages])
        target.commit()
    assert run_metadata("fsck", "--store", url).exit_code == 0
    with SharedStoreClient(url) as store:
        assert pages_of(store) == {
            ("0:kv", "a"): (3, 7, 8, ""),
            ("0:kv", "b\0"): (50, 7, 2**64 - 1, "a"),
            ("0:kv", "ключ"): (20, 7, 9, ""),
        }
        asked = p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=[f"n{i}" for i in range(57)])])
        slots = store.do(store.service.reserve(asked)).scopes[0].slots
        assert sorted(slots) == [slot for slot in range(60) if slot not in (3, 20, 50)]


def test_what_fails_leaves_no_scope(url, place):
    def parts():
        yield from list(snapshot_of(filled().service, time.time()))[:2]
        raise SnapshotError("the source fails")

    with closing(open_target(url, replace=False)) as target, pytest.raises(SnapshotError):
        fill(target, parts())
    twice = Pages([0, 1], [1, 1], [1, 2], [7, 7], [7, 7], ["k", "k"], ["", ""])
    head = next(snapshot_of(filled(0).service, 0.0))
    with (
        closing(open_target(url, replace=False)) as target,
        pytest.raises(SnapshotError, match="is not what was read"),
    ):
        fill(target, [head, twice])
    with place.client() as client:
        assert client.dbsize() == 0


@pytest.mark.filterwarnings(
    "ignore:Call to '__init__' function with deprecated usage:DeprecationWarning"
)
def test_on_a_cluster(tmp_path):
    engine = filled(seed=9)
    write(tmp_path / "a.db", engine.service)
    with redis_cluster(tmp_path) as cluster:
        done = run_metadata("copy", address(tmp_path / "a.db"), cluster.url)
        assert done.exit_code == 0, done.output
        with SharedStoreClient(cluster.url) as store:
            assert pages_of(store) == bare(live(engine.service))
        assert run_metadata("copy", cluster.url, address(tmp_path / "b.db")).exit_code == 0
    with opened_store(address(tmp_path / "b.db")) as service:
        assert bare(live(service)) == bare(live(engine.service))


def test_no_redis():
    done = run_metadata("copy", "redis://127.0.0.1:9/0", "redis://127.0.0.1:9/1")
    assert done.exit_code == 2
    assert "127.0.0.1:9" in done.output
