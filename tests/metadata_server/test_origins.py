"""A server without tokens takes no orders from pages of other sites, in whatever way a browser can
be made to send them."""

from __future__ import annotations

import socket

import pytest

from hicache_metadata_server.auth.access import Tokens
from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.settings import ServerSettings
from tests.metadata_server.every_route import ask, every_route, prepared
from tests.metadata_server.http_calls import running
from tests.metadata_server.test_http import answers, connected, message, port  # noqa: F401 - `port` is a fixture
from tests.metadata_server.test_refusals import state

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


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_what_a_form_can_send_is_refused(kind):
    """Also where the browser is so old that it does not say where it comes from."""
    async with running() as caller:
        await caller.initialize("0:kv")
        await caller.store("0:kv", ["a"])
        for path, body in (("/0/clear", b"{}"), ("/v2/clear", b'{"scopes": ["0:kv"]}')):
            reply = await caller.send("POST", path, body, content_type=kind)
            assert (reply.status, reply.json["code"]) == (415, "media_type")
        assert await caller.live("0:kv", ["a"]) == ["a"]


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
