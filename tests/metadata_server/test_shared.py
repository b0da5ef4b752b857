"""Redis as a store of several servers: settings, faults, bad replies, and the commands for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext, suppress

import hiredis
import pytest
from redis.exceptions import ClusterDownError, RedisClusterException

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.shared import connection as connection_module
from hicache_metadata_server.shared.connection import RedisConnection, ScriptCall, check_store
from tests.metadata_server.http_calls import eventually, is_status, of_keys, running_shared
from tests.metadata_server.redis_servers import redis_cluster, redis_server
from tests.support.commands import run_metadata


@pytest.fixture
def empty(redis):
    redis.client().flushall()
    return redis


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as one:
        yield one


# Settings.


NONE, PROCESS, MACHINE = p.StoreDurability
EVERYSEC, WRITTEN, SYNCED = (
    {"appendonly": "yes", "appendfsync": how} for how in ("everysec", "no", "always")
)


@pytest.mark.parametrize(
    ("config", "durability", "refused"),
    [
        (EVERYSEC, NONE, ""),
        (
            EVERYSEC,
            PROCESS,
            r"appendfsync everysec.*keep durability 'none', not 'process'.*`appendfsync no`",
        ),
        (WRITTEN, PROCESS, ""),
        (WRITTEN, MACHINE, r"keep durability 'process', not 'machine'.*`appendfsync always`"),
        (SYNCED, MACHINE, ""),
        (SYNCED | {"appendonly": "no"}, PROCESS, "appendonly no"),
        ({"maxmemory_policy": "allkeys-lru"}, NONE, r"is allkeys-lru.*set it to noeviction"),
        # Where settings are not told, the operator is trusted.
        ({"rename_command": 'CONFIG ""'}, MACHINE, ""),
        ({"replicaof": "127.0.0.1 1"}, NONE, "this is a replica"),
    ],
)
def test_settings(tmp_path, config, durability, refused):
    with (
        redis_server(tmp_path, **config) as redis,
        pytest.raises(StoreError, match=refused) if refused else nullcontext(),
    ):
        check_store(redis.url, durability)


def test_a_node_of_a_cluster_is_named_as_one(cluster):
    check_store(cluster.url, NONE)
    with pytest.raises(StoreError, match=r"redis\+cluster://"):
        check_store(cluster.nodes[0].url, NONE)
    with pytest.raises(StoreError, match="keep durability 'none', not 'process'"):
        check_store(cluster.url, PROCESS)


def test_valkey_and_sockets_are_addresses_too(redis, tmp_path):
    check_store(redis.url.replace("redis", "valkey"), NONE)
    with redis_server(tmp_path, unixsocket=tmp_path / "s"):
        check_store(f"unix://{tmp_path}/s", NONE)


# Faults.


async def test_a_redis_that_hangs_or_is_gone_is_answered_503_and_found_again(tmp_path):
    with redis_server(tmp_path, appendonly="yes", appendfsync="always") as redis:
        async with running_shared(redis.url, DEFAULTS, lease_seconds=3.0) as caller:
            await caller.initialize("0:kv")
            assert (await caller.store("0:kv", ["a"])).status == 200
            for stop, go in ((redis.suspend, redis.resume), (redis.kill, redis.start)):
                stop()
                reply = await caller.reserve("0:kv", [stop.__name__])
                assert (reply.status, reply.json["code"]) == (503, "unavailable")
                await eventually(lambda: is_status(caller, "/readyz", 503))
                # From memory, until the lease has ended.
                reply = await eventually(lambda: looked_up(caller, "0:kv", 503))
                assert reply.json["code"] in ("moving", "unavailable")
                assert "hicache_metadata_store_failing 1.0" in await caller.metrics()
                assert await caller.status_of("/healthz") == 200
                await asyncio.to_thread(go)
                await eventually(lambda: is_status(caller, "/readyz", 200))
                reply = await eventually(lambda: looked_up(caller, "0:kv", 200))
                assert reply.json["scopes"][0]["slots"] == [0]


async def looked_up(caller, scope, status):
    reply = await caller.post("/v2/lookup", of_keys(scope, ["a"]))
    return reply.status == status and reply


@pytest.mark.parametrize(
    "raised",
    [
        # A connection that another request's failure has closed.
        AttributeError("'NoneType' object has no attribute 'writelines'"),
        # A choice among nodes that another request's discovery has forgotten.
        IndexError("Cannot choose from an empty sequence"),
        ClusterDownError("The cluster is down"),
        RedisClusterException("Redis Cluster cannot be connected"),
    ],
    ids=lambda raised: type(raised).__name__,
)
async def test_what_redis_py_raises_while_a_node_is_gone_is_a_store_error(
    raised, monkeypatch, capture_log
):
    async def fail(*_, **__):
        raise raised

    connection = RedisConnection("redis+cluster://127.0.0.1:1")
    monkeypatch.setattr(connection._client, "execute_command", fail)
    logs = capture_log(connection_module)
    with pytest.raises(StoreError, match=str(raised)):
        await connection.command("GET", "key")
    with pytest.raises(StoreError, match=str(raised)):
        await connection.run([ScriptCall("return 1", (b"key",), ())])
    # `store_failing` tells it once for all requests.
    assert logs == []
    await connection.close()


async def test_a_reply_that_nobody_read_is_not_the_reply_to_the_next_command(redis):
    connection = RedisConnection(redis.url)
    client = connection._client
    try:
        left = await client.connection_pool.get_connection()
        await left.send_command("ECHO", "left over")
        async with asyncio.timeout(10):
            while not await left.can_read():
                await asyncio.sleep(0.01)
        await client.connection_pool.release(left)
        assert [await client.echo(word) for word in ("one", "two")] == [b"one", b"two"]
    finally:
        await connection.close()


# Commands.


def test_a_port_that_is_not_known_needs_an_address(empty):
    done = run_metadata("serve", "--port", "0", "--store", empty.url, "--durability", "none")
    assert done.exit_code == 2
    assert "advertised_url: needed with port 0" in done.output


async def test_fsck_of_a_redis(empty):
    """While a server owns its scopes, and when none does."""
    url = empty.url

    def fsck():
        done = run_metadata("fsck", "--store", url)
        return done.exit_code, " ".join(done.output.split())

    async with running_shared(url, DEFAULTS) as caller:
        assert (await caller.initialize("0:kv", "1:kv", slots=8)).status == 200
        assert (await caller.store("0:kv", ["a"])).status == 200
        assert await asyncio.to_thread(fsck) == (0, "16 slots checked, no problems")
        assert (await caller.store("0:kv", ["b"])).status == 200, "it was not taken"
    assert await asyncio.to_thread(fsck) == (0, "16 slots checked, no problems")
    with empty.client() as client:
        client.hset("hm:{0:kv}:rest", "scope", b"\xc1")
        status, said = await asyncio.to_thread(fsck)
        assert (status, "scope 0:kv cannot be read" in said) == (2, True)
        # As the page of the server says.
        client.delete(*(f"hm:{{0:kv}}:{part}" for part in ("head", "log", "blocks", "rest")))
        client.hdel("hm:{map}:scopes", "0:kv")
        client.incr("hm:{map}:version")
        assert await asyncio.to_thread(fsck) == (0, "8 slots checked, no problems")


# Replies.


CALL = ScriptCall("return 1", (b"a",), ())
GOOD = [b"$4\r\ngo", b"od\r\n"]


@asynccontextmanager
async def peer(*answers, answer_seconds=60.0):
    """Stand for a Redis that sends one answer for each script: parts, and None for the end."""
    left, connections = list(answers), list[asyncio.StreamWriter]()

    async def serve(reader, writer):
        connections.append(writer)
        requests = hiredis.Reader()
        while data := await reader.read(1 << 16):
            requests.feed(data)
            while (command := requests.gets()) is not False:
                if command[0] != b"EVAL":
                    writer.write(b"+OK\r\n")
                    continue
                for part in left.pop(0):
                    if part is None:
                        writer.close()
                        return
                    writer.write(part)
                    await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = RedisConnection(f"redis://127.0.0.1:{port}", answer_seconds)
    try:
        yield connection, connections
    finally:
        await connection.close()
        server.close()
        for writer in connections:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no answer within"),
        ([b"$4\r\ngo"], "no answer within"),
        ([None], "closed"),
        ([b"$4\r\ngo", None], "closed"),
        ([b"HTTP/1.1 400 Bad Request\r\n"], "Protocol error"),
        ([b"-LOADING Redis is loading the dataset in memory\r\n"], "loading the dataset"),
    ],
    ids=["nothing", "a part", "the end", "a part and the end", "no Redis", "loading"],
)
async def test_a_bad_reply_is_an_error_and_the_end_of_its_connection(bad, message):
    # Long enough for a connection and a good answer on a machine under load.
    answer_seconds = 2.0 if "no answer" in message else 60.0
    async with peer(GOOD, bad, GOOD, GOOD, answer_seconds=answer_seconds) as (
        connection,
        connections,
    ):
        assert await connection.run([CALL]) == [b"good"]
        with pytest.raises(StoreError, match=message):
            await connection.run([CALL])
        assert [await connection.run([CALL]) for _ in range(2)] == [[b"good"]] * 2
        assert len(connections) == 2


@pytest.mark.parametrize("parts", [[b"$4\r\ngood\r\n$5\r\nother\r\n"], [*GOOD, b"$5\r\nother\r\n"]])
async def test_a_reply_that_nobody_waits_for_ends_its_connection(parts):
    async with peer(parts, GOOD) as (connection, connections):
        assert await connection.run([CALL]) == [b"good"]
        # The peer is in this loop: in some turns of it, all is sent and received.
        for _ in range(5):
            await asyncio.sleep(0.1)
        assert await connection.run([CALL]) == [b"good"]
        assert len(connections) == 2


async def test_nothing_is_sent_where_there_is_nothing_to_do():
    async with peer() as (connection, connections):
        assert await connection.run([]) == []
        assert not connections


async def test_an_error_is_the_reply_to_its_own_command():
    async with peer([b"-ERR no\r\n"], GOOD, GOOD) as (connection, connections):
        with pytest.raises(StoreError, match="no"):
            await connection.run([CALL, CALL])
        assert await connection.run([CALL]) == [b"good"]
        assert len(connections) == 1


async def test_a_caller_that_goes_away_takes_its_connection_along():
    asked = asyncio.Event()

    def nothing():
        asked.set()
        yield from ()

    async with peer(nothing(), GOOD) as (connection, connections):
        asking = asyncio.create_task(connection.run([CALL]))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await connection.run([CALL]) == [b"good"]
        assert len(connections) == 2
