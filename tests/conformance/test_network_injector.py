"""The network that drivers stand on: each named fault as a plain program sees it.

Nothing is left behind.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from pathlib import Path

import pytest

from hicache_conformance.injectors.tcp_proxy import TcpProxyInjector
from hicache_conformance.model.fault_plan import FaultKind
from tests.conformance.fault_helpers import (
    CONTENT,
    MAX_SECONDS,
    bits_that_differ,
    find_fault,
    killed_after,
)
from tests.support.waiting import eventually


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError):
            while content := self.request.recv(1 << 16):
                self.request.sendall(content)


@pytest.fixture(scope="module")
def proxied():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        injector = TcpProxyInjector({"echo": server.server_address[1]})
        yield injector
        injector.close()
        server.shutdown()


@pytest.fixture
def network(proxied):
    proxied.heal()
    yield proxied
    proxied.heal()


@pytest.fixture
def client(network):
    with connect(network) as connection:
        yield connection


def connect(network):
    return socket.create_connection(("127.0.0.1", network.ports["echo"]), timeout=MAX_SECONDS)


def said(connection, count=1000):
    """What comes back, until there is no more or it is all."""
    found = b""
    while len(found) < count and (part := connection.recv(count - len(found))):
        found += part
    return found


def test_bytes_go_through_and_each_turn_is_counted(network, client):
    before = network.requests()
    for turn in range(5):
        client.sendall(CONTENT)
        assert said(client, len(CONTENT)) == CONTENT
        assert network.requests() == before + turn + 1


@pytest.mark.parametrize("operation", ["request", "reply"])
def test_a_connection_is_cut_in_the_middle(network, client, operation):
    find_fault(network, FaultKind.CUT, operations=(operation,))
    client.sendall(b"x" * 1000)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        found = said(client)
    assert len(found) < 1000
    assert network.injected_count() >= 1


def test_a_request_is_done_and_its_reply_is_lost(network, client):
    find_fault(network, FaultKind.APPLIED, operations=("reply",), count=1)
    client.sendall(b"x" * 1000)
    with contextlib.suppress(ConnectionResetError):
        assert said(client) == b""
    assert network.injected_count() == 1


@pytest.mark.parametrize("operation", ["request", "reply"])
def test_one_bit_of_a_turn_is_wrong(network, client, operation):
    find_fault(network, FaultKind.BIT_FLIP, operations=(operation,), count=1, place=0.7)
    client.sendall(b"x" * 1000)
    found = said(client)
    assert bits_that_differ(found, b"x" * 1000) == 1
    assert found[700] != ord("x")
    client.sendall(b"x" * 1000)
    assert said(client) == b"x" * 1000


def test_a_stall_ends_when_it_is_healed(network, client):
    find_fault(network, FaultKind.HANG, operations=("reply",))
    client.sendall(b"x" * 1000)
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(MAX_SECONDS)
    network.heal()
    assert said(client) == b"x" * 1000


def test_a_half_open_connection_stays_silent_and_new_ones_answer(network, client):
    find_fault(network, FaultKind.HALF_OPEN, operations=("request",), count=1)
    client.sendall(b"x" * 1000)
    eventually(lambda: network.injected_count() == 1)
    client.settimeout(0.1)
    for _ in range(2):
        client.sendall(b"x" * 1000)
        with pytest.raises(TimeoutError):
            client.recv(1)
        network.heal()
    with connect(network) as another:
        another.sendall(b"y")
        assert said(another, 1) == b"y"
    find_fault(network, FaultKind.REFUSE)
    client.settimeout(MAX_SECONDS)
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_a_turn_is_delayed(network, client):
    find_fault(network, FaultKind.DELAY, operations=("request",), seconds=0.05)
    began = time.monotonic()
    client.sendall(b"x")
    assert said(client, 1) == b"x"
    assert time.monotonic() - began >= 0.05


def test_refused_and_taken_in_again_on_the_same_port(network, client):
    client.sendall(b"x")
    assert said(client, 1) == b"x"
    find_fault(network, FaultKind.REFUSE)
    with pytest.raises(ConnectionRefusedError):
        connect(network)
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
    network.heal()
    with connect(network) as again:
        again.sendall(b"x")
        assert said(again, 1) == b"x"


def test_a_network_whose_process_has_ended_says_so_and_closes():
    injector = TcpProxyInjector({"nobody": 1})
    injector._process.kill()
    with pytest.raises(
        RuntimeError, match=r"the injector 'network' does not answer .* ended with -9"
    ):
        injector.requests()
    injector.close()
    injector.close()


def test_the_process_of_a_network_ends_with_the_one_that_started_it():
    pid = killed_after(
        "from hicache_conformance.injectors.tcp_proxy import TcpProxyInjector as Network\n"
        "print(Network({'nobody': 1})._process.pid, flush=True)"
    )
    words = Path(f"/proc/{int(pid)}/cmdline")
    # Gone, or a zombie until its new parent looks.
    eventually(lambda: not words.exists() or not words.read_bytes())
