"""HTTP/1.1 with a real server, and clients that do not read, do not send, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import shlex
import socket
import sys
import weakref
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http import connections
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.http.connections import (
    HEAD_END,
    Connections,
    HttpConnection,
    part_end,
)
from hicache_metadata_server.server import Server
from hicache_metadata_server.settings import ServerSettings
from hicache_metadata_server.storage.store import MemoryStore
from tests.metadata_server.servers import DURABLE, served

KEYS = json.dumps({"keys": ["a", "b"]}).encode()


@pytest.fixture(scope="module")
def server():
    with served(f"{DURABLE} --host ::") as (place, _):
        yield place


@pytest.fixture(scope="module")
def port(server):
    with closing(connected(server.port)) as connection:
        connection.sendall(message("/0/initialize", b'{"num_pages": 100000}'))
        assert answers(connection)[0][0] == 204
    return server.port


@pytest.fixture
def connection(port):
    with closing(connected(port)) as connection:
        yield connection


async def test_a_stopping_server_ends_connections_that_it_has_accepted_late():
    """After the response that they wait for."""
    app = create_app(MetadataService(), MemoryStore())
    stopping = Server(app, ServerSettings(host="127.0.0.1", port=0))
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
    """Status and body of so many answers, one after the other."""
    found, content = [], b""
    while len(found) < count:
        head, end, rest = content.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if end and len(rest) >= (length := int(headers.get(b"content-length", 0))):
            found.append((int(head[9:12]), rest[:length]))
            content = rest[length:]
            continue
        part = connection.recv(1 << 16)
        assert part, f"the connection ended after {found} and {content!r}"
        content += part
    assert not content
    return found


def test_a_request_in_small_pieces(connection):
    for _ in range(2):
        for byte in message("/0/%65xists?x=1"):
            connection.sendall(bytes([byte]))
        assert answers(connection) == [(200, b'{"exists":[false,false]}')]


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
    assert [status for status, _ in found] == [200] * 60
    slots = [json.loads(body)["indices"][0][1] for _, body in found[::3]]
    assert len(set(slots)) == 20
    assert all(json.loads(body) == {"exists": [False]} for _, body in found[1::3])
    assert all(json.loads(body) == {"status": "ok"} for _, body in found[2::3])


# Many clients, and those that do nothing.


OPTIONS = DURABLE.partition(" metadata ")[2]
FEW_DESCRIPTORS = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120)); "
    "from hicache_storage.cli.main import main; main()"
)
PING = message("/healthz", b"", "GET", Content_Length=None, Content_Type=None)


def resident_mib(place):
    status = Path(f"/proc/{place.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) >> 10


def test_pipelined_requests_that_nobody_reads_take_no_memory(server):
    """And hold up nobody else."""
    port = server.port
    with closing(connected(port)) as greedy:
        greedy.sendall(PING)
        answers(greedy)
        before, sent = resident_mib(server), 0
        greedy.settimeout(1)
        # Long requests and responses: few of them fit into the buffers of the sockets.
        request = message("/metrics", b"", "GET", Padding="x" * 10_000)
        requests = memoryview(request * (100_000_000 // len(request)))
        with contextlib.suppress(TimeoutError):
            while sent < len(requests):
                sent += greedy.send(requests[sent : sent + 100 * len(request)])
        assert sent < len(requests)
        assert resident_mib(server) - before < 30
        with closing(connected(port)) as other:
            other.sendall(PING)
            assert answers(other)[0][0] == 200
        # All that was sent whole is answered once the client reads.
        greedy.settimeout(60)
        found, whole, rest = 0, sent // len(request), b""
        while found < whole:
            received = greedy.recv(1 << 20)
            assert received
            *complete, rest = (rest + received).split(b"HTTP/1.1 200")
            found += len(complete)


@given(
    st.lists(
        st.sampled_from([b"\r", b"\n", b"\r\n", HEAD_END, b"GET / HTTP/1.1", b"x"]), max_size=30
    ),
    st.lists(st.integers(0, 100), max_size=5),
)
def test_no_part_holds_the_ends_of_two_heads(pieces, cuts):
    """However the bytes come. Two ends that share bytes are none of two heads."""
    sent = b"".join(pieces)
    places = sorted({min(cut, len(sent)) for cut in cuts} | {0, len(sent)})
    ends, at = [], 0
    while (found := sent.find(HEAD_END, at)) >= 0:
        at = found + len(HEAD_END)
        ends.append(at)
    parts = []
    for begin, end in pairwise(places):
        received, done = sent[begin:end], 0
        while done < len(received):
            last = sent[max(0, begin + done - 3) : begin + done]
            after = part_end(last, received, done)
            parts.append((begin + done, begin + after))
            done = after
    assert [part for part, _ in parts[1:]] == [after for _, after in parts[:-1]]
    assert b"".join(sent[part:after] for part, after in parts) == sent
    for part, after in parts:
        assert sum(part < end <= after for end in ends) <= 1


def test_silent_connections_make_room(tmp_path):
    command = f"{sys.executable} -c {shlex.quote(FEW_DESCRIPTORS)} metadata {OPTIONS}"
    with served(command) as (place, _), ExitStack() as stack:
        port = place.port
        kept = stack.enter_context(closing(connected(port)))
        kept.sendall(PING)
        answers(kept)
        for _ in range(150):
            stack.enter_context(closing(connected(port)))
        with closing(connected(port)) as new:
            new.sendall(PING)
            assert answers(new)[0][0] == 200
        kept.sendall(message("/0/initialize", b'{"num_pages": 10}'))
        assert answers(kept)[0][0] == 204, "the store has its descriptors"


def test_all_addresses_are_those_of_both_families(server):
    for host in ("127.0.0.1", "::1"):
        with closing(socket.create_connection((host, server.port), timeout=60)) as one:
            one.sendall(PING)
            assert answers(one)[0][0] == 200


class Client:
    """A connection as the registry has it."""

    def __init__(self, registry, *, is_active=False, is_served=False):
        self.active_at, self.ended = 0.0, False
        self.is_active, self.is_served = is_active, is_served
        registry.add(self)

    def abort(self):
        self.ended = True


def aborted(*clients):
    return [client.ended for client in clients]


def test_those_that_never_had_an_answer_go_first_then_those_that_are_silent_for_longest():
    registry = Connections(3)
    idle, silent, busy = Client(registry), Client(registry), Client(registry)
    idle.is_active = idle.is_served = busy.is_active = True
    new = Client(registry)
    assert aborted(silent, idle, busy, new) == [True, False, False, False]
    for client in (busy, new):
        client.is_active = client.is_served = True
    registry.end_silent(1.0)
    idle.is_active = True
    registry.end_silent(2.0)
    last = Client(registry)
    assert aborted(busy, idle, new, last) == [True, False, False, False]


def test_one_connection_goes_where_all_are_active():
    registry = Connections(2)
    clients = [Client(registry, is_active=True) for _ in range(2)]
    Client(registry)
    assert aborted(*clients) == [True, False]


def test_connections_that_are_silent_for_long_are_closed():
    registry = Connections(10)
    clients = Client(registry), Client(registry, is_served=True), Client(registry, is_active=True)
    registry.end_silent(1.0)
    registry.end_silent(connections.SILENT_SECONDS + 0.5)
    assert aborted(*clients) == [True, True, False]


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/v2/scopes"])
def test_a_client_that_has_shut_down_its_sending_side_is_answered(server, path):
    with closing(connected(server.port)) as one:
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        one.shutdown(socket.SHUT_WR)
        one.settimeout(30)
        content = b""
        while part := one.recv(1 << 16):
            content += part
    assert content.startswith(b"HTTP/1.1 200")


async def test_a_closed_connection_leaves_nothing_for_the_collector():
    """Connections that were opened and closed filled the memory, up to a collection thousands of
    them later."""

    async def app(scope, receive, send):
        pass

    config, state, gone = uvicorn.Config(app), uvicorn.server.ServerState(), []
    config.load()

    def connection():
        made = HttpConnection(Connections(10), config=config, server_state=state, app_state={})
        gone.append(weakref.ref(made))
        return made

    near, far = socket.socketpair()
    gc.collect()
    gc.disable()
    try:
        with far:
            loop = asyncio.get_running_loop()
            (await loop.create_connection(connection, sock=near))[0].abort()
            async with asyncio.timeout(30):
                while gone[0]() is not None:
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()
