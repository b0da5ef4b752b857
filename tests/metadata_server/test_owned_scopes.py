"""Requests to two servers on one Redis, of which each owns some scopes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.shared import scope_owner
from tests.metadata_server.http_calls import eventually, of_keys, running_shared, serves

LIMITS = msgspec.structs.replace(DEFAULTS, quarantine_seconds=0.0)


def server(redis, name):
    return running_shared(redis.url, LIMITS, name=f"http://{name}")


@asynccontextmanager
async def two(redis):
    with redis.client() as client:
        client.flushall()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(server(redis, name)) for name in ("one", "two")]


async def live_at(caller, scope, keys):
    """Pages that are found once this server owns the scope."""
    await eventually(lambda: serves(caller, scope))
    return await caller.live(scope, keys)


async def drained(caller):
    assert (await caller.post("/v2/drain", {"enabled": True})).status == 200


async def test_a_request_is_sent_to_the_owner(redis):
    async with two(redis) as (one, other):
        assert (await one.initialize("0:kv")).json == {"created": [True]}
        assert (await one.store("0:kv", ["a"])).status == 200
        assert await one.live("0:kv", ["a"]) == ["a"]
        for path, body in (
            ("/v2/lookup", of_keys("0:kv", ["a"])),
            ("/v2/reserve", of_keys("0:kv", ["b"])),
            ("/v2/initialize", {"scopes": [{"scope": "0:kv", "slots": 100}]}),
            ("/v2/removals", {"scopes": [{"scope": "0:kv"}]}),
            ("/0/exists", {"keys": ["a"]}),
            ("/0/initialize", {"num_pages": 100}),
        ):
            answer = await other.post(path, body)
            assert (answer.status, answer.headers["location"]) == (307, f"http://one{path}")
            assert answer.json["code"] == "moved"
        # An unknown scope is one at every server.
        for caller in (one, other):
            body = {"scopes": [{"scope": name, "keys": ["a"]} for name in ("0:kv", "9:kv")]}
            answer = await caller.post("/v2/lookup", body)
            assert (answer.status, answer.json["field"]) == (404, "scopes[1].scope")


async def test_new_scopes_go_to_the_server_with_fewer(redis):
    async with two(redis) as (one, other):
        await one.initialize("0:kv")
        answer = await one.initialize("1:kv")
        assert (answer.status, answer.headers["location"]) == (307, "http://two/v2/initialize")
        assert (await other.initialize("1:kv")).json == {"created": [True]}
        # Asked for with one that is there, a new one is made beside it.
        answer = await other.initialize("0:kv", "0:mamba")
        assert answer.headers["location"] == "http://one/v2/initialize"
        assert (await one.initialize("0:kv", "0:mamba")).json == {"created": [False, True]}
        # Its limit counts the scopes of all servers.
        other.service.max_scopes = 3
        answer = await other.initialize("2:kv")
        assert (answer.status, answer.json["code"]) == (413, "too_large")


async def test_scopes_of_two_owners_in_one_request(redis):
    async with two(redis) as (one, other):
        await one.initialize("0:kv")
        await other.initialize("1:kv")
        await other.store("1:kv", ["b"])
        body = {"scopes": [{"scope": name, "keys": ["b"]} for name in ("0:kv", "1:kv")]}

        async def answer():
            answer = await one.post("/v2/lookup", body)
            assert answer.status in (200, 503)
            return answer.status == 200 and answer

        found = await eventually(answer)
        assert [part["slots"] for part in found.json["scopes"]] == [[-1], [0]]


async def test_a_server_that_drains_hands_its_scopes_over(redis):
    """With idempotency keys."""
    async with two(redis) as (one, other):
        await one.initialize("0:kv")
        await one.store("0:kv", ["a"])
        once = {"Idempotency-Key": "once"}
        first = await one.reserve("0:kv", ["b"], headers=once)
        await drained(one)

        async def moved():
            return (await one.post("/0/exists", {"keys": ["a"]})).status == 307

        await eventually(moved)
        assert await live_at(other, "0:kv", ["a"]) == ["a"]
        answer = await one.post("/v2/touch", of_keys("0:kv", ["a"]))
        assert answer.headers["location"] == "http://two/v2/touch"
        assert await other.reserve("0:kv", ["b"], headers=once) == first
        assert (await other.reserve("0:kv", ["b"])).json["scopes"][0]["states"] == ["busy"]


async def test_a_scope_that_cannot_be_read_keeps_no_other_from_being_served(
    redis, monkeypatch, client, capture_log
):
    monkeypatch.setattr(scope_owner, "UNREADABLE_SECONDS", 0.1)
    client.flushall()
    async with AsyncExitStack() as stack:
        async with server(redis, "one") as one:
            await one.initialize("0:kv")
            await one.initialize("1:kv")
            client.hset("hm:{0:kv}:rest", "0", b"nothing")
        logs = capture_log(scope_owner)
        other = await stack.enter_async_context(server(redis, "two"))
        assert await other.live("1:kv", ["a"]) == []
        assert await other.status_of("/readyz") == 200
        answer = await other.post("/0/exists", {"keys": ["a"]})
        assert (answer.status, answer.json["code"]) == (503, "moving")
        # Listed, and counted as one without an owner.
        assert (await other.scopes())["0:kv"]["owner"] == ""
        assert "hicache_metadata_unowned_scopes 1.0" in await other.metrics()
        (told,) = [log for log in logs if log["event"] == "scope_unreadable"]
        assert told["scope"] == "0:kv"
        assert "cannot be read" in told["error"]
        client.hdel("hm:{0:kv}:rest", "0")
        assert await live_at(other, "0:kv", ["a"]) == []
        assert (await other.scopes())["0:kv"]["owner"] == "http://two"


async def test_scopes_that_redis_has_lost_are_made_anew_together(redis, client):
    """A client finds one of two gone and makes both, before a heartbeat finds the other gone."""
    async with AsyncExitStack() as stack:
        client.flushall()
        # Alone: another server could take a scope in between.
        one = await stack.enter_async_context(server(redis, "one"))
        await one.initialize("0:kv", "0:swa")
        await one.store("0:swa", ["before"])
        client.flushall()
        assert (await one.reserve("0:kv", ["a"])).status == 503
        assert (await one.initialize("0:kv", "0:swa")).json == {"created": [True, True]}
        assert await one.live("0:swa", ["before"]) == []
        await one.store("0:swa", ["after"])
        other = await stack.enter_async_context(server(redis, "two"))
        await drained(one)
        assert await live_at(other, "0:swa", ["before", "after"]) == ["after"]


async def test_nothing_is_acknowledged_that_a_lost_scope_has_discarded(redis, client):
    """Requests that wait for the next group, when the one before finds another owner."""
    async with two(redis) as (one, _):
        await one.initialize("0:kv")
        client.hset("hm:{0:kv}:head", "token", "9-another")
        client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        asking = []
        for key in "abc":
            asking.append(asyncio.create_task(one.reserve("0:kv", [key])))
            while one.service.list_scopes().scopes[0].leased < len(asking):
                await asyncio.sleep(0.03)
        client.execute_command("CLIENT", "UNPAUSE")
        assert [answer.status for answer in await asyncio.gather(*asking)] == [503] * 3


async def test_every_server_lists_all_scopes(redis):
    async with two(redis) as (one, other):
        await one.initialize("0:kv")
        await other.initialize("1:kv")
        await one.store("0:kv", ["a"])
        wanted = {"0:kv": (1, 99, "http://one"), "1:kv": (0, 100, "http://two")}

        async def listed(caller):
            found = await caller.scopes()
            told = {n: (s["live"], s["free"], s["owner"]) for n, s in found.items()}
            return told == wanted and all(scope["log_bytes"] > 0 for scope in found.values())

        for caller in (one, other):
            await eventually(lambda caller=caller: listed(caller))
        text = await one.metrics()
        assert 'scope_owner{owner="http://one",scope="0:kv"} 1.0' in text
        assert 'scope_log_bytes{scope="0:kv"}' in text
        assert "hicache_metadata_unowned_scopes 0.0" in text
        assert "1:kv" not in text, "its owner has it"
