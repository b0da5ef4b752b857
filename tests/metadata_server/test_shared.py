"""Several servers on one Redis, beyond the state machine: settings, faults, repeated requests, fsck."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from redis.exceptions import ClusterDownError
from structlog.testing import capture_logs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.shared.assembly import check_store, open_connection
from hicache_metadata_server.shared.catalog import MICROSECONDS
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.names import ScopeKeys
from hicache_metadata_server.shared.preflight import kept_by
from hicache_metadata_server.shared.service import SharedService
from hicache_metadata_server.storage.address import redacted
from tests.metadata_server.http_calls import running_shared
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.support.commands import run_metadata

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PARTS = (
    "meta",
    "slots",
    "live",
    "leased",
    "leases",
    "free",
    "expiring",
    "order",
    "aside",
    "resting",
    "children",
    "pins",
    "pinned",
    "holds",
)
NAMES = dict(zip(PARTS, ScopeKeys("0:kv").all, strict=False))


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("shared")) as server:
        yield server


@pytest.fixture
def empty(redis):
    redis.client().flushall()
    return redis


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as one:
        yield one


@asynccontextmanager
async def service_on(url: str, slots: int = 8, **limits: float) -> AsyncIterator[SharedService]:
    service = SharedService(
        open_connection(url),
        msgspec.structs.replace(DEFAULTS, **limits),
        durability=p.StoreDurability.NONE,
    )
    try:
        await service.initialize(p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=slots)]))
        yield service
    finally:
        await service.connection.close()


async def leased(
    service: SharedService, keys: list[str], prefixes: tuple[str, ...] = ()
) -> p.Leased:
    part = p.ReserveScope(scope="0:kv", keys=keys, prefixes=list(prefixes))
    return (await service.reserve(p.Reserve(scopes=[part]))).scopes[0]


async def stored(
    service: SharedService, keys: list[str], prefixes: tuple[str, ...] = ()
) -> p.Leased:
    found = await leased(service, keys, prefixes)
    part = p.CommitScope(
        scope="0:kv", leases=found.leases, lengths=[1] * len(keys), checksums=[7] * len(keys)
    )
    done = await service.commit(p.Commit(scopes=[part]))
    assert set(done.scopes[0].states) == {p.Settled.DONE}
    return found


# Settings.


def test_more_durability_than_redis_keeps_is_refused(tmp_path):
    with redis_server(tmp_path, appendonly="yes", appendfsync="everysec") as redis:
        client = redis.client()
        check_store(redis.url, p.StoreDurability.NONE)
        with pytest.raises(
            StoreError,
            match=r"appendfsync everysec.*keep durability 'none', not 'process'.*`appendfsync no`",
        ):
            check_store(redis.url, p.StoreDurability.PROCESS)
        client.config_set("appendfsync", "no")
        check_store(redis.url, p.StoreDurability.PROCESS)
        with pytest.raises(
            StoreError, match=r"keep durability 'process', not 'machine'.*`appendfsync always`"
        ):
            check_store(redis.url, p.StoreDurability.MACHINE)
        client.config_set("appendfsync", "always")
        check_store(redis.url, p.StoreDurability.MACHINE)
        client.config_set("appendonly", "no")
        with pytest.raises(StoreError, match="appendonly no"):
            check_store(redis.url, p.StoreDurability.PROCESS)


def test_a_redis_that_evicts_is_refused(tmp_path):
    with (
        redis_server(tmp_path, maxmemory_policy="allkeys-lru") as redis,
        pytest.raises(StoreError, match=r"maxmemory-policy is allkeys-lru.*set it to noeviction"),
    ):
        check_store(redis.url, p.StoreDurability.NONE)


def test_where_settings_are_not_told_the_operator_is_trusted(tmp_path):
    with redis_server(tmp_path, rename_command='CONFIG ""') as redis:
        check_store(redis.url, p.StoreDurability.MACHINE)


def test_a_replica_is_refused(redis, tmp_path):
    with (
        redis_server(tmp_path, replicaof=f"127.0.0.1 {redis.port}") as replica,
        pytest.raises(StoreError, match="this is a replica"),
    ):
        check_store(replica.url, p.StoreDurability.NONE)


def test_a_node_of_a_cluster_is_named_as_one(cluster):
    check_store(cluster.url, p.StoreDurability.NONE)
    with pytest.raises(StoreError, match=r"redis\+cluster://"):
        check_store(cluster.nodes[0].url, p.StoreDurability.NONE)
    with pytest.raises(StoreError, match="keep durability 'none', not 'process'"):
        check_store(cluster.url, p.StoreDurability.PROCESS)


def test_addresses():
    assert redacted("redis://user:secret@host:1/0") == "redis://***@host:1/0"
    assert redacted("redis+cluster://:secret@a:1,b:2") == "redis+cluster://***@a:1,b:2"
    assert redacted("unix:///run/redis.sock") == "unix:///run/redis.sock"
    with pytest.raises(ValueError, match=r"'nohost' is no HOST:PORT"):
        RedisConnection("redis+cluster://nohost")
    assert kept_by("yes", "unheard-of") is p.StoreDurability.NONE


def test_valkey_and_sockets_are_addresses_too(redis, tmp_path):
    check_store(redis.url.replace("redis", "valkey"), p.StoreDurability.NONE)
    with redis_server(tmp_path, unixsocket=tmp_path / "s"):
        check_store(f"unix://{tmp_path}/s", p.StoreDurability.NONE)


# Repeated requests.


@pytest.mark.parametrize("where", ["redis", "cluster"])
async def test_a_request_is_done_once_by_whichever_server_is_asked(where, request):
    store = request.getfixturevalue(where)

    limits = msgspec.structs.replace(DEFAULTS, idempotency_seconds=30)
    async with (
        running_shared(store.url, limits) as one,
        running_shared(store.url, limits) as two,
    ):
        scopes = [{"scope": f"{n}:once", "slots": 600} for n in range(3)]
        made = await one.post(
            "/v2/initialize", {"scopes": scopes}, headers={"idempotency-key": "i" + where}
        )
        again = await two.post(
            "/v2/initialize", {"scopes": scopes}, headers={"idempotency-key": "i" + where}
        )
        assert made.json == again.json == {"created": [True] * 3}
        # More than one piece, and several scopes.
        body = {
            "scopes": [
                {"scope": part["scope"], "keys": [f"k{i}" for i in range(300)]} for part in scopes
            ]
        }
        first = await one.post("/v2/reserve", body, headers={"idempotency-key": "r" + where})
        second = await two.post("/v2/reserve", body, headers={"idempotency-key": "r" + where})
        assert first.json == second.json
        assert {state for part in first.json["scopes"] for state in part["states"]} == {"leased"}
        for path, other in (
            ("/v2/reserve", {"scopes": []}),
            ("/v2/clear", {"scopes": ["1:once"]}),
            ("/v2/reserve", {"scopes": [{"scope": "2:once", "keys": ["new"]}]}),
        ):
            reply = await two.post(path, other, headers={"idempotency-key": "r" + where})
            assert (reply.status, reply.json["code"]) == (422, "key_reused"), path
        # What was refused is not remembered.
        refused = await one.post(
            "/v2/abort",
            {"scopes": [{"scope": "9:none", "leases": [1]}]},
            headers={"idempotency-key": "x" + where},
        )
        assert refused.status == 404
        assert (
            await one.post(
                "/v2/clear", {"scopes": ["0:once"]}, headers={"idempotency-key": "x" + where}
            )
        ).json == {"pages": [0]}


async def test_while_one_server_drains_the_others_go_on(empty):
    async with (
        running_shared(empty.url, DEFAULTS) as one,
        running_shared(empty.url, DEFAULTS) as two,
    ):
        await one.post("/v2/initialize", {"scopes": [{"scope": "0:kv", "slots": 8}]})
        body = {"scopes": [{"scope": "0:kv", "keys": ["a"]}]}
        first = await one.post("/v2/reserve", body, headers={"idempotency-key": "before"})
        assert (await one.post("/v2/drain", {"enabled": True})).json == {
            "enabled": True,
            "leases": 1,
        }
        assert (await one.post("/v2/reserve", body)).status == 503
        assert (
            await one.post("/v2/reserve", body, headers={"idempotency-key": "new"})
        ).status == 503
        assert (
            await one.post("/v2/reserve", body, headers={"idempotency-key": "before"})
        ).json == first.json
        assert (
            await one.post("/0/reserve_and_allocate_page_indices", {"keys": [["b", ""]]})
        ).json == {"indices": [[False, -1]]}
        assert (
            (await one.send("GET", "/readyz")).status,
            (await two.send("GET", "/readyz")).status,
        ) == (503, 200)
        assert (
            await two.post("/v2/reserve", {"scopes": [{"scope": "0:kv", "keys": ["c"]}]})
        ).status == 200


# Faults.


async def test_a_redis_that_hangs_or_is_gone_is_answered_503_and_found_again(tmp_path):
    async def ready(caller, status):
        for _ in range(600):
            if (await caller.send("GET", "/readyz")).status == status:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"/readyz does not become {status}")

    with redis_server(tmp_path, appendonly="yes", appendfsync="always") as redis:
        async with running_shared(redis.url, DEFAULTS) as caller:
            await caller.post("/v2/initialize", {"scopes": [{"scope": "0:kv", "slots": 8}]})
            assert (await caller.store("0:kv", ["a"])).status == 200
            body = {"scopes": [{"scope": "0:kv", "keys": ["a"]}]}
            for stop, go in ((redis.suspend, redis.resume), (redis.kill, redis.start)):
                stop()
                reply = await caller.post("/v2/lookup", body)
                assert (reply.status, reply.json["code"]) == (503, "unavailable")
                await ready(caller, 503)
                assert (await caller.send("GET", "/metrics")).status == 200
                assert (await caller.send("GET", "/healthz")).status == 200
                await asyncio.to_thread(go)
                await ready(caller, 200)
                assert (await caller.post("/v2/lookup", body)).json["scopes"][0]["slots"] == [0]


async def test_a_node_of_a_cluster_that_comes_back_is_found_again(tmp_path):
    scopes = [f"{number}:kv" for number in range(6)]

    with redis_cluster(tmp_path, appendonly="yes", appendfsync="always") as cluster:
        async with running_shared(cluster.url, DEFAULTS) as caller:
            declared = {"scopes": [{"scope": scope, "slots": 8} for scope in scopes]}
            # On a busy machine a node of the new cluster does not answer in time at first.
            while (reply := await caller.post("/v2/initialize", declared)).status == 503:
                await asyncio.sleep(0.05)
            assert reply.status == 200
            for scope in scopes:
                assert (await caller.store(scope, ["a"])).status == 200
            bodies = [{"scopes": [{"scope": scope, "keys": ["a"]}]} for scope in scopes]
            cluster.nodes[0].kill()
            statuses = [(await caller.post("/v2/lookup", body)).status for body in bodies]
            assert set(statuses) <= {200, 503}
            await asyncio.to_thread(cluster.nodes[0].start)
            await asyncio.to_thread(cluster.wait)
            for body in bodies:
                while (reply := await caller.post("/v2/lookup", body)).status == 503:
                    await asyncio.sleep(0.05)
                assert reply.json["scopes"][0]["slots"] == [0]
            assert (await caller.post("/v2/fsck", {})).json["problems"] == []


@pytest.mark.parametrize(
    "raised",
    [
        # A connection that another request's failure has closed.
        AttributeError("'NoneType' object has no attribute 'writelines'"),
        # A choice among nodes that another request's discovery has forgotten.
        IndexError("Cannot choose from an empty sequence"),
        ClusterDownError("The cluster is down"),
    ],
    ids=lambda raised: type(raised).__name__,
)
async def test_what_redis_py_raises_while_a_node_is_gone_is_a_store_error(raised, monkeypatch):
    async def fail(*_, **__):
        raise raised

    connection = RedisConnection("redis+cluster://127.0.0.1:1")
    monkeypatch.setattr(connection._client, "execute_command", fail)
    with capture_logs() as logs:
        with pytest.raises(StoreError, match=str(raised)):
            await connection.command("GET", "key")
        with pytest.raises(StoreError, match=str(raised)):
            await connection.commands([("GET", "key")])
    # `store_failing` tells it once for all requests.
    assert logs == []
    await connection.close()


async def test_a_redis_that_has_lost_everything_says_404_and_can_be_used_again(tmp_path):
    with redis_server(tmp_path) as redis:
        async with running_shared(redis.url, DEFAULTS) as caller:
            scopes = {"scopes": [{"scope": "0:kv", "slots": 8}]}
            await caller.post("/v2/initialize", scopes)
            assert (await caller.store("0:kv", ["a"])).status == 200
            redis.kill()
            await asyncio.to_thread(redis.start)
            body = {"scopes": [{"scope": "0:kv", "keys": ["a"]}]}
            # Whoever asks first may meet the old connection.
            while (reply := await caller.post("/v2/lookup", body)).status == 503:
                await asyncio.sleep(0.01)
            assert (reply.status, reply.json["field"]) == (404, "scopes[0].scope")
            assert (await caller.post("/v2/initialize", scopes)).json == {"created": [True]}
            assert (await caller.post("/v2/lookup", body)).json["scopes"][0]["slots"] == [-1]


async def test_a_scope_whose_server_died_while_it_made_it_is_made_by_the_next(empty):
    async with service_on(empty.url) as service:
        await service.connection.command("UNLINK", NAMES["meta"])
        # Nobody can tell that from a Redis that has lost the scope, and leases with it.
        assert (await leased(service, ["a"])).states == [p.Reserved.FULL]
        limits = service.limits
        service.catalog.clock_offset += round(
            (limits.max_lease_seconds + limits.quarantine_seconds + 1) * MICROSECONDS
        )
        assert (await leased(service, ["a"])).states == [p.Reserved.LEASED]


async def test_leases_of_a_redis_that_has_forgotten_them_are_given_to_nobody_again(empty):
    """As after a failover to a replica that lags behind: the counter is back where it was, the
    clock is not."""

    async with service_on(empty.url, quarantine_seconds=0) as service:
        before = await service.connection.command("HGET", NAMES["meta"], "lease")
        first = await leased(service, ["a"])
        empty.client().flushall()
        await service.initialize(p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=8)]))
        assert await service.connection.command("HGET", NAMES["meta"], "lease") == before
        other = await leased(service, ["b"])
        assert other.slots == first.slots
        assert other.leases[0] > first.leases[0]
        late = p.Commit(
            scopes=[p.CommitScope(scope="0:kv", leases=first.leases, lengths=[1], checksums=[1])]
        )
        assert (await service.commit(late)).scopes[0].states == [p.Settled.STALE]


# Much at once.


async def test_a_clear_is_taken_apart_bit_by_bit_and_so_is_the_next(empty):
    keys = [f"k{i}" for i in range(2600)]
    async with service_on(empty.url, 3000, quarantine_seconds=100) as service:
        await stored(service, keys)
        assert (await service.clear(p.Clear(scopes=["0:kv"]))).pages == [2600]
        await stored(service, keys[:90])
        assert (await service.clear(p.Clear(scopes=["0:kv"]))).pages == [90]
        raw = await service.connection.command("ZCARD", NAMES["resting"])
        assert raw < 2690, "not all of it at once"
        found = (
            await service.inspect(p.Inspect(scope="0:kv", slots=list(range(2690)), keys=keys[:3]))
        ).slots
        assert {one.state for one in found[:2690]} == {p.SlotState.QUARANTINED}
        assert all(0 < one.seconds_left <= 100 for one in found[:2690])
        assert found[2690:] == [None] * 3
        assert (await fsck(service, p.Fsck())).problems == []
        while await service.tick(32):
            pass
        (status,) = service.list_scopes().scopes
        assert (status.free, status.quarantined, status.live) == (310, 2690, 0)
        service.catalog.clock_offset = 200 * 10**6
        while await service.tick(32):
            pass
        assert service.list_scopes().scopes[0].free == 3000
        assert (await fsck(service, p.Fsck())).problems == []


@pytest.mark.parametrize("heads_first", [False, True])
async def test_long_chains_are_evicted_from_their_tails(empty, heads_first):
    keys = [f"k{i}" for i in range(500)]
    async with service_on(empty.url, 500, quarantine_seconds=0) as service:
        for start in range(0, 500, 100):
            some = keys[start : start + 100]
            await stored(
                service,
                some,
                tuple(keys[start - 1 + i] if start + i else "" for i in range(100)),
            )
        order = keys if heads_first else keys[::-1]
        # From the last key to the first: the first is the latest.
        await service.touch(p.Touch(scopes=[p.LookupScope(scope="0:kv", keys=order[::-1])]))
        for round_ in range(5):
            got = await leased(service, [f"n{round_}-{i}" for i in range(60)])
            assert (got.evicted, set(got.states)) == (60, {p.Reserved.LEASED})
            live = (
                (await service.touch(p.Touch(scopes=[p.LookupScope(scope="0:kv", keys=keys)])))
                .scopes[0]
                .done
            )
            left = 500 - 60 * (round_ + 1)
            assert live == [True] * left + [False] * (500 - left)
        assert (await fsck(service, p.Fsck())).problems == []


async def test_a_scope_of_some_size_keeps_slots_in_reserve(empty):
    async with service_on(empty.url, 1024, quarantine_seconds=100) as service:
        for start in range(0, 1024, 128):
            await stored(service, [f"k{i}" for i in range(start, start + 128)])
        assert (await leased(service, ["a", "b"])).states == [p.Reserved.FULL] * 2
        await service.look()
        assert service.list_scopes().scopes[0].quarantined > 2


# fsck, import, the command line.

PLANTED = {
    "a live slot that is free too": (("ZADD", "free", 0, "0"), "in the lists free, live"),
    "a live slot in no list": (("ZREM", "order", "0"), "slot 0 is live, and in no list"),
    "a live slot without a key": (("HDEL", "live", "a"), "slot 0 is live for a, which is in none"),
    "a key that leads elsewhere": (
        ("HSET", "live", "a", "1"),
        "slot 0 is live for a, which is in 1",
    ),
    "a key too many": (
        ("HSET", "live", "ghost", "1"),
        "key ghost is said to be live in slot 1, which has b",
    ),
    "a leased key too many": (
        ("HSET", "leased", "ghost", "2"),
        "key ghost is said to be leased in slot 2, which has c",
    ),
    "a key that is live and leased": (("HSET", "leased", "a", "0"), "key a is live and leased"),
    "a lease that is forgotten": (("DEL", "leases"), "which is for none"),
    "a lease too many": (("HSET", "leases", "77", "0"), "lease 77 is said to be for slot 0"),
    "a slot without a record": (("HDEL", "slots", "2"), "slot 2 has no record"),
    "a slot that was never used": (
        ("ZADD", "free", 0, "7"),
        "leads to slot 7, which was never used",
    ),
    "a leased slot that rests": (
        ("ZADD", "resting", 9e18, "2"),
        "in the lists leased, quarantined",
    ),
    "a lease without an end": (("ZREM", "expiring", "2"), "slot 2 is leased, and in no list"),
    "a lease with another end": (("ZADD", "expiring", "9e15", "2"), "and listed until"),
    "a quarantine for good": (("ZADD", "resting", "inf", "3"), "slot 3 is quarantined for good"),
    "a page that builds upon none": (
        ("HSET", "children", "b", 1),
        "0 live pages have the prefix 'b', and 1 are counted",
    ),
    "a page upon which more build": (
        ("HDEL", "children", "a"),
        "1 live pages have the prefix 'a', and 0 are counted",
    ),
    "a page kept for nothing": (("ZADD", "aside", 1, "1"), "in the lists live, aside"),
    "a pin on nothing": (("HSET", "holds", "1", 3), "slot 1 has 3 pins, and 1 are known"),
    "a pin without slots": (("DEL", "holds"), "has 0 pins, and 1 are known"),
    "a pin without an end": (("DEL", "pins"), "0 pieces of pins have an end"),
    "more slots than there are": (
        ("HSET", "meta", "fresh", 9),
        "there are 9 slots in a scope of 8",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_fsck_finds_what_is_planted(empty, name):
    (command, key, *values), said = PLANTED[name]

    async with service_on(empty.url, quarantine_seconds=1000) as service:
        await stored(service, ["a", "b"], ("", "a"))
        await leased(service, ["c"])
        await stored(service, ["gone"])
        await service.delete(p.Delete(scopes=[p.DeleteScope(scope="0:kv", keys=["gone"])]))
        await service.lookup(
            p.Lookup(scopes=[p.LookupScope(scope="0:kv", keys=["b"])], pin_seconds=60)
        )
        assert (await fsck(service, p.Fsck())).problems == []
        empty.client().execute_command(command, NAMES[key], *values)
        problems = (await fsck(service, p.Fsck(scopes=["0:kv"]))).problems
    assert any(said in problem for problem in problems), problems
    done = await asyncio.to_thread(run_metadata, "fsck", "--store", empty.url)
    assert done.exit_code == 1
    assert said in done.output


def test_fsck_of_a_store_that_nobody_serves(empty):
    done = run_metadata("fsck", "--store", empty.url)
    assert (done.exit_code, done.output.strip()) == (0, "0 slots checked, no problems")
    done = run_metadata("fsck", "0:kv", "--store", empty.url)
    assert done.exit_code == 2
    assert "scope '0:kv' is not initialized" in done.output


@pytest.mark.parametrize("where", ["redis", "cluster"])
async def test_import_of_sglangs_file(where, request, tmp_path):
    store = request.getfixturevalue(where)
    stored_pages = {f"k{i}": (7 * i) % 1000 for i in range(700)}
    free = [page for page in range(1000) if page not in stored_pages.values()]
    file = tmp_path / "m.json"
    file.write_text(
        json.dumps(
            {
                "3:kv": {
                    "num_pages": 1000,
                    "free_pages": free,
                    "key_to_index": list(stored_pages.items()),
                }
            }
        )
    )
    arguments = ["import", str(file), "--store", store.url]
    done = await asyncio.to_thread(run_metadata, *arguments)
    assert done.exit_code == 0, done.output
    assert "3:kv: 700 pages in 1,000 slots" in done.output
    again = await asyncio.to_thread(run_metadata, *arguments)
    assert again.exit_code == 2
    assert "the store has 3:kv already" in again.output

    async with running_shared(store.url, DEFAULTS) as caller:
        keys = [*stored_pages, "none"]
        found = await caller.post("/3/get_page_indices", {"keys": keys})
        assert found.json == {"indices": [*stored_pages.values(), None]}
        new = await caller.post(
            "/v2/reserve",
            {"scopes": [{"scope": "3:kv", "keys": [f"n{i}" for i in range(300)]}]},
        )
        assert sorted(new.json["scopes"][0]["slots"]) == free
        assert (await caller.post("/v2/fsck", {})).json["problems"] == []
