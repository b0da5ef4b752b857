"""Copies and backups of shared stores."""

from __future__ import annotations

import random
import time
from contextlib import closing

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.backup.offline import opened_store, snapshot_of
from hicache_metadata_server.backup.target import fill, open_target
from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.slot_table import LEASED, QUARANTINED
from hicache_metadata_server.core.snapshot_parts import Pages
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.metadata_server.servers import SERVE, served
from tests.metadata_server.test_snapshots import Engine, address, live, write
from tests.support.commands import run_metadata

SCOPE = p.ScopeGeometry(scope="0:kv", slots=8)
PART = p.ReserveScope(scope="0:kv", keys=["a"])


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
    with opened_store(url) as store:
        assert live(store) == live(engine.service)
        assert store.tenants.of_scope == engine.service.tenants.of_scope
        assert {name: scope.model for name, scope in store.scopes.items()} == models
        for name in ("0:kv", "1:kv"):
            scope, there = engine.service.scopes[name], store.scopes[name].table
            held = [slot for slot, state in enumerate(scope.table.states) if state == LEASED]
            assert {there.states[slot] for slot in held} <= {QUARANTINED}, (
                "an old writer may still write there"
            )
            assert all(
                there.generations[slot] == generation
                for slot, generation in enumerate(scope.table.generations)
                if generation
            )
    back = run_metadata("copy", url, address(tmp_path / "b.db"))
    assert back.exit_code == 0, back.output
    with opened_store(address(tmp_path / "b.db")) as service:
        assert service.tenants.of_scope == engine.service.tenants.of_scope
        assert {name: scope.model for name, scope in service.scopes.items()} == models
        assert live(service) == live(engine.service)
        assert service.counters().lease >= engine.service.counters().lease
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
    with opened_store(url) as store:
        assert list(store.scopes) == ["0:kv"]
        assert live(store) == {
            place: page for place, page in live(engine.service).items() if place[0] == "0:kv"
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
    with opened_store(url) as store:
        assert live(store) == live(engine.service)


@pytest.mark.long
def test_a_copy_from_servers_that_share_a_store_drains_them_all(url, tmp_path):
    """One that is not named would take the scopes of those that drain, and go on."""
    command = f"{SERVE} --quarantine-seconds 0 --store {url} --durability none"
    with served(command) as (one, client), served(command) as (other, _):
        client.call("/v2/initialize", p.Initialize(scopes=[SCOPE]), p.Initialized)
        leases = client.call("/v2/reserve", p.Reserve(scopes=[PART]), p.Leases).scopes[0].leases
        part = p.CommitScope(scope="0:kv", leases=leases, lengths=[9], checksums=[7])
        client.call("/v2/commit", p.Commit(scopes=[part]), p.SettledLeases)
        alone = run_metadata("copy", one.url, address(tmp_path / "a.db"), "--wait", "5")
        assert alone.exit_code == 2, alone.output
        assert f"{other.url}: shares the store" in alone.output.replace("\n", " ")
        assert run_metadata("status", "--url", one.url).exit_code == 0, "it gives leases again"
        both = run_metadata("copy", f"{one.url},{other.url}", address(tmp_path / "b.db"))
        assert both.exit_code == 0, both.output
        assert "The servers give no new leases: stop them" in both.output
        for server in (one, other):
            assert run_metadata("status", "--url", server.url).exit_code == 1, "it drains"
        with opened_store(address(tmp_path / "b.db")) as service:
            assert [(place, page[2]) for place, page in live(service).items()] == [
                (("0:kv", "a"), 9)
            ]


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
    with opened_store(url) as store:
        assert live(store) == {
            ("0:kv", "a"): (3, 1, 7, 8, ""),
            ("0:kv", "b\0"): (50, 1, 7, 2**64 - 1, "a"),
            ("0:kv", "ключ"): (20, 1, 7, 9, ""),
        }
        asked = p.Reserve(scopes=[p.ReserveScope(scope="0:kv", keys=[f"n{i}" for i in range(57)])])
        slots = store.reserve(asked, time.time()).scopes[0].slots
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
        assert client.keys("hm:{0:*") == []
        assert client.hgetall("hm:{map}:scopes") == {}


@pytest.mark.long
def test_servers_that_use_a_store_are_named(url, tmp_path):
    with served(f"{SERVE} --store {url} --durability none") as (server, client):
        client.call("/v2/initialize", p.Initialize(scopes=[SCOPE]), p.Initialized)
        for arguments in (
            ("fsck", "--store", url),
            ("backup", url, tmp_path / "b"),
            ("copy", url, address(tmp_path / "a.db")),
        ):
            done = run_metadata(*arguments)
            assert (done.exit_code, f"the server {server.url} uses" in done.output) == (2, True)
        # Through the server.
        assert run_metadata("backup", server.url, tmp_path / "b").exit_code == 0
        assert run_metadata("fsck", "--url", server.url).exit_code == 0
        client.call("/v2/reserve", p.Reserve(scopes=[PART]), p.Leases)
        server.kill()
    # It was killed, and its record is there until its lease has ended.
    done = run_metadata("fsck", "--store", url)
    assert (done.exit_code, done.output.strip()) == (0, "8 slots checked, no problems")


def test_a_store_of_an_earlier_version_is_refused(url, place):
    with place.client() as client:
        client.hset("hm:{scopes}", "0:kv", "")
    done = run_metadata("fsck", "--store", url)
    assert done.exit_code == 2
    assert "back it up with that version" in done.output


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:Call to '__init__' function with deprecated usage:DeprecationWarning"
)
def test_on_a_cluster(tmp_path):
    engine = filled(seed=9)
    write(tmp_path / "a.db", engine.service)
    with redis_cluster(tmp_path) as cluster:
        done = run_metadata("copy", address(tmp_path / "a.db"), cluster.url)
        assert done.exit_code == 0, done.output
        with opened_store(cluster.url) as store:
            assert live(store) == live(engine.service)
        assert run_metadata("copy", cluster.url, address(tmp_path / "b.db")).exit_code == 0
    with opened_store(address(tmp_path / "b.db")) as service:
        assert live(service) == live(engine.service)


def test_no_redis():
    done = run_metadata("copy", "redis://127.0.0.1:9/0", "redis://127.0.0.1:9/1")
    assert done.exit_code == 2
    assert "127.0.0.1:9" in done.output
