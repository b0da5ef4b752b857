"""The application, beyond the rules of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from contextlib import asynccontextmanager

import msgspec
import pytest

from hicache_metadata_server.auth.tokens import Tokens
from hicache_metadata_server.core.chunking import CHUNK_ENTRIES
from hicache_metadata_server.core.codec import slots_of
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.dashboard.assets import read_assets
from hicache_metadata_server.http.asgi import HEALTH, PAGES
from hicache_metadata_server.protocol import MSGPACK, ROUTES, Token
from hicache_metadata_server.server import restored_service
from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage.factory import open_store
from tests.metadata_server.http_calls import SlowStore, running

ADDRESS = re.compile(rb"""\w+://[^\s"'<>)]+|(?<=["'(=])//\w[^\s"'<>)]*""")
SVG = b"http://www.w3.org/2000/svg"
"""The name of a namespace, which nobody asks for."""
SCOPE = {"scopes": [{"scope": "0:kv", "slots": 100_000}]}


@asynccontextmanager
async def reopened(directory):
    """A server on the store of that directory, as the one before has left it."""
    store = open_store(f"sqlite:///{directory}/m.db")
    async with running(store, restored_service(store, ServerSettings(), time.time())) as caller:
        yield caller


def keys(count, name="k"):
    return [f"{name}{i:060d}" for i in range(count)]


async def test_refusals_name_the_entry_that_is_to_blame():
    cases = [
        (
            "/v2/lookup",
            {"scopes": [{"scope": "0:kv", "keys": []}, {"scope": "x", "keys": []}]},
            "scopes[1].scope",
        ),
        (
            "/v2/commit",
            {"scopes": [{"scope": "0:kv", "leases": [1], "lengths": [1], "checksums": [2**64]}]},
            "scopes[0].checksums[0]",
        ),
        (
            "/v2/reserve",
            {"scopes": [{"scope": "0:kv", "keys": ["a"], "prefixes": ["x" * 2000]}]},
            "scopes[0].prefixes[0]",
        ),
        ("/v2/reserve", {"scopes": [], "owner": "x" * 2000}, "owner"),
        (
            "/v2/initialize",
            {"scopes": [{"scope": "0:a", "slots": 1, "slot_bytes": 2**63}]},
            "scopes[0].slot_bytes",
        ),
        (
            "/v2/initialize",
            {"scopes": [{"scope": "0:a", "slots": 1, "identity": "x" * 5000}]},
            "scopes[0].identity",
        ),
        ("/0/reserve_and_allocate_page_indices", {"keys": [["a", ""], ["b", 1]]}, "keys[1][1]"),
        (
            "/0/confirm_write",
            {"written_keys_to_confirm": [["a", 1], ["b", -1]]},
            "written_keys_to_confirm[1][1]",
        ),
    ]

    async with running() as caller:
        await caller.post("/v2/initialize", SCOPE)
        for path, body, field in cases:
            reply = await caller.post(path, body)
            assert (reply.status, reply.json["field"]) == (422, field), (path, body, reply)


async def test_a_store_with_a_fault_of_its_own_is_an_answer():
    store = SlowStore()
    async with running(store) as caller:
        store.error = TypeError("a bug")
        answer = await caller.post("/v2/initialize", SCOPE)
        assert (answer.status, answer.json["code"]) == (503, "unavailable")
        assert "TypeError: a bug" in answer.json["message"]
        store.error = None
        assert (await caller.post("/v2/initialize", SCOPE)).status == 200


@pytest.mark.parametrize("count", [600, 5000])
async def test_long_requests_answer_as_short_ones_do(count):
    async with running(SlowStore()) as caller:
        await caller.post(
            "/v2/initialize",
            {"scopes": [*SCOPE["scopes"], {"scope": "1:kv", "slots": 100_000}]},
        )
        some = keys(count)
        both = [{"scope": "0:kv", "keys": some}, {"scope": "1:kv", "keys": some[:700]}]
        leases = (await caller.post("/v2/reserve", {"scopes": both})).json["scopes"]
        assert [len(part["leases"]) for part in leases] == [count, len(some[:700])]
        assert len({lease for part in leases for lease in part["leases"]}) == count + len(
            some[:700]
        )
        parts = [
            {
                "scope": f"{i}:kv",
                "leases": part["leases"],
                "lengths": [1] * len(part["leases"]),
                "checksums": part["leases"],
            }
            for i, part in enumerate(leases)
        ]
        await caller.post("/v2/commit", {"scopes": parts})
        found = (await caller.post("/v2/lookup", {"scopes": both})).json["scopes"]
        assert [part["slots"] for part in found] == [part["slots"] for part in leases]
        assert [part["checksums"] for part in found] == [part["leases"] for part in leases]
        # As use goes from the last to the first, the head of the whole list is the latest.
        assert list(caller.service.scopes["0:kv"].lru)[-1] == some[0]
        old = await caller.post("/0/get_page_indices", {"keys": some})
        assert old.json == {"indices": leases[0]["slots"]}
        gone = (await caller.post("/v2/delete", {"scopes": both})).json["scopes"]
        assert [sum(part["done"]) for part in gone] == [count, len(some[:700])]
        packed = msgspec.msgpack.encode({"scopes": both})
        assert (await caller.send("POST", "/v2/touch", packed, content_type=MSGPACK)).status == 200
        refused = await caller.post(
            "/v2/touch", {"scopes": [*both, {"scope": "2:kv", "keys": ["a"]}]}
        )
        assert (refused.status, refused.json["field"]) == (404, "scopes[2].scope")


async def test_long_requests_with_an_idempotency_key_are_done_once():
    async with running(SlowStore()) as caller:
        await caller.post("/v2/initialize", SCOPE)
        request = {"scopes": [{"scope": "0:kv", "keys": keys(2000)}]}
        first = await caller.post("/v2/reserve", request, headers={"Idempotency-Key": "once"})
        again = await caller.post("/v2/reserve", request, headers={"Idempotency-Key": "once"})
        assert first == again
        assert caller.service.list_scopes().scopes[0].leased == 2000


async def test_a_long_request_that_comes_again_meanwhile_is_done_once():
    async with running(SlowStore()) as caller:
        await caller.post("/v2/initialize", SCOPE)
        request = {"scopes": [{"scope": "0:kv", "keys": keys(2000)}]}
        calls = [
            caller.post("/v2/reserve", request, headers={"Idempotency-Key": "once"})
            for _ in range(3)
        ]
        first, *others = await asyncio.gather(*calls)
        assert others == [first, first]
        assert set(first.json["scopes"][0]["states"]) == {"leased"}


async def test_a_long_request_that_a_crash_cuts_short_is_finished_when_it_comes_again(tmp_path):
    request, once = (
        {"scopes": [{"scope": "0:kv", "keys": keys(2000)}]},
        {"Idempotency-Key": "once"},
    )
    async with reopened(tmp_path) as caller:
        await caller.post("/v2/initialize", SCOPE)
        handlers, done = caller.app.server.handlers, []
        run_chunk = handlers._run_chunk

        def crash_in_the_third(*piece):
            if len(done) == 2:
                raise asyncio.CancelledError
            done.append(run_chunk(*piece))
            return done[-1]

        handlers._run_chunk = crash_in_the_third
        with pytest.raises(asyncio.CancelledError):
            await caller.post("/v2/reserve", request, headers=once)
    async with reopened(tmp_path) as caller:
        assert caller.service.list_scopes().scopes[0].leased == 2 * CHUNK_ENTRIES
        first = await caller.post("/v2/reserve", request, headers=once)
        assert set(first.json["scopes"][0]["states"]) == {"leased"}
        assert first.json["scopes"][0]["leases"][: 2 * CHUNK_ENTRIES] == [
            lease for piece in done for lease in piece.scopes[0].leases
        ]
        assert caller.service.list_scopes().scopes[0].leased == 2000
        assert await caller.post("/v2/reserve", request, headers=once) == first


async def test_others_write_while_a_long_request_is_done():
    store = SlowStore()
    async with running(store) as caller:
        await caller.post("/v2/initialize", SCOPE)
        await caller.store("0:kv", keys(16_000))
        store.seconds, order = 0.002, []

        async def delete():
            await caller.post("/0/delete_keys", {"keys": keys(16_000)})
            order.append("deleted")

        async def write():
            await asyncio.sleep(0)
            await caller.post(
                "/v2/reserve", {"scopes": [{"scope": "0:kv", "keys": keys(1, "new")}]}
            )
            order.append("reserved")

        await asyncio.gather(delete(), write())
        assert order == ["reserved", "deleted"]
        assert (
            max(
                len(slots.states.states)
                for group in store.written[-20:]
                for slots in group.slots.values()
            )
            < 2000
        )


async def test_others_are_served_while_a_long_request_is_done():
    async with running() as caller:
        await caller.post("/v2/initialize", SCOPE)
        await caller.store("0:kv", keys(16_000))
        order = []

        async def delete():
            await caller.post("/v2/delete", {"scopes": [{"scope": "0:kv", "keys": keys(16_000)}]})
            order.append("deleted")

        async def look():
            await asyncio.sleep(0)
            await caller.post("/v2/lookup", {"scopes": [{"scope": "0:kv", "keys": keys(1)}]})
            order.append("found")

        await asyncio.gather(delete(), look())
        assert order == ["found", "deleted"]


async def test_requests_that_arrive_together_share_a_transaction():
    store = SlowStore()
    async with running(store) as caller:
        await caller.post("/v2/initialize", SCOPE)
        before = len(store.written)
        store.gate.clear()
        requests = [{"scopes": [{"scope": "0:kv", "keys": keys(4, f"{i}-")}]} for i in range(40)]
        asked = [asyncio.create_task(caller.post("/v2/reserve", request)) for request in requests]
        while caller.service.list_scopes().scopes[0].leased < 160:
            await asyncio.sleep(0)
        store.gate.set()
        await asyncio.gather(*asked)
        # The first may go alone; those that come while it is written go together.
        assert len(store.written) - before <= 3
        assert sum(len(group.slots[1].states.states) for group in store.written[before:]) == 160


async def test_nothing_is_answered_before_it_is_written():
    store = SlowStore()
    async with running(store) as caller:
        await caller.post("/v2/initialize", SCOPE)
        store.seconds = 0.2
        begin = time.monotonic()
        await caller.post("/v2/reserve", {"scopes": [{"scope": "0:kv", "keys": keys(1)}]})
        assert time.monotonic() - begin >= 0.2
        begin = time.monotonic()
        pinned = await caller.post(
            "/v2/lookup", {"scopes": [{"scope": "0:kv", "keys": keys(1)}], "pin_seconds": 1}
        )
        assert pinned.json["pin"] == 0, (
            "a leased page is not live: there was nothing to pin, nor to write"
        )


async def test_a_store_that_fails_is_told_and_nothing_is_lost():
    store = SlowStore()
    async with running(store) as caller:
        await caller.post("/v2/initialize", SCOPE)
        store.error = StoreError("the disk is full")
        request = {"scopes": [{"scope": "0:kv", "keys": keys(3)}]}
        refused = await caller.post("/v2/reserve", request, headers={"Idempotency-Key": "once"})
        assert (refused.status, refused.json["code"]) == (503, "unavailable")
        assert "disk is full" in refused.json["message"]
        assert (await caller.send("GET", "/readyz")).status == 503
        assert (await caller.send("GET", "/healthz")).status == 200
        store.error = None
        assert (
            await caller.post("/v2/reserve", request, headers={"Idempotency-Key": "once"})
        ).json["scopes"][0]["states"] == ["busy"] * 3
        # What could not be written went with the next group.
        assert list(slots_of(store.written[-1].slots[1].states.slots, 3)) == [0, 1, 2]
        assert (await caller.send("GET", "/readyz")).status == 200


async def test_what_was_accepted_is_written_at_the_end():
    store = SlowStore()

    async with running(store) as caller:
        await caller.post("/v2/initialize", SCOPE)
        store.seconds = 0.05
        pending = asyncio.create_task(caller.store("0:kv", keys(2)))
        await asyncio.sleep(0.01)
        assert (await pending).status == 200
    assert len(store.written) >= 3


@pytest.mark.parametrize(
    ("content_type", "answered"),
    [("text/html", "application/json"), (MSGPACK, MSGPACK), ("", "application/json")],
)
async def test_a_get_is_answered_whatever_it_calls_its_body(content_type, answered):
    async with running() as caller:
        for path in ("/v2", "/v2/scopes"):
            reply = await caller.send("GET", path, content_type=content_type)
            assert (reply.status, reply.headers["content-type"]) == (200, answered)


async def test_scopes_are_limited():
    async with running(service=MetadataService(max_scopes=2)) as caller:
        for i, status in ((0, 204), (1, 204), (2, 413), (1, 204)):
            assert (await caller.post(f"/{i}/initialize", {"num_pages": 5})).status == status
        refused = await caller.post("/v2/initialize", {"scopes": [{"scope": "7:kv", "slots": 1}]})
        assert (refused.status, refused.json["field"]) == (413, "scopes")


async def test_bodies_come_in_pieces_and_have_a_limit():
    limits = msgspec.structs.replace(DEFAULTS, body_bytes=70_000)
    async with running(service=MetadataService(limits)) as caller:
        await caller.post("/v2/initialize", SCOPE)
        body = msgspec.json.encode({"scopes": [{"scope": "0:kv", "keys": keys(600)}]})
        assert (await caller.send("POST", "/v2/lookup", body, pieces=7)).status == 200
        long = b"[" + b" " * 70_000
        assert (await caller.send("POST", "/v2/lookup", long, pieces=7)).status == 413
        assert (
            await caller.send("POST", "/v2/lookup", b"", headers={"content-length": "70001"})
        ).status == 413


async def test_the_description_is_that_of_the_types():
    async with running() as caller:
        described = (await caller.send("GET", "/openapi.json")).json
        assert set(ROUTES) <= set(described["paths"])
        assert "/{rank}/confirm_write" in described["paths"]
        reserve = described["paths"]["/v2/reserve"]["post"]
        assert reserve["requestBody"]["content"][MSGPACK]["schema"] == {
            "$ref": "#/components/schemas/Reserve"
        }
        schemas = described["components"]["schemas"]
        assert schemas["ReserveScope"]["properties"]["prefixes"]["type"] == "array"
        assert {"Problem", "Leased", "FoundPages", "SglangKeys"} <= set(schemas)


async def test_what_a_browser_gets_refers_to_nothing_outside():
    async with running() as caller:
        for path in (*read_assets(), *PAGES, *HEALTH, "/v2", "/v2/scopes"):
            answer = await caller.send("GET", path)
            assert answer.status == 200, path
            assert set(ADDRESS.findall(answer.body)) <= {SVG}, path


async def test_a_timer_that_loses_its_cancellation_ends_all_the_same():
    async with running() as caller:
        handlers, waits = caller.app.server.handlers, asyncio.Event()

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
        assert (await caller.post("/v2/initialize", SCOPE)).status == 200
        await caller.store("0:kv", keys(3))
        text = (await caller.send("GET", "/metrics")).body.decode()
        assert 'hicache_metadata_slots{scope="0:kv",state="live"} 3.0' in text
        assert 'hicache_metadata_requests_total{route="/v2/commit",status="200"} 1.0' in text
        unknown = await caller.send("GET", "/nothing")
        assert (unknown.status, unknown.json["code"]) == (404, "unknown_route")


async def test_what_was_asked_for_is_counted_as_hits_and_misses():
    async with running() as caller:
        await caller.post("/v2/initialize", SCOPE)
        await caller.store("0:kv", keys(3))
        await caller.post(
            "/v2/lookup", {"scopes": [{"scope": "0:kv", "keys": [*keys(2), "absent"]}]}
        )
        await caller.post("/0/exists", {"keys": ["absent", *keys(3)]})
        await caller.post("/0/get_page_indices", {"keys": ["absent", "absent"]})
        told = (await caller.send("GET", "/v2/scopes")).json["scopes"][0]
        assert (told["hits"], told["misses"], told["evicted"]) == (5, 4, 0)
        text = (await caller.send("GET", "/metrics")).body.decode()
        assert 'hicache_metadata_lookup_keys_total{result="hit",scope="0:kv"} 5.0' in text


def test_tokens_include_those_below():
    order = list(Token)
    tokens = Tokens({"w": Token.WRITE})
    for needed in order[: order.index(Token.WRITE) + 1]:
        tokens.check(b"bearer w", needed)
