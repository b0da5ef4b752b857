"""Scopes that are removed: when, by whom, and what stays of them."""

from __future__ import annotations

import asyncio
import sqlite3

import msgspec
import pytest

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_storage.tools.doctor import DoctorTarget, Status
from hicache_storage.tools.doctor.round_trip import check_round_trip
from tests.metadata_server import services
from tests.metadata_server.http_calls import (
    SlowStore,
    eventually,
    of_keys,
    running,
    running_on_disk,
    running_shared,
)
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.metadata_server.servers import served
from tests.metadata_server.services import NOW
from tests.support.commands import run_metadata
from tests.support.metadata import HttpClient

LIMITS = msgspec.structs.replace(DEFAULTS, quarantine_seconds=0.2, min_lease_seconds=0.1)


@pytest.fixture(scope="module", params=["sqlite", "redis", "cluster"])
def serving(request, tmp_path_factory):
    """Factory of servers, one after the other on one store."""
    directory = tmp_path_factory.mktemp("drop")
    if request.param == "sqlite":
        yield lambda: running_on_disk(directory, quarantine_seconds=0.2)
        return
    with (redis_server if request.param == "redis" else redis_cluster)(directory) as store:
        yield lambda: running_shared(store.url, LIMITS)


async def drop(caller, *names):
    return await caller.post("/v2/drop", {"scopes": list(names)})


async def dropped(caller, *names):
    """Ask until the quarantine is over."""

    async def over():
        reply = await drop(caller, *names)
        return reply.status != 409 and reply

    return await eventually(over)


async def test_a_scope_in_use_stays_and_an_empty_one_goes(serving):
    """MD-OPS-6."""
    async with serving() as caller:
        await caller.initialize("0:kv", "0:other", "0:held", slots=8)
        assert (await caller.store("0:kv", ["a", "b"])).status == 200
        leases = (await caller.reserve("0:held", ["a"])).json["scopes"][0]["leases"]
        assert (await drop(caller, "0:held")).status == 409
        await caller.post("/v2/abort", {"scopes": [{"scope": "0:held", "leases": leases}]})
        refused = await drop(caller, "0:other", "0:kv")
        assert (refused.status, refused.json["code"]) == (409, "in_use")
        assert refused.json["field"] == "scopes[1]"
        assert "2 slots" in refused.json["message"]
        assert refused.headers["retry-after"] == "1"
        await caller.post("/v2/clear", {"scopes": ["0:kv"]})
        assert (await drop(caller, "0:other", "0:none")).status == 404
        assert len(await caller.scopes()) == 3, "all are dropped or none"
        reply = await dropped(caller, "0:kv", "0:other", "0:held")
        assert (reply.status, reply.json) == (200, {"slots": [8, 8, 8]})
        assert await caller.scopes() == {}
        gone = await drop(caller, "0:kv")
        assert (gone.status, gone.json["code"]) == (404, "unknown_scope")
    async with serving() as caller:
        assert await caller.scopes() == {}
        # Of another size than before: nothing of the old one is left.
        assert (await caller.initialize("0:kv", slots=4)).status == 200
        assert (await caller.store("0:kv", ["c"])).status == 200
    async with serving() as caller:
        assert await caller.live("0:kv", ["a", "c"]) == ["c"]
        assert (await caller.post("/v2/fsck", {})).json["problems"] == []


async def test_no_heartbeat_takes_a_scope_that_is_being_dropped(tmp_path, monkeypatch):
    with redis_server(tmp_path) as redis:
        async with running_shared(redis.url, LIMITS) as caller:
            await caller.initialize("0:kv")
            owner, beats = caller.app.handlers.owner, []
            publish = owner.publish

            async def beat_and_publish(entries):
                await owner.beat()
                beats.append(sorted(caller.service.scopes))
                await publish(entries)

            monkeypatch.setattr(owner, "publish", beat_and_publish)
            assert (await drop(caller, "0:kv")).status == 200
            await owner.beat()
            assert beats == [[]]
            assert await caller.scopes() == {}


async def test_the_name_of_its_model_goes_with_it(serving):
    async def model_of(caller):
        return (await caller.scopes())["0:named"]["model"]

    async def describe(caller, model):
        return await caller.post("/v2/describe", {"scope": "0:named", "model": model})

    async with serving() as caller:
        await caller.initialize("0:named", slots=8)
        assert await model_of(caller) == ""
        for model in ("м" * 512, "org/первая", 'the "last" \\ one', 'the "last" \\ one'):
            assert (await describe(caller, model)).status == 204
        assert (await describe(caller, "a\nb")).json["field"] == "model"
        assert await model_of(caller) == 'the "last" \\ one'
    async with serving() as caller:
        assert await model_of(caller) == 'the "last" \\ one', "it survives a restart"
        await caller.post("/v2/clear", {"scopes": ["0:named"]})
        await caller.initialize("0:named", slots=8)
        assert await model_of(caller) == 'the "last" \\ one'
        assert (await dropped(caller, "0:named")).status == 200
        refused = await describe(caller, "m")
        assert (refused.status, refused.json["field"]) == (404, "scope")
        await caller.initialize("0:named", slots=8)
        assert await model_of(caller) == ""
        assert (await dropped(caller, "0:named")).status == 200


async def test_another_server_of_the_store_forgets_it_too(tmp_path):
    peers = {}
    with redis_server(tmp_path) as redis:
        async with (
            running_shared(redis.url, LIMITS, name="http://one", peers=peers) as one,
            running_shared(redis.url, LIMITS, name="http://two", peers=peers) as two,
        ):
            await one.initialize("0:kv")
            assert await two.live("0:kv", ["a"]) == []
            assert (await drop(one, "0:kv")).status == 200
            refused = await two.post("/v2/lookup", of_keys("0:kv", ["a"]))
            assert (refused.status, refused.json["code"]) == (404, "unknown_scope")
            assert (await two.initialize("0:kv", slots=2)).status == 200
            assert (await one.store("0:kv", ["a"])).status == 200
            assert (await one.initialize("0:other")).status == 200
            assert (await drop(two, "0:other")).status == 200
            assert not redis.client().keys("hm:{0:other}*")


@pytest.mark.parametrize("compacts", [False, True])
def test_nothing_of_it_is_left_in_the_file(tmp_path, compacts):
    """Folded before or after, in the log or not, killed in between: never two scopes under one
    number."""
    store, service = services.opened(tmp_path)
    for number in range(3):
        services.initialize(service, "0:kv", slots=100 + number)
        services.reserve(service, [f"k{i}" for i in range(90)])
        store.write(service.take_changes())
        if compacts:
            store.compact(store.collect(service.scope_of), NOW)
        services.clear(service)
        service.settle(NOW + 100, 10**6)
        services.drop(service, now=NOW + 100)
        store.write(service.take_changes())
    if compacts:
        services.compact_all(store, service)
    services.killed(store)
    store, service = services.opened(tmp_path, NOW + 101)
    assert service.scopes == {}
    store.close()
    with sqlite3.connect(tmp_path / "m.db") as database:
        assert database.execute("SELECT count(*) FROM blocks").fetchone() == (0,)
        assert database.execute("SELECT count(*) FROM scopes").fetchone() == (0,)


async def test_what_could_not_be_written_of_it_is_not_written_later():
    store = SlowStore()
    async with running(store, MetadataService(LIMITS)) as caller:
        await caller.initialize("0:kv")
        store.error = StoreError("the disk is full")
        reserve = {**of_keys("0:kv", ["a"]), "lease_seconds": 0.1}
        assert (await caller.post("/v2/reserve", reserve)).status == 503
        await caller.post("/v2/clear", {"scopes": ["0:kv"]})
        # Every answer is 503 now, also that to a drop that the quarantine refuses.
        while "0:kv" in caller.service.scopes:
            assert (await drop(caller, "0:kv")).status == 503
            await asyncio.sleep(0.05)
        store.error = None
        assert (await caller.initialize("0:kv", slots=4)).status == 200
        records = [record for group in store.written for record in group.scopes]
        [last] = [record.number for record in records if record.geometry.slots == 4]
        gone = [number for group in store.written for number in group.dropped]
        assert last not in gone
        assert 1 in gone


@pytest.fixture(scope="module")
def place():
    with served() as (place, _):
        yield place


def test_the_command_waits_for_the_quarantine(place):
    client = HttpClient(place.url)
    client.post("/0/initialize", {"num_pages": 50})
    client.post("/0/reserve_and_allocate_page_indices", {"keys": [["k", ""]]})
    refused = run_metadata("scopes", "delete", "0:kv", "--url", place.url)
    assert refused.exit_code == 2
    assert "clear it" in refused.stderr
    lost = run_metadata("scopes", "--url", place.url, "delete", "0:kv")
    assert (lost.exit_code, lost.stderr) == (2, "options belong behind `delete`\n")
    done = run_metadata("scopes", "delete", "0:kv", "0:kv", "--force", "--yes", "--url", place.url)
    assert (done.exit_code, done.stdout) == (0, "0:kv: deleted\n"), done.stderr
    assert run_metadata("scopes", "--json", "--url", place.url).stdout == ""


def test_doctor_leaves_no_scope_behind(tmp_path, place):
    """Two examinations with different sizes of the file: the first once left a scope that refused
    the second."""
    for size in ("64MiB", "16MiB"):
        options = {
            "path": f"{tmp_path}/store",
            "metadata_url": place.url,
            "file_size": size,
        }
        findings = list(check_round_trip(DoctorTarget(driver="hf3fs", options=options)))
        assert {finding.status for finding in findings} == {Status.OK}, findings
        listed = run_metadata("scopes", "--json", "--url", place.url)
        assert listed.stdout == ""
        assert [file.name for file in (tmp_path / "store").iterdir()] == ["store.id"]
