"""The application, beyond the rules of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http.asgi import HEALTH
from hicache_metadata_server.protocol import JSON, MSGPACK, ROUTES
from hicache_metadata_server.storage import group_commit
from tests.metadata_server.http_calls import SlowStore, of_keys, running
from tests.metadata_server.protocol.peer import keys_of

SLOTS = 100_000


async def test_a_request_that_comes_again_is_done_once():
    """MD-IDEM-1: meanwhile, and later."""
    async with running(SlowStore()) as caller:
        await caller.initialize("0:kv", slots=SLOTS)

        def ask():
            return caller.reserve("0:kv", keys_of(2000), headers={"Idempotency-Key": "once"})

        first, *others = await asyncio.gather(ask(), ask(), ask())
        assert [*others, await ask()] == [first] * 3
        assert set(first.json["scopes"][0]["states"]) == {"leased"}
        assert (await caller.scopes())["0:kv"]["leased"] == 2000


async def test_short_requests_are_served_between_long_ones():
    """MD-REQ-7: each long one has a turn of the event loop of its own, from its decoding on."""
    async with running() as caller:
        await caller.initialize("0:kv", slots=SLOTS)
        order = []

        async def ask(count):
            await caller.post("/v2/lookup", of_keys("0:kv", keys_of(count)))
            order.append(count)

        await asyncio.gather(*(ask(4000) for _ in range(6)), ask(1))
        assert order.index(1) <= 1


async def test_requests_that_arrive_together_share_a_transaction(monkeypatch):
    """And none is answered before it is written; those are written that a stop meets."""
    monkeypatch.setattr(group_commit, "PATIENCE_SECONDS", 60.0)
    store = SlowStore()
    async with running(store) as caller:
        await caller.initialize("0:kv", slots=SLOTS)
        before = len(store.written)
        store.gate.clear()
        asked = [
            asyncio.create_task(caller.reserve("0:kv", keys_of(4, f"{i}-"))) for i in range(40)
        ]
        while caller.service.list_scopes().scopes[0].leased < 160:
            await asyncio.sleep(0)
        assert not any(task.done() for task in asked)
        store.gate.set()
    assert {(await task).status for task in asked} == {200}
    # The first may go alone; those that come while it is written go together.
    assert len(store.written) - before <= 3
    assert sum(len(group.slots[1].states.states) for group in store.written[before:]) == 160


@pytest.mark.parametrize(
    ("error", "said"),
    [(StoreError("the disk is full"), "disk is full"), (TypeError("a bug"), "TypeError: a bug")],
)
async def test_a_store_that_fails_is_told_and_nothing_is_lost(error, said):
    store, once = SlowStore(), {"headers": {"Idempotency-Key": "once"}}
    async with running(store) as caller:
        await caller.initialize("0:kv")
        store.error = error
        refused = await caller.reserve("0:kv", keys_of(3), **once)
        assert (refused.status, refused.json["code"]) == (503, "unavailable")
        assert said in refused.json["message"]
        assert [await caller.status_of(path) for path in HEALTH] == [200, 503]
        store.error = None
        again = await caller.reserve("0:kv", keys_of(3), **once)
        assert again.json["scopes"][0]["states"] == ["busy"] * 3
        # What could not be written went with the next group.
        assert list(store.written[-1].slots[1].changed) == [0, 1, 2]
        assert await caller.status_of("/readyz") == 200


@pytest.mark.parametrize(
    ("content_type", "answered"), [("text/html", JSON), (MSGPACK, MSGPACK), ("", JSON)]
)
async def test_a_get_is_answered_whatever_it_calls_its_body(content_type, answered):
    async with running() as caller:
        for path in ("/v2", "/v2/scopes"):
            reply = await caller.send("GET", path, content_type=content_type)
            assert (reply.status, reply.headers["content-type"]) == (200, answered)


async def test_heads_of_requests_and_answers():
    """Load balancers ask by HEAD; a 204 says nothing of a body."""
    async with running() as caller:
        for path in (*HEALTH, "/metrics"):
            assert (await caller.send("HEAD", path)).status == 200
        made = await caller.post("/0/initialize", {"num_pages": 5})
        assert (made.status, made.headers, made.body) == (204, {}, b"")
        refused = await caller.send("POST", "/0/exists", headers={"content-length": "9" * 15})
        assert (refused.status, refused.headers["connection"]) == (413, "close")


async def test_scopes_are_limited():
    async with running(service=MetadataService(max_scopes=2)) as caller:
        for i, status in ((0, 204), (1, 204), (2, 413), (1, 204)):
            assert (await caller.post(f"/{i}/initialize", {"num_pages": 5})).status == status
        refused = await caller.initialize("7:kv")
        assert (refused.status, refused.json["field"]) == (413, "scopes")


async def test_the_description_is_that_of_the_types():
    async with running() as caller:
        described = (await caller.send("GET", "/openapi.json")).json
        paths, schemas = described["paths"], described["components"]["schemas"]
        assert {*ROUTES, "/{rank}/confirm_write"} <= set(paths)
        asked = paths["/v2/reserve"]["post"]["requestBody"]["content"][MSGPACK]["schema"]
        assert asked == {"$ref": "#/components/schemas/Reserve"}
        history = paths["/v2/history"]["get"]
        told = history["responses"]["200"]["content"][JSON]["schema"]
        assert told == {"$ref": "#/components/schemas/History"}
        assert [parameter["name"] for parameter in history["parameters"]] == ["after"]
        assert schemas["ReserveScope"]["properties"]["prefixes"]["type"] == "array"
        assert {"Problem", "Leased", "FoundPages", "SglangKeys", "SlowCall"} <= set(schemas)


async def test_a_timer_that_loses_its_cancellation_ends_all_the_same():
    async with running() as caller:
        handlers, waits = caller.app.handlers, asyncio.Event()

        async def tick(slots):
            waits.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return False

        handlers.tick = tick
        await waits.wait()
        started = time.monotonic()
    assert time.monotonic() - started < 30


async def test_metrics():
    async with running() as caller:
        await caller.initialize("0:kv")
        await caller.store("0:kv", keys_of(3))
        assert await caller.live("0:kv", [*keys_of(2), "absent"]) == keys_of(2)
        await caller.post("/0/exists", {"keys": ["absent", *keys_of(3)]})
        await caller.post("/0/get_page_indices", {"keys": ["absent", "absent"]})
        unknown = await caller.send("GET", "/nothing")
        assert (unknown.status, unknown.json["code"]) == (404, "unknown_route")
        told = (await caller.scopes())["0:kv"]
        assert (told["hits"], told["misses"], told["evicted"]) == (5, 4, 0)
        text = await caller.metrics()
        for line in (
            'slots{scope="0:kv",state="live"} 3.0',
            'requests_total{route="/v2/commit",status="200"} 1.0',
            'lookup_keys_total{result="hit",scope="0:kv"} 5.0',
        ):
            assert f"hicache_metadata_{line}" in text
