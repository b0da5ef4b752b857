"""Tenants: what they may have, and one quota for all servers of a store."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.files import read_tenants_file
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.limits import DEFAULTS, Caller, Quota, Quotas, TenantUsage
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.shared.scope_owner import ScopeOwner
from tests.metadata_server.every_route import SCOPE, ask, every_route, prepared
from tests.metadata_server.http_calls import eventually, running, running_shared
from tests.metadata_server.servers import DURABLE, served
from tests.metadata_server.test_refusals import bearer, guarded, refused_tokens
from tests.metadata_server.token_files import write_tokens
from tests.support import waiting

ACME = Caller("t", p.Token.WRITE, "acme")
SLOTS, SLOT_BYTES = (1, 10, 100, 300), (1, 500, 4096)


def geometry(scope="0:a", slots=1, slot_bytes=0):
    return p.ScopeGeometry(scope=scope, slots=slots, slot_bytes=slot_bytes)


def with_quota(**limits):
    service = MetadataService()
    service.quotas = Quotas({"acme": Quota(**limits)})
    return service


def initialize(service, *parts):
    try:
        service.initialize(p.Initialize(scopes=list(parts)), 0.0, ACME)
    except RequestError as refused:
        return refused.problem.code
    return "done"


def test_scopes_of_a_request_are_made_together_or_not_at_all():
    service = with_quota(scopes=2)
    assert initialize(service, *(geometry(f"0:{i}") for i in range(3))) == "quota"
    assert service.list_scopes().scopes == []
    assert initialize(service, *(geometry("0:a"), geometry("0:a"), geometry("0:b"))) == "done"


def test_where_bytes_are_limited_slots_say_how_large_they_are():
    service = with_quota(bytes=100)
    with pytest.raises(RequestError, match="slot_bytes"):
        service.initialize(p.Initialize(scopes=[geometry("0:a", 10)]), 0.0, ACME)
    assert initialize(service, geometry("0:a", 10, 10)) == "done"


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12),
    st.builds(Quota, *[st.none() | st.integers(0, 60)] * 3),
)
def test_what_is_given_is_what_fits(sizes, quota):
    service, held = MetadataService(), TenantUsage()
    service.quotas = Quotas(default=quota)
    for number, (slots, slot_bytes) in enumerate(sizes):
        new = TenantUsage(held.scopes + 1, held.slots + slots, held.bytes + slots * slot_bytes)
        fits = all(
            most is None or has <= most
            for has, most in zip(new, (quota.scopes, quota.slots, quota.bytes), strict=True)
        )
        assert initialize(service, geometry(f"0:{number}", slots, slot_bytes)) == (
            "done" if fits else "quota"
        )
        held = new if fits else held
    assert TenantUsage.of(service.held_by("acme")) == held


async def test_a_quota_is_of_one_tenant_and_of_new_scopes(tmp_path):
    """By the compatible part, too."""
    options = guarded(tmp_path, "acme", "other", "")
    options["service"].quotas = Quotas({"acme": Quota(scopes=1, slots=10)})
    async with running(**options) as caller:
        for token, rank, pages, status in (
            ("write-acme", 0, 11, 403),
            ("write-acme", 0, 10, 204),
            ("write-acme", 0, 10, 204),
            ("write-acme", 1, 1, 403),
            ("write-other", 1, 100, 204),
            ("write-", 2, 100, 204),
        ):
            made = {"num_pages": pages}
            reply = await caller.post(f"/{rank}/initialize", made, headers=bearer(token))
            assert reply.status == status, reply
        told = await caller.metrics(headers=bearer("read-"))
        assert 'hicache_metadata_tenant_holds{tenant="acme",what="slots"} 10.0' in told
        assert 'hicache_metadata_tenant_quota{tenant="acme",what="slots"} 10.0' in told


def test_a_file_of_quotas_is_read_again_when_it_changes(tmp_path):
    tokens, quotas = tmp_path / "tokens.json", tmp_path / "tenants.toml"
    write_tokens(tokens, acme="write token-of-acme acme")
    quotas.write_text("[tenants.acme]\nmax_scopes = 1\n")
    command = f"{DURABLE} --token-file {tokens} --tenants-file {quotas}"
    with served(command, "token-of-acme") as (_, client):

        def status(rank):
            return client.post(f"/{rank}/initialize", {"num_pages": 1}).status

        assert [status(rank) for rank in range(2)] == [204, 403]
        quotas.write_text("[tenants.acme]\nmax_scopes = 2\n")
        waiting.eventually(lambda: status(1) == 204)
        assert status(2) == 403


def test_a_file_of_quotas(tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(
        '[default]\nmax_scopes = 4\n[tenants.acme]\nmax_bytes = "2GiB"\nmax_slots = 7\n'
        "[tenants.free]\n"
    )
    quotas = read_tenants_file(file)
    assert quotas.of("acme") == Quota(None, 7, 2 << 30)
    assert (quotas.of("free"), quotas.of("")) == (Quota(), Quota())
    assert quotas.of("unnamed") == Quota(scopes=4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[default]\nmax_pages = 1", "default: .* unknown field `max_pages`"),
        ("[tenants.acme]\nmax_slot = 1", "tenants.acme: .* unknown field `max_slot`"),
        ("[defaults]\nmax_slots = 1", "unknown field `defaults`"),
        ("[tenants.a]\nmax_slots = -1", "tenants.a: .*max_slots"),
        ("[tenants.a]\nmax_bytes = 'much'", "tenants.a: .*'much'"),
        ("[tenants.'a b']\n", "key"),
        ("[tenants]\na = 1", "tenants"),
        ("most", "the file: "),
        ("\xff", "the file: .*utf-8"),
    ],
)
def test_a_file_of_quotas_that_means_nothing_is_refused(tmp_path, content, said):
    file = tmp_path / "tenants.toml"
    file.write_text(content, "latin-1")
    with pytest.raises(ValueError, match=said):
        read_tenants_file(file)
    file.chmod(0o666)
    with pytest.raises(ValueError, match="chmod go-w"):
        read_tenants_file(file)


QUOTAS = Quotas({"acme": Quota(scopes=30, slots=2000, bytes=1_000_000)})
NO_QUOTAS = Quotas()
QUOTA = QUOTAS.of("acme")


# Several servers on one store.


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
