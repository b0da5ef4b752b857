"""A replica takes over from its primary: by hand behind an address that moves, by Sentinel, in a
cluster.

Whatever a replica lacks, nothing wrong is read, and no lease is given twice; with `store_replicas`
nothing is lacking that was acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError

from hicache_conformance.protocol.server import Served
from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError, StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.shared import preflight
from hicache_metadata_server.shared.assembly import check_store
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.redis_clients import _Sentinels
from hicache_metadata_server.shared.scripts import IdempotencyKey
from hicache_metadata_server.shared.service import SharedService
from tests.backends.hf3fs.conftest import SERVE
from tests.backends.hf3fs.forwards import Forward
from tests.backends.hf3fs.harness import Rig, chain
from tests.metadata_server.redis_servers import redis_cluster, redis_replicas, sentinels
from tests.metadata_server.test_shared import leased, stored

DEADLINE_SECONDS = 5.0
"""Of a call: one for a connection, two for an answer, half a second for each of three Sentinels,
and a grace."""
PATIENCE_SECONDS = 30.0


@asynccontextmanager
async def service_on(url, *, replicas=0, slots=4000):
    limits = msgspec.structs.replace(DEFAULTS, quarantine_seconds=0.0)
    service = SharedService(
        RedisConnection(url, replicas=replicas), limits, durability=p.StoreDurability.NONE
    )
    try:
        await eventually(
            lambda: service.initialize(
                p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=slots)])
            )
        )
        yield service
    finally:
        await service.connection.close()


async def committed(service, leases, idempotency_key=None):
    part = p.CommitScope(
        scope="0:kv", leases=leases, lengths=[1] * len(leases), checksums=[7] * len(leases)
    )
    return (
        (
            await service.commit(
                p.Commit(scopes=[part]), *([idempotency_key] if idempotency_key else [])
            )
        )
        .scopes[0]
        .states
    )


async def live(service, keys):
    found = await service.lookup(p.Lookup(scopes=[p.LookupScope(scope="0:kv", keys=keys)]))
    return [key for key, slot in zip(keys, found.scopes[0].slots, strict=True) if slot >= 0]


async def whole(service):
    assert (await fsck(service, p.Fsck())).problems == []


@pytest.fixture
def pair(tmp_path):
    with redis_replicas(tmp_path) as servers:
        yield servers


@pytest.fixture
def moving(pair):
    """An address that leads to the primary, and can be moved."""
    forward = Forward(pair[0].port)
    yield forward
    forward.close()


def url_of(forward):
    return f"redis://127.0.0.1:{forward.port}/0"


# Waiting for replicas.


async def test_nothing_is_told_that_no_replica_has(pair):
    primary, replica = pair

    try:
        async with service_on(primary.url, replicas=1) as service:
            first = await eventually(lambda: leased(service, ["a", "b"]))
            replica.suspend()
            idempotency_key = IdempotencyKey("once", b"digest")
            with pytest.raises(StoreError, match="0 of 1 replicas have it"):
                await committed(service, first.leases, idempotency_key)
            # A connection that has never written anything asks for the answer that was kept.
            other = SharedService(
                RedisConnection(primary.url, replicas=1),
                DEFAULTS,
                durability=p.StoreDurability.NONE,
            )
            with pytest.raises(StoreError, match="0 of 1 replicas"):
                await committed(other, first.leases, idempotency_key)
            await other.connection.close()
            # It was done, and is there; that is not told either.
            asked = [
                live(service, ["a"]),
                *(committed(service, first.leases, idempotency_key) for _ in range(4)),
            ]
            for refused in await asyncio.gather(*asked, return_exceptions=True):
                assert "0 of 1 replicas" in str(refused)
            with pytest.raises(StoreError):
                await service.tick(8)
            assert "0 of 1 replicas" in service.problem
            replica.resume()
            assert (
                await eventually(lambda: committed(service, first.leases, idempotency_key))
                == [p.Settled.DONE] * 2
            )
            await service.tick(8)
            assert service.problem == ""
    finally:
        replica.resume()


def test_replicas_that_are_missing_are_warned_of_at_the_start(pair, monkeypatch):
    # Where a line goes depends on what has configured logs in this process before.
    lines = structlog.testing.CapturingLogger()
    monkeypatch.setattr(preflight, "_log", lines)
    check_store(pair[0].url, p.StoreDurability.NONE, 1)
    assert not lines.calls
    check_store(pair[0].url, p.StoreDurability.NONE, 2)
    [line] = lines.calls
    assert (line.method_name, line.args) == ("warning", ("replicas_missing",))
    assert (line.kwargs["wanted"], line.kwargs["connected"]) == (2, 1)


async def test_a_change_that_a_replica_has_outlives_its_primary(pair, moving):
    primary, replica = pair

    async with service_on(url_of(moving), replicas=1) as service:
        told = await stored(service, [f"k{number}" for number in range(300)])
        late = await eventually(lambda: leased(service, ["late"]))
        primary.kill()
        with pytest.raises(StoreError):
            await live(service, ["k0"])
        replica.lead()
        moving.lead_to(replica.port)
    async with service_on(url_of(moving)) as service:
        keys = [f"k{number}" for number in range(300)]
        assert await live(service, keys) == keys
        assert await committed(service, late.leases) == [p.Settled.DONE]
        assert min((await leased(service, ["new"])).leases) > max([*told.leases, *late.leases])
        await whole(service)


# What a replica lacks.


async def test_leases_that_a_replica_lacks_are_given_to_nobody_else(pair, moving):
    primary, replica = pair

    async with service_on(url_of(moving), slots=8) as service:
        before = await stored(service, ["kept"])
        # From here on it is cut off, and its primary goes on.
        replica.cut_off(primary)
        lost = await stored(service, ["lost"])
        late = await leased(service, ["late"])
        moving.lead_to(replica.port)
        primary.kill()
        found = await eventually(lambda: live(service, ["kept", "lost"]))
        assert found == ["kept"]
        again = await leased(service, ["x", "y", "z"])
        assert set(again.slots) & {*lost.slots, *late.slots}
        assert min(again.leases) > max([*before.leases, *lost.leases, *late.leases])
        # Whoever has had the slot comes too late, and whoever has it now is not disturbed.
        assert await committed(service, late.leases) == [p.Settled.STALE]
        assert await committed(service, again.leases) == [p.Settled.DONE] * 3
        await whole(service)


async def eventually(ask):
    """Answer of a call once the store is back; each attempt ends within the deadline."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        begin = time.monotonic()
        try:
            return await ask()
        except StoreError:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        finally:
            assert time.monotonic() - begin < DEADLINE_SECONDS


async def test_a_primary_that_is_none_any_more_is_left(pair, moving):
    """Its connections stay open, and would be refused for ever."""
    primary, replica = pair

    async with service_on(url_of(moving)) as service:
        await stored(service, ["a"])
        replica.cut_off(primary)
        moving.lead_to(replica.port)
        assert await live(service, ["a"]) == ["a"], "by the connection that there is"
        primary.follow(replica)
        with pytest.raises(StoreError, match="read only"):
            await stored(service, ["b"])
        await stored(service, ["c"])
        await whole(service)
    with replica.client() as client:
        assert client.hkeys("hm:{0:kv}:live") == [b"a", b"c"]


def test_pages_whose_slots_were_given_away_behind_a_replica_are_misses(pair, moving, tmp_path):
    """The map that comes back is older than the bytes: what it leads to is another page."""
    primary, replica = pair
    with Served(
        command=SERVE.replace("sqlite:///{tmp}/m.db", url_of(moving)) + " --durability none"
    ) as server:
        rig = Rig(
            tmp_path / "store", metadata_url=server.url, file_size="64KiB", timeout_seconds=10.0
        )
        try:
            old = chain("old", 4)
            assert rig.put(old) == [True] * 4
            where = {rig.slot(key) for key in old}
            replica.cut_off(primary)
            # Goes on with a primary that nobody follows, until the slots are others'.
            new = list[str]()
            while not where <= {rig.slot(key) for key in new}:
                new += chain(f"new{len(new)}", 4)
                rig.put(new[-4:])
                assert len(new) < 400
            moving.lead_to(replica.port)
            primary.kill()
            until = time.monotonic() + PATIENCE_SECONDS
            while rig.hits(old) != 4:
                assert time.monotonic() < until
                time.sleep(0.05)
            assert rig.get(old) == [None] * 4, "the map has them, and their slots hold others"
            assert rig.put(old, version=2) == [True] * 4
            rig.expect(old, version=2)
        finally:
            rig.storage.close()


# Who finds the new primary.


async def work(service, number, told, stop):
    """Store pages and read some back, until the end; what was acknowledged is in `told`."""
    count = 0
    while not stop.is_set():
        keys = [f"{number}-{count}-{each}" for each in range(8)]
        begin = time.monotonic()
        with suppress(StoreError):
            found = await leased(service, keys)
            if await committed(service, found.leases) == [p.Settled.DONE] * 8:
                told += keys
        assert time.monotonic() - begin < 2 * DEADLINE_SECONDS
        count += 1
        await asyncio.sleep(0.01)


async def under_load(url, kill, *, after):
    """Kills a primary while four clients write through two servers; then all that was told must be
    there."""
    told, stop = list[str](), asyncio.Event()
    async with service_on(url, replicas=1) as one, service_on(url, replicas=1) as other:
        workers = [
            asyncio.create_task(work((one, other)[number % 2], number, told, stop))
            for number in range(4)
        ]
        await grows(told, 400)
        kill()
        await grows(told, after)
        stop.set()
        await asyncio.gather(*workers)
        keys = list(told)
        for start in range(0, len(keys), 500):
            some = keys[start : start + 500]
            assert await eventually(lambda some=some: live(one, some)) == some
        await whole(other)


async def grows(told, more):
    goal, until = len(told) + more, time.monotonic() + PATIENCE_SECONDS
    while len(told) < goal:
        assert time.monotonic() < until, "they do not come back"
        await asyncio.sleep(0.02)


async def test_sentinels_tell_who_the_primary_is_now(tmp_path):
    with redis_replicas(tmp_path, 2) as servers, sentinels(tmp_path, servers[0], replicas=2) as url:
        await asyncio.to_thread(check_store, url, p.StoreDurability.NONE, 1)
        await under_load(url, servers[0].kill, after=400)


async def test_no_sentinel_is_lost_by_looking_at_the_same_time():
    """redis-py swaps the one that knew the primary to the front of its list, whoever has swapped
    meanwhile."""

    sentinels, known = _Sentinels([("127.0.0.1", port) for port in (1, 2, 3)]), asyncio.Event()
    gone, knows, third = sentinels.sentinels

    async def refuse():
        raise RedisConnectionError("gone")

    async def answer():
        await known.wait()
        state = {
            "is_master": True,
            "is_sdown": False,
            "is_odown": False,
            "num-other-sentinels": 2,
        }
        return {"cache": {"ip": "127.0.0.1", "port": 4, **state}}

    gone.sentinel_masters, knows.sentinel_masters = refuse, answer
    both = asyncio.gather(*(sentinels.discover_master("cache") for _ in range(2)))
    await asyncio.sleep(0)
    known.set()
    assert await both == [("127.0.0.1", 4)] * 2
    assert sentinels.sentinels[0] is knows
    assert set(sentinels.sentinels) == {gone, knows, third}


def test_sentinels_that_know_no_such_primary(pair, tmp_path):
    with (
        sentinels(tmp_path, pair[0], replicas=1, number=1) as url,
        pytest.raises(StoreError, match="No master found for 'other'"),
    ):
        check_store(url.replace("/cache/", "/other/"), p.StoreDurability.NONE)


async def test_a_cluster_promotes_a_replica(tmp_path):
    """The node that has the scope's keys is killed; its last page is still there."""
    with redis_cluster(
        tmp_path, replicas=3, cluster_node_timeout=600, cluster_replica_validity_factor=0
    ) as cluster:
        await asyncio.to_thread(check_store, cluster.url, p.StoreDurability.NONE, 1)

        keys = [f"k{number}" for number in range(200)]
        async with (
            service_on(cluster.url, replicas=1) as service,
            service_on(cluster.url) as other,
        ):
            with cluster.client() as client:
                owner = client.get_node_from_key("hm:{0:kv}:meta").port
            await stored(service, keys)
            next(node for node in cluster.nodes if node.port == owner).kill()
            with pytest.raises(StoreError):
                await live(service, keys)
            assert await eventually(lambda: live(other, keys)) == keys
            await stored(other, ["more"])
            await whole(other)
            with pytest.raises(StoreError, match="0 of 1 replicas"):
                await live(service, keys)


async def test_an_unknown_scope_is_still_one(pair):
    async with service_on(pair[0].url, replicas=1) as service:
        with pytest.raises(RequestError, match="unknown"):
            await service.lookup(p.Lookup(scopes=[p.LookupScope(scope="9:kv", keys=["a"])]))
