"""Tenants on a shared store: what one server has made, every other guards, and a quota is one for
all of them."""

from __future__ import annotations

import asyncio
import random

import pytest

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.limits import DEFAULTS, Quota, Quotas, TenantUsage
from hicache_metadata_server.shared.scope_owner import ScopeOwner
from tests.metadata_server.every_route import SCOPE, ask, every_route, prepared
from tests.metadata_server.http_calls import eventually, running_shared
from tests.metadata_server.test_refusals import bearer, guarded, refused_tokens
from tests.metadata_server.test_tenants import SLOT_BYTES, SLOTS, geometry

QUOTAS = Quotas({"acme": Quota(scopes=30, slots=2000, bytes=1_000_000)})
NO_QUOTAS = Quotas()
QUOTA = QUOTAS.of("acme")


@pytest.fixture
def server(redis, tmp_path):
    """Makes one of several servers on a store that is empty at first."""
    with redis.client() as client:
        client.flushall()
    peers = {}

    def start(quotas=NO_QUOTAS):
        def guard(service):
            service.quotas = quotas
            return guarded(tmp_path, "acme", "other", "", service=service)["security"]

        name = f"http://{len(peers)}"
        return running_shared(redis.url, DEFAULTS, guard=guard, name=name, peers=peers)

    return start


async def test_every_route_of_another_server_refuses_and_does_nothing(server):
    async with server() as first, server() as second:
        lease = await prepared(first, bearer("write-acme"))
        before = await first.scopes(headers=bearer("admin-"))
        for asked in every_route(lease=lease):
            for headers, status in refused_tokens(asked):
                reply = await ask(second, asked, {**headers, "idempotency-key": "k"})
                assert reply.status == status, (asked, headers, reply)
        assert await first.scopes(headers=bearer("admin-")) == before

        async def known():
            return await second.scopes(headers=bearer("admin-")) == before

        # The other one has it from the map, a second later.
        await eventually(known)
        assert await second.scopes(headers=bearer("admin-other")) == {}
        assert await second.scopes(headers=bearer("read-acme")) == before
        # Each checks its own scopes, if none is named.
        for token, slots in (("admin-other", 0), ("admin-acme", before[SCOPE]["slots"])):
            checked = await first.post("/v2/fsck", {}, headers=bearer(token))
            assert checked.json["slots"] == slots


async def test_what_is_announced_counts_once(server, monkeypatch):
    """A heartbeat after the announcement shows the server its own scopes, which it is still to make:
    they were refused then, and stayed announced."""
    create = ScopeOwner.create

    async def create_and_poll(owner, *arguments):
        created = await create(owner, *arguments)
        await owner.poll()
        return created

    monkeypatch.setattr(ScopeOwner, "create", create_and_poll)
    write = bearer("write-acme")
    async with server(Quotas({"acme": Quota(scopes=2)})) as one:
        request = p.Initialize(scopes=[geometry(f"0:{name}", 8, 64) for name in "ab"])
        assert (await one.post("/v2/initialize", request, headers=write)).status == 200
        request = p.Initialize(scopes=[geometry("0:c", 8, 64)])
        assert (await one.post("/v2/initialize", request, headers=write)).status == 403
        assert set(await one.scopes(headers=bearer("admin-"))) == {"0:a", "0:b"}


async def test_a_quota_is_one_for_all_servers(server):
    """Eight clients of two servers make scopes as fast as they can."""

    async def client(caller, number, given):
        chance = random.Random(number)
        for i in range(20):
            some = [
                geometry(f"{number}:{i}-{j}", chance.choice(SLOTS), chance.choice(SLOT_BYTES))
                for j in range(2)
            ]
            request = p.Initialize(scopes=some)
            reply = await caller.post("/v2/initialize", request, headers=bearer("write-acme"))
            assert reply.status in (200, 403), reply
            if reply.status == 200:
                given += some
            else:
                assert (reply.json["code"], reply.json["field"]) == ("quota", "scopes")
                assert "tenant 'acme' is at its quota: it has" in reply.json["message"]

    given = []
    async with server(QUOTAS) as first, server(QUOTAS) as second:
        clients = (client((first, second)[number % 2], number, given) for number in range(8))
        await asyncio.gather(*clients)
        assert given
        assert set(await first.scopes(headers=bearer("admin-"))) == {one.scope for one in given}
        # The compatible part has the same quota.
        full = {"num_pages": 10**6}
        for caller in (first, second):
            reply = await caller.post("/9/initialize", full, headers=bearer("write-acme"))
            assert (reply.status, reply.json["field"]) == (403, "namespace")
            reply = await caller.post("/9/initialize", full, headers=bearer("write-"))
            assert reply.status == 204
    held = TenantUsage.of(given)
    assert held.scopes <= QUOTA.scopes
    assert held.slots <= QUOTA.slots
    assert held.bytes <= QUOTA.bytes
