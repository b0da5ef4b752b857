"""Every route, and everybody who may not use it: 401 or 403, and nothing done."""

from __future__ import annotations

import msgspec
import pytest

from hicache_metadata_server.auth.access import Tokens
from hicache_metadata_server.auth.files import record_of
from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.protocol import ROUTES, Token
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
