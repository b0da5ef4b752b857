"""HTTP/1.1 with a real server."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from hicache_metadata_server import server
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage.store import MemoryStore
from tests.metadata_server.servers import DURABLE, served

KEYS = json.dumps({"keys": ["a", "b"]}).encode()


@pytest.fixture(scope="module")
def port():
    with served(DURABLE) as (place, _), closing(connected(urlsplit(place.url).port)) as connection:
        connection.sendall(message("/0/initialize", b'{"num_pages": 100000}'))
        assert answers(connection)[0][0] == 204
        yield urlsplit(place.url).port


@pytest.fixture
def connection(port):
    with closing(connected(port)) as connection:
        yield connection


async def test_a_stopping_server_ends_connections_that_it_has_accepted_late():
    """After the response that they wait for."""
    app = create_app(MetadataService(), MemoryStore())
    stopping = server.Server(app, ServerSettings(host="127.0.0.1", port=0))
    running = asyncio.create_task(stopping.serve())
    while not stopping.started:
        await asyncio.sleep(0.01)
    # As it is once uvicorn has ended the connections that it had.
    stopping.connections.is_stopping = True
    port = stopping.servers[0].sockets[0].getsockname()[1]
    async with asyncio.timeout(60):
        for request, answer in ((b"", b""), (message("/healthz", b"", "GET"), b"HTTP/1.1 200")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            assert (await reader.read()).partition(b" OK")[0] == answer
            writer.close()
        stopping.should_exit = True
        await running


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def message(path, body=KEYS, method="POST", version="1.1", **headers):
    fields = {"Host": "x", "Content_Type": "application/json", "Content_Length": len(body)}
    lines = [
        f"{name.replace('_', '-')}: {value}\r\n"
        for name, value in (fields | headers).items()
        if value is not None
    ]
    return f"{method} {path} HTTP/{version}\r\n{''.join(lines)}\r\n".encode() + body


def answers(connection, count=1):
    """Status, headers and body of so many answers, one after the other."""
    found, content = [], b""
    while len(found) < count:
        head, end, rest = content.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if end and len(rest) >= (length := int(headers.get(b"content-length", 0))):
            found.append((int(head[9:12]), headers, rest[:length]))
            content = rest[length:]
            continue
        part = connection.recv(1 << 16)
        assert part, f"the connection ended after {found} and {content!r}"
        content += part
    assert not content
    return found


def ended(connection):
    return connection.recv(1) == b""


@pytest.mark.parametrize("path", ["/0/exists", "/0/%65xists", "/0/exists?x=1"])
def test_a_request_in_small_pieces(connection, path):
    for _ in range(2):
        for byte in message(path):
            connection.sendall(bytes([byte]))
        status, headers, body = answers(connection)[0]
        assert (status, headers[b"content-type"]) == (200, b"application/json")
        assert json.loads(body) == {"exists": [False, False]}


def test_changes_and_questions_at_once_are_answered_in_their_order(connection):
    """Pipelined: whatever way each goes, and whether it waits for the store."""
    pairs = [{"keys": [[f"p{i}", ""]]} for i in range(20)]
    sent = b""
    for pair in pairs:
        sent += message("/0/reserve_and_allocate_page_indices", json.dumps(pair).encode())
        sent += message("/0/exists", json.dumps({"keys": [pair["keys"][0][0]]}).encode())
        sent += message("/healthz", b"", "GET")
    connection.sendall(sent)
    found = answers(connection, 60)
    assert [status for status, _, _ in found] == [200] * 60
    slots = [json.loads(body)["indices"][0][1] for _, _, body in found[::3]]
    assert len(set(slots)) == 20
    assert all(json.loads(body) == {"exists": [False]} for _, _, body in found[1::3])
    assert all(json.loads(body) == {"status": "ok"} for _, _, body in found[2::3])


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
@pytest.mark.parametrize("length", [None, 0])
def test_head_is_answered_like_get_without_a_body(port, path, length):
    """Load balancers ask so; the connection goes on, which a body that nobody expects would
    spoil."""
    headers = {} if length is None else {"Content-Length": "0"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for method in ("HEAD", "GET", "HEAD"):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (200, method == "GET")
            assert int(response.headers["content-length"]) > 0


@pytest.mark.parametrize("said", [{"version": "1.0"}, {"Connection": "close"}])
def test_the_last_request_of_a_connection(connection, said):
    connection.sendall(message("/0/exists", **said))
    status, headers, _ = answers(connection)[0]
    assert (status, headers[b"connection"]) == (200, b"close")
    assert ended(connection)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (message("/0/exists", b"{"), 400, "malformed"),
        (message("/0/exists", method="PUT"), 404, "unknown_route"),
        (message("/v2/lookup", b"x", Content_Type="text/plain"), 415, "media_type"),
        (message("/v2/touch", b'{"scopes": []}', Content_Length="9" * 15), 413, "too_large"),
        (message("/0/exists", b" ", Content_Length=DEFAULTS.body_bytes + 1), 413, "too_large"),
    ],
)
def test_refusals(connection, sent, status, code):
    connection.sendall(sent)
    found, headers, body = answers(connection)[0]
    assert (found, json.loads(body)["code"]) == (status, code)
    if status == 413:
        assert headers[b"connection"] == b"close"
    else:
        connection.sendall(message("/0/exists"))
        assert answers(connection)[0][0] == 200, "the connection goes on"


def test_an_answer_without_a_body_says_nothing_of_one(connection):
    connection.sendall(message("/0/delete_keys") * 2)
    for status, headers, body in answers(connection, 2):
        assert (status, list(headers), body) == (204, [b"x-request-id"], b"")


def test_clients_that_go_away(port):
    """In the middle of a request, and before its answer; others are served."""
    whole = message("/0/exists")
    for size in (10, len(whole) - 5, len(whole)):
        for _ in range(20):
            with closing(connected(port)) as going:
                going.sendall(whole[:size])
    with closing(connected(port)) as staying:
        staying.sendall(whole)
        assert answers(staying)[0][0] == 200
