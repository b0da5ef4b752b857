"""Replies of Redis that are late, torn, too many, or none."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import hiredis
import pytest

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.shared.connection import RedisConnection, ScriptCall

CALL = ScriptCall("return 1", (b"a",), ())
GOOD = [b"$4\r\ngo", b"od\r\n"]


@asynccontextmanager
async def peer(*answers):
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
    connection = RedisConnection(f"redis://127.0.0.1:{port}", answer_seconds=0.3)
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
    async with peer(GOOD, bad, GOOD, GOOD) as (connection, connections):
        assert await connection.run([CALL]) == [b"good"]
        with pytest.raises(StoreError, match=message):
            await connection.run([CALL])
        assert [await connection.run([CALL]) for _ in range(2)] == [[b"good"]] * 2
        assert len(connections) == 2


@pytest.mark.parametrize("parts", [[b"$4\r\ngood\r\n$5\r\nother\r\n"], [*GOOD, b"$5\r\nother\r\n"]])
async def test_a_reply_that_nobody_waits_for_ends_its_connection(parts):
    async with peer(parts, GOOD) as (connection, connections):
        assert await connection.run([CALL]) == [b"good"]
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
    async with peer([], GOOD) as (connection, connections):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.run([CALL])
        assert await connection.run([CALL]) == [b"good"]
        assert len(connections) == 2
