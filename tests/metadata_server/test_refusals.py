"""Every route, and everybody who may not use it, pages of other sites too: nothing is done."""

from __future__ import annotations

import socket

import msgspec
import pytest

from hicache_metadata_server.auth.access import Tokens
from hicache_metadata_server.auth.files import record_of
from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.protocol import ROUTES, Token
from hicache_metadata_server.settings import ServerSettings
from tests.metadata_server.every_route import SCOPE, ask, every_route, prepared
from tests.metadata_server.http_calls import audit_to, running
from tests.metadata_server.token_files import EARLIER

ORDER = list(Token)
HEALTH = ("/healthz", "/readyz")


def records(*tenants):
    """For each tenant a token of each right, called right-tenant, and one of each that has
    expired."""
    for tenant in tenants:
        for right in ("read", "write", "admin"):
            for name, expires in ((f"{right}-{tenant}", None), (f"late-{right}-{tenant}", EARLIER)):
                yield record_of(name, right, name=name, tenant=tenant, expires=expires)


def bearer(token):
    return {"authorization": f"Bearer {token}"}


def guarded(tmp_path, *tenants, service=None):
    service, tokens = service or MetadataService(), Tokens()
    tokens.replace_records([*records(*tenants), record_of("revoked", "admin", name="revoked")])
    tokens.replace_records(list(records(*tenants)))
    return {"service": service, "security": Security(service, tokens, audit_to(tmp_path / "audit"))}


def state(service):
    """All that a request may change, counters and the order of use included."""
    now = service.limits.lease_seconds
    scopes = []
    for name, scope in sorted(service.scopes.items()):
        slots = [scope.status(slot, now) for slot in range(64)]
        slots = [msgspec.structs.replace(slot, seconds_left=0) for slot in slots]
        counts = scope.hits, scope.misses, scope.evicted, scope.epoch
        scopes.append(
            (name, scope.geometry, scope.tenant, scope.model, slots, list(scope.lru), counts)
        )
    return [*scopes, service.draining, len(service.answers)]


def refused_tokens(asked):
    """Tokens with which a request of tenant acme is refused, and how."""
    for header in ({}, {"authorization": ""}, {"authorization": "Basic admin-acme"}):
        yield header, 401
    for token in ("", "wrong", "revoked", "late-admin-acme", "late-admin-"):
        yield bearer(token), 401
    forbidden = [
        f"{right}-{tenant}"
        for right in ORDER[: ORDER.index(asked.right)]
        for tenant in ("acme", "")
    ]
    if asked.names_scope:
        # Without a tenant only an admin sees what is a tenant's.
        forbidden += ["read-other", "write-other", "admin-other", "read-", "write-"]
    elif not asked.open_to_tenants:
        forbidden += ["admin-other", "admin-acme"]
    for token in forbidden:
        yield bearer(token), 403


def named(asked):
    """The field that names the scope of a request."""
    scopes = (asked.body or {}).get("scopes")
    if not scopes:
        return "scope" if asked.path.startswith("/v2") else "namespace"
    return "scopes[0]" if scopes == [SCOPE] else "scopes[0].scope"


async def test_every_route_refuses_and_does_nothing(tmp_path):
    """MD-AUTH-1 and MD-AUTH-2."""
    seen = set()

    async with running(**guarded(tmp_path, "acme", "other", "")) as caller:
        lease = await prepared(caller, bearer("write-acme"))
        before = state(caller.service)
        for asked in every_route(lease=lease):
            for headers, status in refused_tokens(asked):
                reply = await ask(caller, asked, {**headers, "idempotency-key": "k"})
                assert reply.status == status, (asked, headers, reply)
                assert set(reply.json) == {"code", "message", "field"}
                assert reply.json["code"] == {401: "unauthorized", 403: "forbidden"}[status]
                if headers == bearer("admin-other") and asked.names_scope:
                    assert reply.json["field"] == named(asked)
                assert state(caller.service) == before, (asked, headers)
                seen.add((asked.path, status))
        for path in ("/nothing", "/0/nothing", "/v2/", "//", "/0/exists/"):
            assert (await caller.send("POST", path, b"{}")).status == 401
        for path in HEALTH:
            assert (await caller.send("GET", path)).status == 200
    assert {path for path, status in seen if status == 401} >= set(ROUTES)


@pytest.mark.parametrize("token", ["admin-acme", "admin-"])
async def test_the_same_requests_are_done_for_who_may(tmp_path, token):
    """So what the test above sends is refused for its token, and for nothing else."""
    # Each in a server of its own: one of them clears, and one drains.
    for number in range(len(list(every_route(lease=1)))):
        async with running(**guarded(tmp_path, "acme", "")) as caller:
            lease = await prepared(caller, bearer("write-acme"))
            asked = list(every_route(lease=lease))[number]
            reply = await ask(caller, asked, bearer(token))
            refused = token == "admin-acme" and not (asked.names_scope or asked.open_to_tenants)
            assert reply.status in ((403,) if refused else asked.done), (asked, reply)


async def test_what_names_no_scope_keeps_to_what_is_the_tenants(tmp_path):
    async with running(**guarded(tmp_path, "acme", "other", "")) as caller:
        await prepared(caller, bearer("write-acme"))
        await caller.initialize("1:kv", slots=8, headers=bearer("write-other"))
        await caller.post("/2/initialize", {"num_pages": 8}, headers=bearer("write-"))
        refused = await caller.initialize("9:new", SCOPE, headers=bearer("write-other"))
        assert (refused.status, refused.json["field"]) == (403, "scopes[1].scope")
        for token, tenants in (
            ("read-acme", {SCOPE: "acme"}),
            ("read-other", {"1:kv": "other"}),
            ("read-", {"2:kv": ""}),
            ("admin-", {SCOPE: "acme", "1:kv": "other", "2:kv": ""}),
        ):
            listed = await caller.scopes(headers=bearer(token))
            assert {name: one["tenant"] for name, one in listed.items()} == tenants, token
        for token, slots in (("admin-acme", 64), ("admin-other", 8), ("admin-", 80)):
            assert (await caller.post("/v2/fsck", {}, headers=bearer(token))).json["slots"] == slots


async def test_no_tenant_gets_another_ones_remembered_answer(tmp_path):
    async with running(**guarded(tmp_path, "acme", "other")) as caller:
        for tenant, scope in (("acme", "0:a"), ("other", "0:b")):
            headers = {**bearer(f"write-{tenant}"), "idempotency-key": "same"}
            reply = await caller.initialize(scope, headers=headers)
            assert reply.json == {"created": [True]}, "a key of another tenant's is another key"
        once = {"idempotency-key": "once"}
        mine = await caller.reserve("0:a", ["k"], headers=bearer("write-acme") | once)
        assert mine.status == 200
        stolen = await caller.reserve("0:a", ["k"], headers=bearer("write-other") | once)
        assert (stolen.status, stolen.json["field"]) == (403, "scopes[0].scope")


# Pages of other sites.


HOST = "127.0.0.1:18000"
HERE = {"host": HOST}
REBOUND = "evil.example:18000"
FOREIGN = [
    *(
        HERE | {"origin": f"http://{host}"}
        for host in (REBOUND, "127.0.0.1:3000", "localhost:18000")
    ),
    *(HERE | {"origin": origin} for origin in ("https://evil.example", "null", "")),
    HERE | {"origin": "https://evil.example", "sec-fetch-site": "same-origin"},
    *(HERE | {"sec-fetch-site": site} for site in ("cross-site", "same-site")),
    # DNS rebinding: the browser takes this server for the site's.
    {"host": REBOUND},
    {"host": REBOUND, "origin": f"http://{REBOUND}", "sec-fetch-site": "same-origin"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "[::1].evil.example"},
]
OWN = [
    {},
    *(
        {"host": host}
        for host in (HOST, "localhost", "[::1]:18000", "meta:18000", "10.0.0.7:18000")
    ),
    *({"host": host} for host in ("meta.svc.cluster.local:18000", socket.gethostname())),
    HERE | {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"},
    HERE | {"sec-fetch-site": "none"},
]


async def test_every_route_refuses_pages_of_other_sites_and_does_nothing():
    """MD-AUTH-3."""
    async with running() as caller:
        lease = await prepared(caller, {})
        before = state(caller.service)
        for asked in every_route(lease=lease):
            for headers in FOREIGN:
                reply = await ask(caller, asked, headers)
                told = reply.status, reply.json["code"]
                assert told == (403, "forbidden"), (asked, headers, reply)
                assert reply.json["field"] in ("Host", "Origin", "Sec-Fetch-Site")
        assert state(caller.service) == before
        # Health is told to everybody, and files of the page hold no data.
        for path in ("/healthz", "/readyz", "/"):
            assert (await caller.send("GET", path, headers=FOREIGN[0])).status == 200


async def test_clients_and_the_servers_own_page_are_served():
    async with running() as caller:
        for headers in OWN:
            made = await caller.post("/0/initialize", {"num_pages": 4}, headers=headers)
            assert made.status == 204, headers
            for path in ("/v2/scopes", "/metrics"):
                assert (await caller.send("GET", path, headers=headers)).status == 200, headers


async def test_where_there_are_tokens_they_tell():
    """A page of another site has none; and the server may be called by any name."""
    async with running(tokens=Tokens({"admin-token": "admin"})) as caller:
        for headers in FOREIGN:
            assert (await caller.send("GET", "/v2", headers=headers)).status == 401
            full = {**headers, "authorization": "Bearer admin-token"}
            assert (await caller.send("GET", "/v2", headers=full)).status == 200


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", None])
async def test_the_compatible_part_takes_json_and_what_says_nothing(kind):
    async with running() as caller:
        for path, body in (("initialize", b'{"num_pages": 4}'), ("clear", b"{}")):
            reply = await caller.send("POST", f"/0/{path}", body, content_type=kind)
            assert reply.status == 204


def test_names_that_are_configured_are_known_and_their_pages_may_ask():
    settings = ServerSettings(allowed_hosts="meta.example.com, panel.example.com", host="10.1.2.3")
    security = Security.of(settings, MetadataService())
    for host, origin in (
        (b"meta.example.com:18000", b"https://panel.example.com"),
        (b"META.example.com", b"https://panel.example.com:8443"),
    ):
        security.origin_policy.check({b"host": host, b"origin": origin})
    with pytest.raises(Exception, match="HICACHE_METADATA_ALLOWED_HOSTS"):
        security.origin_policy.check({b"host": b"other.example.com"})
