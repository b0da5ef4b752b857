"""Tenants on a shared store: what one server has made, every other guards, and a quota is one for
all of them."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.auth.token_file import record_of
from hicache_metadata_server.auth.tokens import Tokens
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.tenants import Quota, Quotas, TenantUsage
from tests.metadata_server.every_route import SCOPE, ask, every_route, prepared
from tests.metadata_server.http_calls import PATIENCE_SECONDS, audit_to, running_shared
from tests.metadata_server.redis_servers import redis_server
from tests.metadata_server.test_refusals import bearer, records, refused_tokens

QUOTAS = Quotas(
    {"acme": Quota(scopes=30, slots=2000, bytes=1_000_000)}, default=Quota(scopes=1, slots=100)
)
QUOTA = QUOTAS.of("acme")


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture
def server(redis, tmp_path):
    """Makes one of several servers on a store that is empty at first."""
    with redis.client() as client:
        client.flushall()

    peers = {}

    def start(quotas=Quotas()):  # noqa: B008 - it cannot be changed
        def guard(service):
            tokens = Tokens()
            tokens.replace_records(
                [*records("acme", "other", ""), record_of("revoked", "admin", name="revoked")]
            )
            tokens.replace_records(list(records("acme", "other", "")))
            service.tenants.quotas = quotas
            return Security(service, tokens, audit_to(tmp_path / "audit"))

        name = f"http://{len(peers)}"
        return running_shared(redis.url, DEFAULTS, guard=guard, name=name, peers=peers)

    return start


async def listed(caller, token="admin-"):
    return (await caller.send("GET", "/v2/scopes", headers=bearer(token))).json["scopes"]


async def test_every_route_of_another_server_refuses_and_does_nothing(server):
    async with server() as first, server() as second:
        lease, pin = await prepared(first, bearer("write-acme"))
        before = await listed(first)
        for asked in every_route(lease=lease, pin=pin):
            for headers, status in refused_tokens(asked):
                reply = await ask(second, asked, {**headers, "idempotency-key": "k"})
                assert reply.status == status, (asked, headers, reply)
        assert await listed(first) == before
        # The other one has it from the map, a second later.
        until = time.monotonic() + PATIENCE_SECONDS
        while await listed(second) != before:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        assert await listed(second, "admin-other") == []
        assert await listed(second, "read-acme") == before
        # Each checks its own scopes, if none is named.
        assert (await first.post("/v2/fsck", {}, headers=bearer("admin-other"))).json["slots"] == 0
        assert (await first.post("/v2/fsck", {}, headers=bearer("admin-acme"))).json[
            "slots"
        ] == before[0]["slots"]


async def test_another_tenant_s_pins_stay(server):
    async with server() as first, server() as second:
        _, pin = await prepared(first, bearer("write-acme"))
        looked = {"scope": SCOPE, "slots": [0]}
        for token, pins in (("read-other", 1), ("read-acme", 0)):
            assert (
                await second.post("/v2/unpin", {"pins": [pin]}, headers=bearer(token))
            ).status == 204
            told = (await second.post("/v2/inspect", looked, headers=bearer("admin-"))).json[
                "slots"
            ][0]
            assert told["pins"] == pins, token


async def test_a_quota_is_one_for_all_servers(server):
    """Eight clients of two servers make scopes as fast as they can."""

    async def client(caller, number, given):
        chance = random.Random(number)
        for i in range(20):
            some = [
                {
                    "scope": f"{number}:{i}-{j}",
                    "slots": chance.choice((1, 10, 100, 300)),
                    "slot_bytes": chance.choice((1, 500, 4096)),
                }
                for j in range(2)
            ]
            reply = await caller.post(
                "/v2/initialize", {"scopes": some}, headers=bearer("write-acme")
            )
            assert reply.status in (200, 403), reply
            if reply.status == 200:
                given += some
            else:
                assert (reply.json["code"], reply.json["field"]) == ("quota", "scopes")
                assert "tenant 'acme' is at its quota: it has" in reply.json["message"]

    given = []
    async with server(QUOTAS) as first, server(QUOTAS) as second:
        await asyncio.gather(
            *(client((first, second)[number % 2], number, given) for number in range(8))
        )
        scopes = await listed(first)
    assert given
    assert {scope["scope"] for scope in scopes} == {scope["scope"] for scope in given}
    held = TenantUsage(
        len(scopes),
        sum(one["slots"] for one in scopes),
        sum(one["slots"] * one["slot_bytes"] for one in scopes),
    )
    assert held.scopes <= QUOTA.scopes
    assert held.slots <= QUOTA.slots
    assert held.bytes <= QUOTA.bytes


async def test_the_compatible_part_has_the_same_quota(server):
    async with server(QUOTAS) as first, server(QUOTAS) as second:
        for caller, token, rank, pages, status in (
            (first, "write-other", 0, 101, 403),
            (first, "write-other", 0, 100, 204),
            (second, "write-other", 0, 100, 204),
            (second, "write-other", 1, 1, 403),
            (second, "write-", 1, 1000, 204),
            (first, "write-other", 1, 1000, 403),
        ):
            reply = await caller.post(
                f"/{rank}/initialize", {"num_pages": pages}, headers=bearer(token)
            )
            assert reply.status == status, reply
            assert status == 204 or reply.json["field"] == "namespace"


async def test_where_bytes_are_limited_slots_say_how_large_they_are(server):
    async with server(QUOTAS) as caller:
        reply = await caller.post(
            "/v2/initialize",
            {"scopes": [{"scope": "0:kv", "slots": 8}]},
            headers=bearer("write-acme"),
        )
        assert (reply.status, reply.json["code"]) == (403, "quota")
        assert "slot_bytes" in reply.json["message"]
