"""A server without tokens takes no orders from pages of other sites, in whatever way a browser can
be made to send them."""

from __future__ import annotations

import json
import socket

import pytest

from hicache_metadata_server.auth.security import OriginPolicy, Security
from hicache_metadata_server.auth.tokens import Tokens
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage.store import MemoryStore
from tests.metadata_server.every_route import ask, every_route, prepared
from tests.metadata_server.http_calls import Caller, running
from tests.metadata_server.test_http import answers, connected, message, port  # noqa: F401 - `port` is a fixture

HOST = "127.0.0.1:18000"
FOREIGN = [
    {"host": HOST, "origin": "https://evil.example"},
    {"host": HOST, "origin": "http://evil.example:18000"},
    {"host": HOST, "origin": "http://127.0.0.1:3000"},
    {"host": HOST, "origin": "http://localhost:18000"},
    {"host": HOST, "origin": "null"},
    {"host": HOST, "origin": ""},
    {"host": HOST, "origin": "https://evil.example", "sec-fetch-site": "same-origin"},
    {"host": HOST, "sec-fetch-site": "cross-site"},
    {"host": HOST, "sec-fetch-site": "same-site"},
    # DNS rebinding: the browser takes this server for the site's.
    {"host": "evil.example:18000"},
    {
        "host": "evil.example:18000",
        "origin": "http://evil.example:18000",
        "sec-fetch-site": "same-origin",
    },
    {"host": "127.0.0.1.evil.example"},
    {"host": "[::1].evil.example"},
]
OWN = [
    {},
    {"host": HOST},
    {"host": "localhost"},
    {"host": "[::1]:18000"},
    {"host": "meta:18000"},
    {"host": "meta.svc.cluster.local:18000"},
    {"host": "10.0.0.7:18000"},
    {"host": socket.gethostname()},
    {"host": HOST, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin"},
    {"host": HOST, "sec-fetch-site": "none"},
]


async def test_every_route_refuses_pages_of_other_sites_and_does_nothing():
    async with running() as caller:
        lease, pin = await prepared(caller, {})
        before = caller.service.list_scopes(), caller.service.draining, caller.service.totals()
        for asked in every_route(lease=lease, pin=pin):
            for headers in FOREIGN:
                reply = await ask(caller, asked, headers)
                assert (reply.status, reply.json["code"]) == (403, "forbidden"), (
                    asked,
                    headers,
                    reply,
                )
                assert reply.json["field"] in ("Host", "Origin", "Sec-Fetch-Site")
        assert (
            caller.service.list_scopes(),
            caller.service.draining,
            caller.service.totals(),
        ) == before


@pytest.mark.parametrize("headers", OWN)
async def test_clients_and_the_servers_own_page_are_served(headers):
    async with running() as caller:
        assert (await caller.post("/0/initialize", {"num_pages": 4}, headers=headers)).status == 204
        assert (await caller.send("GET", "/v2/scopes", headers=headers)).status == 200
        assert (await caller.send("GET", "/metrics", headers=headers)).status == 200


async def test_where_there_are_tokens_they_tell():
    """A page of another site has none; and the server may be called by any name."""

    service = MetadataService()
    security = Security(service, Tokens({"admin-token": "admin"}))
    app = create_app(service, MemoryStore(), security=security)
    async with app.server.running():
        caller = Caller(app)
        for headers in FOREIGN:
            assert (await caller.send("GET", "/v2", headers=headers)).status == 401
            assert (
                await caller.send(
                    "GET", "/v2", headers={**headers, "authorization": "Bearer admin-token"}
                )
            ).status == 200


async def test_health_is_told_to_everybody_and_files_of_the_page_hold_no_data():
    async with running() as caller:
        for path in ("/healthz", "/readyz", "/"):
            assert (await caller.send("GET", path, headers={"host": "evil.example"})).status == 200


@pytest.mark.parametrize("path", ["/0/clear", "/v2/clear"])
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_what_a_form_can_send_is_refused(path, kind):
    """Also where the browser is so old that it does not say where it comes from."""

    async with running() as caller:
        await caller.post("/0/initialize", {"num_pages": 4})
        await caller.store("0:kv", ["a"])
        reply = await caller.send(
            "POST",
            path,
            json.dumps({} if path[1] == "0" else {"scopes": ["0:kv"]}).encode(),
            content_type=kind,
        )
        assert (reply.status, reply.json["code"]) == (415, "media_type")
        assert caller.service.list_scopes().scopes[0].live == 1


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", None])
async def test_the_compatible_part_takes_json_and_what_says_nothing(kind):
    async with running() as caller:
        assert (
            await caller.send("POST", "/0/initialize", b'{"num_pages": 4}', content_type=kind)
        ).status == 204
        assert (await caller.send("POST", "/0/clear", b"{}", content_type=kind)).status == 204


def test_names_that_are_configured_are_known_and_their_pages_may_ask():
    settings = ServerSettings(allowed_hosts="meta.example.com, panel.example.com", host="10.1.2.3")
    security = Security.of(settings, MetadataService())
    security.check_browser(
        {b"host": b"meta.example.com:18000", b"origin": b"https://panel.example.com"}
    )
    security.check_browser(
        {b"host": b"META.example.com", b"origin": b"https://panel.example.com:8443"}
    )
    with pytest.raises(Exception, match="HICACHE_METADATA_ALLOWED_HOSTS"):
        security.check_browser({b"host": b"other.example.com"})


def test_no_more_hosts_are_remembered_than_are_needed():
    policy = OriginPolicy()
    for number in range(2000):
        policy.check({b"host": b"host%d" % number})
    assert len(policy._accepted) <= 1024


@pytest.mark.parametrize("headers", FOREIGN[:1] + FOREIGN[7:11])
def test_the_short_way_of_whole_requests_refuses_too(port, headers):  # noqa: F811 - the fixture
    connection = connected(port)
    fields = {name.title().replace("-", "_"): value for name, value in headers.items()}
    try:
        for body in (b'{"keys": ["a"]}', b"{}"):
            connection.sendall(message("/0/exists", body, **fields))
            assert answers(connection)[0][0] == 403
    finally:
        connection.close()
