"""Scopes that are removed: when, by whom, and what stays of them."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError, StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.server import restored_service
from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage.factory import open_store
from hicache_storage.tools.doctor import DoctorTarget, Status
from hicache_storage.tools.doctor.round_trip import check_round_trip
from tests.metadata_server.http_calls import SlowStore, running, running_shared
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.metadata_server.servers import served
from tests.support.commands import run_metadata

NOW = 1_700_000_000.0
LIMITS = msgspec.structs.replace(DEFAULTS, quarantine_seconds=0.2, min_lease_seconds=0.1)


def scope(name="0:kv", slots=8):
    return {"scopes": [{"scope": name, "slots": slots}]}


@asynccontextmanager
async def on_sqlite(directory):
    store = open_store(f"sqlite:///{directory}/m.db")
    settings = ServerSettings(quarantine_seconds=0.2)
    async with running(store, restored_service(store, settings, time.time())) as caller:
        yield caller


@pytest.fixture(scope="module", params=["sqlite", "redis", "cluster"])
def serving(request, tmp_path_factory):
    """Factory of servers, one after the other on one store."""
    directory = tmp_path_factory.mktemp("drop")
    if request.param == "sqlite":
        yield lambda: on_sqlite(directory)
    elif request.param == "redis":
        with redis_server(directory) as redis:
            yield lambda: running_shared(redis.url, LIMITS)
    else:
        with redis_cluster(directory) as cluster:
            yield lambda: running_shared(cluster.url, LIMITS)


async def dropped(caller, *names):
    """Ask until the quarantine is over."""
    for _ in range(200):
        reply = await caller.post("/v2/drop", {"scopes": list(names)})
        if reply.status != 409:
            return reply
        await asyncio.sleep(0.02)
    raise AssertionError(reply)


async def test_a_scope_in_use_stays_and_an_empty_one_goes(serving):
    async with serving() as caller:
        await caller.post("/v2/initialize", scope("0:kv"))
        await caller.post("/v2/initialize", scope("0:other"))
        assert (await caller.store("0:kv", ["a", "b"])).status == 200
        refused = await caller.post("/v2/drop", {"scopes": ["0:other", "0:kv"]})
        assert (refused.status, refused.json["code"], refused.json["field"]) == (
            409,
            "in_use",
            "scopes[1]",
        )
        assert "2 slots" in refused.json["message"]
        assert refused.headers["retry-after"] == "1"
        await caller.post("/v2/clear", {"scopes": ["0:kv"]})
        assert (await caller.post("/v2/drop", {"scopes": ["0:kv"]})).status == 409, (
            "its slots are quarantined"
        )
        assert [
            one["scope"] for one in (await caller.send("GET", "/v2/scopes")).json["scopes"]
        ] == ["0:kv", "0:other"]
        reply = await dropped(caller, "0:kv", "0:other")
        assert (reply.status, reply.json) == (200, {"slots": [8, 8]})
        assert (await caller.send("GET", "/v2/scopes")).json == {"scopes": []}
        gone = await caller.post("/v2/drop", {"scopes": ["0:kv"]})
        assert (gone.status, gone.json["code"]) == (404, "unknown_scope")
    async with serving() as caller:
        assert (await caller.send("GET", "/v2/scopes")).json == {"scopes": []}
        # Of another size than before: nothing of the old one is left.
        assert (await caller.post("/v2/initialize", scope("0:kv", slots=4))).status == 200
        assert (await caller.store("0:kv", ["c"])).status == 200
    async with serving() as caller:
        found = await caller.post("/v2/lookup", {"scopes": [{"scope": "0:kv", "keys": ["a", "c"]}]})
        assert [slot >= 0 for slot in found.json["scopes"][0]["slots"]] == [False, True]
        assert (await caller.post("/v2/fsck", {})).json["problems"] == []


async def test_no_heartbeat_takes_a_scope_that_is_being_dropped(tmp_path, monkeypatch):
    with redis_server(tmp_path) as redis:
        async with running_shared(redis.url, LIMITS) as caller:
            await caller.post("/v2/initialize", scope("0:kv"))
            owner = caller.app.server.handlers.owner
            append, forget, beats = owner._store.append, owner.forget, []

            async def beat_and(action, argument):
                await owner.beat()
                beats.append(sorted(caller.service.scopes))
                await action(argument)

            monkeypatch.setattr(owner._store, "append", partial(beat_and, append))
            monkeypatch.setattr(owner, "forget", partial(beat_and, forget))
            reply = await caller.post("/v2/drop", {"scopes": ["0:kv"]})
            assert (reply.status, reply.json) == (200, {"slots": [8]})
            assert beats == [[], []]
            await owner.beat()
            assert (await caller.send("GET", "/v2/scopes")).json == {"scopes": []}


async def test_a_leased_and_a_pinned_slot_keep_their_scope(serving):
    async with serving() as caller:
        await caller.post("/v2/initialize", scope("0:held"))
        part = {"scope": "0:held", "keys": ["a"]}
        leases = (await caller.post("/v2/reserve", {"scopes": [part]})).json["scopes"][0]["leases"]
        assert (await caller.post("/v2/drop", {"scopes": ["0:held"]})).status == 409
        commit = {"scope": "0:held", "leases": leases, "lengths": [1], "checksums": [1]}
        assert (await caller.post("/v2/commit", {"scopes": [commit]})).status == 200
        pin = (await caller.post("/v2/lookup", {"scopes": [part], "pin_seconds": 60})).json["pin"]
        await caller.post("/v2/delete", {"scopes": [part]})
        await asyncio.sleep(0.3)
        assert (await caller.post("/v2/drop", {"scopes": ["0:held"]})).status == 409
        assert (await caller.post("/v2/unpin", {"pins": [pin]})).status == 204
        assert (await dropped(caller, "0:held")).status == 200


async def test_the_name_of_its_model_goes_with_it(serving):
    async def model_of(caller):
        listed = (await caller.send("GET", "/v2/scopes")).json["scopes"]
        return {one["scope"]: one["model"] for one in listed}["0:named"]

    async with serving() as caller:
        await caller.post("/v2/initialize", scope("0:named"))
        assert await model_of(caller) == ""
        for model in ("org/первая", 'the "last" \\ one', 'the "last" \\ one'):
            assert (
                await caller.post("/v2/describe", {"scope": "0:named", "model": model})
            ).status == 204
        # Text that a terminal obeys, hides or turns around.
        for model in ("", "a\x1b[2Jb", "a\nb", "a\u200bb", "a\u202eb"):
            refused = await caller.post("/v2/describe", {"scope": "0:named", "model": model})
            assert (refused.status, refused.json["field"]) == (422, "model")
        assert await model_of(caller) == 'the "last" \\ one'
    async with serving() as caller:
        assert await model_of(caller) == 'the "last" \\ one', "it survives a restart"
        await caller.post("/v2/clear", {"scopes": ["0:named"]})
        await caller.post("/v2/initialize", scope("0:named"))
        assert await model_of(caller) == 'the "last" \\ one'
        assert (await dropped(caller, "0:named")).status == 200
        refused = await caller.post("/v2/describe", {"scope": "0:named", "model": "m"})
        assert (refused.status, refused.json["code"], refused.json["field"]) == (
            404,
            "unknown_scope",
            "scope",
        )
        await caller.post("/v2/initialize", scope("0:named"))
        assert await model_of(caller) == ""
        assert (await dropped(caller, "0:named")).status == 200


async def test_another_server_of_the_store_forgets_it_too(tmp_path):
    peers = {}
    with redis_server(tmp_path) as redis:
        async with (
            running_shared(redis.url, LIMITS, name="http://one", peers=peers) as one,
            running_shared(redis.url, LIMITS, name="http://two", peers=peers) as two,
        ):
            await one.post("/v2/initialize", scope())
            assert (
                await two.post("/v2/lookup", {"scopes": [{"scope": "0:kv", "keys": ["a"]}]})
            ).status == 200
            assert (await one.post("/v2/drop", {"scopes": ["0:kv"]})).status == 200
            refused = await two.post("/v2/lookup", {"scopes": [{"scope": "0:kv", "keys": ["a"]}]})
            assert (refused.status, refused.json["code"]) == (404, "unknown_scope")
            assert (await two.post("/v2/initialize", scope(slots=2))).status == 200
            assert (await one.store("0:kv", ["a"])).status == 200
            assert (await one.post("/v2/initialize", scope("0:other"))).status == 200
            assert (await two.post("/v2/drop", {"scopes": ["0:other"]})).status == 200
            assert not redis.client().keys("hm:{0:other}*")


def part(kind, name, **columns):
    return kind(
        scopes=[{p.Reserve: p.ReserveScope, p.Delete: p.DeleteScope}[kind](scope=name, **columns)]
    )


def test_nothing_of_it_is_left_in_the_file(tmp_path):
    """Folded before or after, in the log or not, killed in between: never two scopes under one
    number."""
    address = f"sqlite:///{tmp_path}/m.db"

    def opened(now):
        store = open_store(address)
        service = MetadataService(DEFAULTS, durability=store.durability)
        service.restore(store.recover(now), store.rows, now)
        return store, service

    for compacts in (False, True):
        store, service = opened(NOW)
        for number in range(3):
            service.initialize(
                p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=100 + number)]), NOW
            )
            service.reserve(part(p.Reserve, "0:kv", keys=[f"k{i}" for i in range(90)]), NOW)
            store.write(service.take_changes())
            if compacts:
                store.compact(store.collect(service.scope_of), NOW)
            service.clear(p.Clear(scopes=["0:kv"]), NOW)
            service.settle(NOW + 100, 10**6)
            service.drop(p.Drop(scopes=["0:kv"]), NOW + 100)
            store.write(service.take_changes())
        while compacts and store.wants_compaction(idle=True):
            store.compact(store.collect(service.scope_of), NOW)
        store._lock.release()
        store, service = opened(NOW + 101)
        assert service.scopes == {}
        store.close()
        with sqlite3.connect(tmp_path / "m.db") as database:
            assert database.execute("SELECT count(*) FROM blocks").fetchone() == (0,)
            assert database.execute("SELECT count(*) FROM scopes").fetchone() == (0,)


async def test_what_could_not_be_written_of_it_is_not_written_later():
    store = SlowStore()
    async with running(store, MetadataService(LIMITS)) as caller:
        await caller.post("/v2/initialize", scope())
        store.error = StoreError("the disk is full")
        reserve = {"scopes": [{"scope": "0:kv", "keys": ["a"]}], "lease_seconds": 0.1}
        assert (await caller.post("/v2/reserve", reserve)).status == 503
        await caller.post("/v2/clear", {"scopes": ["0:kv"]})
        # Every answer is 503 now, also that to a drop that the quarantine refuses.
        while "0:kv" in caller.service.scopes:
            assert (await caller.post("/v2/drop", {"scopes": ["0:kv"]})).status == 503
            await asyncio.sleep(0.05)
        store.error = None
        assert (await caller.post("/v2/initialize", scope(slots=4))).status == 200
        [last] = [
            record
            for group in store.written
            for record in group.scopes
            if record.geometry.slots == 4
        ]
        assert last.number not in [number for group in store.written for number in group.dropped]
        assert 1 in [number for group in store.written for number in group.dropped]


def test_all_are_dropped_or_none():
    service = MetadataService()
    service.initialize(p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=4)]), NOW)
    with pytest.raises(RequestError, match="not initialized"):
        service.drop(p.Drop(scopes=["0:kv", "0:none"]), NOW)
    assert list(service.scopes) == ["0:kv"], "all or none"


def test_the_command_waits_for_the_quarantine(tmp_path):
    with served() as (place, client):
        client.http.post("/0/initialize", {"num_pages": 50})
        client.http.post("/0/reserve_and_allocate_page_indices", {"keys": [["k", ""]]})
        refused = run_metadata("scopes", "delete", "0:kv", "--url", place.url)
        assert refused.exit_code == 2
        assert "clear it" in refused.stderr
        lost = run_metadata("scopes", "--url", place.url, "delete", "0:kv")
        assert (lost.exit_code, lost.stderr) == (2, "options belong behind `delete`\n")
        done = run_metadata(
            "scopes", "delete", "0:kv", "0:kv", "--force", "--yes", "--url", place.url
        )
        assert (done.exit_code, done.stdout) == (0, "0:kv: deleted\n"), done.stderr
        assert run_metadata("scopes", "--json", "--url", place.url).stdout == ""


def test_doctor_leaves_no_scope_behind(tmp_path):
    """Two examinations with different sizes of the file: the first once left a scope that refused
    the second."""
    with served() as (place, _):
        for size in ("64MiB", "16MiB"):
            options = {
                "path": f"{tmp_path}/store",
                "metadata_url": place.url,
                "file_size": size,
                "preallocate": "false",
            }
            findings = list(check_round_trip(DoctorTarget(driver="hf3fs", options=options)))
            assert {finding.status for finding in findings} == {Status.OK}, findings
            listed = run_metadata("scopes", "--json", "--url", place.url)
            assert listed.stdout == ""
            assert [file.name for file in (tmp_path / "store").iterdir()] == ["store.id"]
