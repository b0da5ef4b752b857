"""Clients that do not read, do not send, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shlex
import socket
import sys
import weakref
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server.http import connections
from hicache_metadata_server.http.connections import (
    HEAD_END,
    Connections,
    HttpConnection,
    part_end,
)
from tests.metadata_server.servers import DURABLE, served
from tests.metadata_server.test_http import answers, connected, message

OPTIONS = DURABLE.partition(" metadata ")[2]
FEW_DESCRIPTORS = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120)); "
    "from hicache_storage.cli.main import main; main()"
)
PING = message("/healthz", b"", "GET", Content_Length=None, Content_Type=None)


@pytest.fixture(scope="module")
def server():
    with served() as (place, _):
        yield place


def resident_mib(place):
    status = Path(f"/proc/{place.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) >> 10


def test_pipelined_requests_that_nobody_reads_take_no_memory(server):
    """And hold up nobody else."""
    port = urlsplit(server.url).port
    with closing(connected(port)) as greedy:
        greedy.sendall(PING)
        answers(greedy)
        before, sent = resident_mib(server), 0
        greedy.settimeout(1)
        # Long requests and responses: few of them fit into the buffers of the sockets.
        request = message("/metrics", b"", "GET", Padding="x" * 1000)
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
        port = urlsplit(place.url).port
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


def test_all_addresses_are_those_of_both_families():
    with served(f"{DURABLE} --host ::") as (place, _):
        for host in ("127.0.0.1", "::1"):
            with closing(socket.create_connection((host, place.port), timeout=60)) as one:
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


def ended(*clients):
    return [client.ended for client in clients]


def test_those_that_never_had_an_answer_go_first_then_those_that_are_silent_for_longest():
    registry = Connections(3)
    idle, silent, busy = Client(registry), Client(registry), Client(registry)
    idle.is_active = idle.is_served = busy.is_active = True
    new = Client(registry)
    assert ended(silent, idle, busy, new) == [True, False, False, False]
    for client in (busy, new):
        client.is_active = client.is_served = True
    registry.end_silent(1.0)
    idle.is_active = True
    registry.end_silent(2.0)
    last = Client(registry)
    assert ended(busy, idle, new, last) == [True, False, False, False]


def test_one_connection_goes_where_all_are_active():
    registry = Connections(2)
    clients = [Client(registry, is_active=True) for _ in range(2)]
    Client(registry)
    assert ended(*clients) == [True, False]


def test_connections_that_are_silent_for_long_are_closed():
    registry = Connections(10)
    clients = Client(registry), Client(registry, is_served=True), Client(registry, is_active=True)
    registry.end_silent(1.0)
    registry.end_silent(connections.SILENT_SECONDS + 0.5)
    assert ended(*clients) == [True, True, False]


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/v2/scopes"])
def test_a_client_that_has_shut_down_its_sending_side_is_answered(server, path):
    with closing(connected(urlsplit(server.url).port)) as one:
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
