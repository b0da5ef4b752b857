"""Requests to two servers on one Redis, of which each owns some scopes."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import structlog

from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.protocol import Unpin
from hicache_metadata_server.shared import scope_owner
from tests.metadata_server.http_calls import running_shared
from tests.metadata_server.redis_servers import redis_server

PATIENCE_SECONDS = 30.0
LIMITS = msgspec.structs.replace(DEFAULTS, quarantine_seconds=0.0)


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


def server(redis, name):
    return running_shared(redis.url, LIMITS, name=f"http://{name}")


@asynccontextmanager
async def two(redis):
    with redis.client() as client:
        client.flushall()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(server(redis, name)) for name in ("one", "two")]


async def is_ready(caller):
    return (await caller.send("GET", "/readyz")).status == 200


async def eventually(condition):
    until = time.monotonic() + PATIENCE_SECONDS
    while not await condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


async def initialize(caller, *names, **options):
    scopes = [{"scope": name, "slots": 100} for name in names]
    return await caller.post("/v2/initialize", {"scopes": scopes}, **options)


async def live(caller, scope, keys):
    answer = await caller.post("/v2/lookup", {"scopes": [{"scope": scope, "keys": keys}]})
    assert answer.status == 200, answer
    return [
        key for key, slot in zip(keys, answer.json["scopes"][0]["slots"], strict=True) if slot >= 0
    ]


async def live_at(caller, scope, keys):
    """The same, once this server owns the scope."""
    body = {"scopes": [{"scope": scope, "keys": keys}]}

    async def owned():
        return (await caller.post("/v2/lookup", body)).status == 200

    await eventually(owned)
    return await live(caller, scope, keys)


async def test_a_request_is_sent_to_the_owner(redis):
    async with two(redis) as (one, other):
        assert (await initialize(one, "0:kv")).json == {"created": [True]}
        assert (await one.store("0:kv", ["a"])).status == 200
        assert await live(one, "0:kv", ["a"]) == ["a"]
        for path, body in (
            ("/v2/lookup", {"scopes": [{"scope": "0:kv", "keys": ["a"]}]}),
            ("/v2/reserve", {"scopes": [{"scope": "0:kv", "keys": ["b"]}]}),
            ("/v2/initialize", {"scopes": [{"scope": "0:kv", "slots": 100}]}),
            ("/0/exists", {"keys": ["a"]}),
            ("/0/initialize", {"num_pages": 100}),
        ):
            answer = await other.post(path, body)
            assert (answer.status, answer.headers["location"]) == (307, f"http://one{path}")
            assert answer.json["code"] == "moved"


async def test_an_unknown_scope_is_one_at_every_server(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        for caller in (one, other):
            body = {"scopes": [{"scope": name, "keys": ["a"]} for name in ("0:kv", "9:kv")]}
            answer = await caller.post("/v2/lookup", body)
            assert (answer.status, answer.json["field"]) == (404, "scopes[1].scope")


async def test_new_scopes_go_to_the_server_with_fewer(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        answer = await initialize(one, "1:kv")
        assert (answer.status, answer.headers["location"]) == (307, "http://two/v2/initialize")
        assert (await initialize(other, "1:kv")).json == {"created": [True]}
        # Asked for with one that is there, a new one is made beside it.
        answer = await initialize(other, "0:kv", "0:mamba")
        assert answer.headers["location"] == "http://one/v2/initialize"
        assert (await initialize(one, "0:kv", "0:mamba")).json == {"created": [False, True]}


async def test_scopes_of_two_owners_in_one_request(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        await initialize(other, "1:kv")
        await other.store("1:kv", ["b"])
        body = {"scopes": [{"scope": name, "keys": ["b"]} for name in ("0:kv", "1:kv")]}
        answers = []

        async def served():
            answers.append(await one.post("/v2/lookup", body))
            assert answers[-1].status in (200, 503)
            return answers[-1].status == 200

        await eventually(served)
        assert [part["slots"] for part in answers[-1].json["scopes"]] == [[-1], [0]]


async def test_a_server_that_stops_hands_its_scopes_over(redis):
    with redis.client() as client:
        client.flushall()
    async with AsyncExitStack() as stack:
        async with server(redis, "one") as one:
            other = await stack.enter_async_context(server(redis, "two"))
            await initialize(one, "0:kv")
            await one.store("0:kv", ["a"])
        assert await live(other, "0:kv", ["a"]) == ["a"]


async def test_a_server_that_drains_hands_its_scopes_over(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        await one.store("0:kv", ["a"])
        assert (await one.post("/v2/drain", {"enabled": True})).status == 200

        async def moved():
            return (await one.post("/0/exists", {"keys": ["a"]})).status == 307

        await eventually(moved)
        assert await live(other, "0:kv", ["a"]) == ["a"]


async def test_a_scope_that_cannot_be_read_keeps_no_other_from_being_served(redis, monkeypatch):
    monkeypatch.setattr(scope_owner, "UNREADABLE_SECONDS", 0.1)
    with redis.client() as client:
        client.flushall()
        async with AsyncExitStack() as stack:
            async with server(redis, "one") as one:
                await initialize(one, "0:kv")
                await initialize(one, "1:kv")
                client.hset("hm:{0:kv}:rest", "0", b"nothing")
            with structlog.testing.capture_logs() as logs:
                other = await stack.enter_async_context(server(redis, "two"))
                assert await live(other, "1:kv", ["a"]) == []
                assert await is_ready(other)
                answer = await other.post("/0/exists", {"keys": ["a"]})
                assert (answer.status, answer.json["code"]) == (503, "moving")
                text = (await other.send("GET", "/metrics")).body.decode()
                assert "hicache_metadata_unowned_scopes 1.0" in text
            (told,) = [log for log in logs if log["event"] == "scope_unreadable"]
            assert told["scope"] == "0:kv"
            assert "cannot be read" in told["error"]
            client.hdel("hm:{0:kv}:rest", "0")
            assert await live_at(other, "0:kv", ["a"]) == []


async def test_scopes_that_redis_has_lost_are_made_anew_together(redis):
    """A client finds one of two gone and makes both, before a heartbeat finds the other gone."""
    async with AsyncExitStack() as stack:
        with redis.client() as client:
            client.flushall()
            # Alone: another server could take a scope in between.
            one = await stack.enter_async_context(server(redis, "one"))
            await initialize(one, "0:kv", "0:swa")
            await one.store("0:swa", ["before"])
            client.flushall()
        body = {"scopes": [{"scope": "0:kv", "keys": ["a"]}]}
        assert (await one.post("/v2/reserve", body)).status == 503
        assert (await initialize(one, "0:kv", "0:swa")).json == {"created": [True, True]}
        assert await live(one, "0:swa", ["before"]) == []
        await one.store("0:swa", ["after"])
        other = await stack.enter_async_context(server(redis, "two"))
        await one.post("/v2/drain", {"enabled": True})
        assert await live_at(other, "0:swa", ["before", "after"]) == ["after"]


async def test_nothing_is_acknowledged_that_a_lost_scope_has_discarded(redis):
    """Requests that wait for the next group, when the one before finds another owner."""
    async with two(redis) as (one, _):
        await initialize(one, "0:kv")
        bodies = [{"scopes": [{"scope": "0:kv", "keys": [key]}]} for key in ("a", "b", "c")]
        with redis.client() as client:
            client.hset("hm:{0:kv}:head", "token", "9-another")
            client.execute_command("CLIENT", "PAUSE", 300, "WRITE")
            asking = []
            for body in bodies:
                asking.append(asyncio.create_task(one.post("/v2/reserve", body)))
                await asyncio.sleep(0.03)
        assert [answer.status for answer in await asyncio.gather(*asking)] == [503] * 3


async def test_a_long_request_ends_with_the_lease(redis):
    async with two(redis) as (one, _):
        await initialize(one, "0:kv")
        keys = [f"{number:064}" for number in range(4000)]
        body = {"scopes": [{"scope": "0:kv", "keys": keys}]}
        asking = asyncio.create_task(one.post("/v2/lookup", body))
        for _ in range(6):
            await asyncio.sleep(0)
        assert not asking.done()
        one.app.server.handlers.owner.drop(["0:kv"])
        assert (await asking).json["code"] == "moving"


async def test_pins_go_with_their_scope(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        await one.store("0:kv", ["a"])
        body = {"scopes": [{"scope": "0:kv", "keys": ["a"]}], "pin_seconds": 60}
        pin = (await one.post("/v2/lookup", body)).json["pin"]
        await one.post("/v2/drain", {"enabled": True})

        async def moved():
            return (await one.post("/0/exists", {"keys": ["a"]})).status == 307

        await eventually(moved)
        answer = await one.post("/v2/unpin", {"pins": [pin]})
        assert answer.headers["location"] == "http://two/v2/unpin"
        assert other.service.pins_elsewhere(Unpin(pins=[pin])) == {}
        assert (await other.post("/v2/unpin", {"pins": [pin]})).status == 204
        assert other.service.pins_elsewhere(Unpin(pins=[pin])) == {pin: ""}


async def test_idempotency_keys_go_with_their_scope(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        body = {"scopes": [{"scope": "0:kv", "keys": ["a"]}]}
        headers = {"Idempotency-Key": "once"}
        first = await one.post("/v2/reserve", body, headers=headers)
        await one.post("/v2/drain", {"enabled": True})

        async def served():
            return (
                await is_ready(other)
                and (await other.post("/0/exists", {"keys": []})).status == 200
            )

        await eventually(served)
        assert await other.post("/v2/reserve", body, headers=headers) == first
        assert (await other.post("/v2/reserve", body)).json["scopes"][0]["states"] == ["busy"]


async def test_every_server_lists_all_scopes(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        await initialize(other, "1:kv")
        await one.store("0:kv", ["a"])

        async def listed():
            answers = [await caller.send("GET", "/v2/scopes") for caller in (one, other)]
            return [
                [
                    (one["scope"], one["live"], one["free"], one["owner"], one["log_bytes"] > 0)
                    for one in answer.json["scopes"]
                ]
                for answer in answers
            ] == [[("0:kv", 1, 99, "http://one", True), ("1:kv", 0, 100, "http://two", True)]] * 2

        await eventually(listed)
        text = (await one.send("GET", "/metrics")).body.decode()
        assert 'scope_owner{owner="http://one",scope="0:kv"} 1.0' in text
        assert 'scope_log_bytes{scope="0:kv"}' in text
        assert "hicache_metadata_unowned_scopes 0.0" in text
        assert "1:kv" not in text, "its owner has it"


async def test_a_scope_without_owner_is_counted(redis):
    with redis.client() as client:
        client.flushall()
    async with AsyncExitStack() as stack:
        async with server(redis, "one") as one:
            await initialize(one, "0:kv")
            other = await stack.enter_async_context(server(redis, "two"))
            other.service.draining = True
            taken = other.app.server.handlers.owner._take
            other.app.server.handlers.owner._take = lambda name: asyncio.sleep(0)
        (listed,) = (await other.send("GET", "/v2/scopes")).json["scopes"]
        assert (listed["owner"], listed["free"]) == ("", 0)
        text = (await other.send("GET", "/metrics")).body.decode()
        assert "hicache_metadata_unowned_scopes 1.0" in text
        other.app.server.handlers.owner._take = taken

        async def owned():
            return (await other.send("GET", "/v2/scopes")).json["scopes"][0]["owner"] != ""

        await eventually(owned)


async def test_a_dropped_scope_can_be_made_anew(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        assert (await one.post("/v2/drop", {"scopes": ["0:kv"]})).json == {"slots": [100]}
        assert (await one.post("/v2/drop", {"scopes": ["0:kv"]})).status == 404
        assert (await initialize(one, "0:kv")).json == {"created": [True]}
        assert (await one.store("0:kv", ["a"])).status == 200
        answer = await other.post("/0/exists", {"keys": ["a"]})
        assert answer.status == 307


async def test_quotas_count_the_scopes_of_all_servers(redis):
    async with two(redis) as (one, other):
        await initialize(one, "0:kv")
        for caller in (one, other):
            caller.service.max_scopes = 1
        answer = await initialize(other, "1:kv")
        assert (answer.status, answer.json["code"]) == (413, "too_large")


async def test_a_server_without_redis_answers_503_and_comes_back(redis):
    async with two(redis) as (one, _):
        await initialize(one, "0:kv")
        await one.store("0:kv", ["a"])
        redis.suspend()
        try:

            async def refused():
                # From memory, and refused once the lease has ended.
                return (await one.post("/0/exists", {"keys": ["a"]})).status == 503

            await eventually(refused)
            assert not await is_ready(one)
            text = (await one.send("GET", "/metrics")).body.decode()
            assert "hicache_metadata_store_failing 1.0" in text
        finally:
            redis.resume()

        async def served():
            answer = await one.post("/0/exists", {"keys": ["a"]})
            return answer.status in (200, 307)

        await eventually(served)
