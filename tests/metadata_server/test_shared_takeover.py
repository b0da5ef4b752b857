"""A replica takes over from its primary: by hand behind an address that moves, and in a cluster.
`make servers` has Sentinels.

Whatever a replica lacks, nothing wrong is read, and no slot is given twice; with `store_replicas`
nothing is lacking that was acknowledged.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.shared import connection as redis_connection
from hicache_metadata_server.shared.connection import _Sentinels, check_store
from tests.metadata_server.http_calls import eventually, of_keys, running_shared
from tests.metadata_server.redis_servers import redis_cluster, redis_replicas

pytestmark = [pytest.mark.slow(seconds=60), pytest.mark.long]

PATIENCE_SECONDS = 60.0
LIMITS = msgspec.structs.replace(DEFAULTS, quarantine_seconds=0.0)


@asynccontextmanager
async def server_on(url, *, replicas=0, slots=4000):
    async with running_shared(url, LIMITS, replicas=replicas, lease_seconds=3.0) as caller:
        await served(lambda: caller.initialize("0:kv", slots=slots))
        yield caller


async def served(ask):
    """The answer, once it is none of a server without its store or its scope, nor leads to a server
    that has ended."""

    async def answer():
        reply = await ask()
        return reply.status not in (307, 503) and reply

    reply = await eventually(answer, PATIENCE_SECONDS)
    assert reply.status == 200, reply
    return reply


async def leased(caller, keys):
    return (await served(lambda: caller.reserve("0:kv", keys))).json["scopes"][0]


async def committed(caller, leases):
    """States of leases, once they are answered."""
    reply = await served(lambda: caller.commit("0:kv", leases))
    return reply.json["scopes"][0]["states"]


async def stored(caller, keys):
    found = await leased(caller, keys)
    assert set(await committed(caller, found["leases"])) == {"done"}
    return found


async def live(caller, keys):
    await served(lambda: caller.post("/v2/lookup", of_keys("0:kv", keys)))
    return await caller.live("0:kv", keys)


async def whole(caller):
    reply = await served(lambda: caller.post("/v2/fsck", {"scopes": ["0:kv"]}))
    assert reply.json["problems"] == []


@pytest.fixture
def pair(tmp_path):
    with redis_replicas(tmp_path, unixsocket="socket") as servers:
        yield servers


# Waiting for replicas.


async def test_nothing_is_told_that_no_replica_has(pair):
    primary, replica = pair
    try:
        async with server_on(primary.url, replicas=1) as caller:
            first = await leased(caller, ["a", "b"])
            replica.suspend()
            refused = await caller.commit("0:kv", first["leases"])
            assert refused.status == 503
            assert "0 of 1 replicas have it" in refused.json["message"]

            async def ended():
                return (await caller.post("/v2/lookup", of_keys("0:kv", ["a"]))).status == 503

            # Heartbeats are not confirmed either: another server may own the scope by now.
            await eventually(ended, PATIENCE_SECONDS)
            replica.resume()
            assert await committed(caller, first["leases"]) == ["done"] * 2
            assert await live(caller, ["a", "b"]) == ["a", "b"]
    finally:
        replica.resume()


def test_replicas_that_are_missing_are_warned_of_at_the_start(pair, capture_log):
    logs = capture_log(redis_connection)
    check_store(pair[0].url, p.StoreDurability.NONE, 1)
    assert logs == []
    check_store(pair[0].url, p.StoreDurability.NONE, 2)
    [line] = logs
    assert (line["log_level"], line["event"]) == ("warning", "replicas_missing")
    assert (line["wanted"], line["connected"]) == (2, 1)


# What a replica lacks.


async def test_slots_that_were_leased_behind_a_replica_are_given_to_nobody(pair, tmp_path):
    """Their server leaves the primary that is none any more, whose connections stay open and would
    be refused for ever, and notices that the log has lost writes."""
    primary, replica = pair
    address = tmp_path / "address"
    address.symlink_to(primary.file.with_name("socket"))
    async with server_on(f"unix://{address}", slots=8) as caller:
        await stored(caller, ["kept"])
        # From here on it is cut off, and its primary goes on.
        replica.cut_off(primary)
        await stored(caller, ["lost"])
        late = await leased(caller, ["late"])
        address.unlink()
        address.symlink_to(replica.file.with_name("socket"))
        primary.follow(replica)
        assert (await caller.reserve("0:kv", ["first"])).status == 503, "by the old connection"

        async def full():
            return (await leased(caller, ["x"]))["states"] == ["full"]

        await eventually(full, PATIENCE_SECONDS)
        assert await live(caller, ["kept", "lost"]) == ["kept"]
        assert await committed(caller, late["leases"]) == ["stale"]
        await whole(caller)


# Who finds the new primary.


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


async def test_a_cluster_promotes_a_replica(tmp_path):
    """The node that has the scope's keys is killed; its last page is still there."""
    with redis_cluster(
        tmp_path, replicas=3, cluster_node_timeout=600, cluster_replica_validity_factor=0
    ) as cluster:
        await asyncio.to_thread(check_store, cluster.url, p.StoreDurability.NONE, 1)
        keys = [f"k{number}" for number in range(200)]
        async with server_on(cluster.url, replicas=1) as caller:
            await stored(caller, keys)
            next(node for node in cluster.nodes if node.client().keys("hm:{0:kv}:head")).kill()
        async with server_on(cluster.url) as caller:
            assert await live(caller, keys) == keys
            await stored(caller, ["more"])
            await whole(caller)
