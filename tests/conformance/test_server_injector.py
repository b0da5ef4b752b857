"""The servers that drivers stand on: killed, set back, suspended, and nothing left behind."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from hicache_conformance.fixtures.context import DriverSetup
from hicache_conformance.harness.ports import accepts
from hicache_conformance.injectors import servers as servers_module
from hicache_conformance.injectors.servers import MemberInjector, ServerInjector, Servers
from hicache_conformance.model.case import Inconclusive
from hicache_conformance.model.fault_plan import FaultKind
from tests.conformance.fault_helpers import (
    MAX_SECONDS,
    background,
    find_fault,
    killed_after,
    threads_of,
)
from tests.support.waiting import eventually

SERVER = """
import socketserver, sys
class Remembers(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            with open(sys.argv[2], "ab", buffering=0) as file:
                file.write(line.strip())
            with open(sys.argv[2], "rb") as file:
                self.wfile.write(file.read() + b"\\n")
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
Server(("127.0.0.1", int(sys.argv[1])), Remembers).serve_forever()
"""


@pytest.fixture
def command(tmp_path):
    """The command of a server that answers each line with all that it was ever told.

    By its name, and by what its script does first.
    """

    def make(name="memory", first=""):
        script = tmp_path / f"{name}.py"
        script.write_text(first + SERVER)
        return [sys.executable, "-S", str(script), f"{{port:{name}}}", f"{{tmp}}/{name}"]

    return make


@pytest.fixture
def serve():
    """Start a server by its command; it is closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(command):
            found = Servers([command])
            stack.callback(found.close)
            found.start()
            return found

        yield start


@pytest.fixture
def services(serve, command):
    return serve(command())


@pytest.fixture
def injector(services):
    with contextlib.closing(ServerInjector(services)) as found:
        yield found


def told(services, line):
    return asked(services.ports["memory"], line)


def asked(port, line):
    with socket.create_connection(("127.0.0.1", port), timeout=MAX_SECONDS) as connection:
        connection.sendall(line + b"\n")
        return connection.makefile("rb").readline().strip()


def test_a_killed_server_is_back_on_its_port_and_has_its_files(services, injector):
    assert told(services, b"a") == b"a"
    find_fault(injector, FaultKind.KILL)
    assert not accepts(services.ports["memory"])
    injector.heal()
    assert told(services, b"b") == b"ab"
    assert injector.injected_count() == 1


def test_a_server_that_was_set_back_does_not_know_what_it_has_acknowledged(services, injector):
    told(services, b"a")
    find_fault(injector, FaultKind.STALE)
    assert told(services, b"b") == b"ab"
    injector.heal()
    assert told(services, b"c") == b"ac"


def test_a_suspended_server_answers_when_it_goes_on(services, injector):
    find_fault(injector, FaultKind.HANG)
    thread, answers = background(lambda: told(services, b"a"))
    thread.join(0.1)
    assert thread.is_alive()
    injector.heal()
    thread.join(MAX_SECONDS)
    assert answers == [b"a"]


def test_a_suspended_server_has_stopped_in_all_its_threads(serve):
    busy = (
        "import socket, sys, threading; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    )
    busy += "def turn():\n    while True: pass\n"
    busy += "for _ in range(8): threading.Thread(target=turn).start()\n"
    services = serve((sys.executable, "-S", "-c", busy, "{port:a}"))
    [server] = services._processes.values()
    for _ in range(20):
        services.suspend()
        assert set(threads_of(server.pid)) == {"T"}
        services.resume()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            (sys.executable, "-S", "-c", "import sys; sys.exit('no licence')", "{port:a}"),
            "ended with 1; it said: no licence",
        ),
        (("no-such-server-anywhere", "{port:a}"), "it said: .*no-such-server-anywhere.*not found"),
    ],
)
def test_a_server_that_does_not_start_is_quoted(serve, words, told):
    with pytest.raises(Inconclusive, match=told):
        serve(words)


def test_servers_are_gone_when_closed_even_if_they_will_not_go(serve, command, monkeypatch):
    monkeypatch.setattr(servers_module, "STOP_SECONDS", 0.2)
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    services = serve(command(first=ignores))
    services.kill()
    services.start()
    told(services, b"a")
    services.close()
    assert not accepts(services.ports["memory"])
    assert not services.tmp.exists()


def test_servers_go_with_a_suite_that_is_killed(command):
    source = (
        "import sys; from hicache_conformance.injectors.servers import Servers\n"
        "servers = Servers([sys.argv[1:]]); servers.start()\n"
        "print(servers.ports['memory'], flush=True)"
    )
    port = int(killed_after(source, *command()))
    eventually(lambda: not accepts(port))


# Several stores
# ------------------------------------------------------------------------------------------------

MOONCAKE = ("store", "store2", "store3")
BESIDE = ["serve --port {port:store}", "serve --port {port:store2} --first 127.0.0.1:{port:store}"]


def test_stores_are_gone_when_closed(command):
    with contextlib.closing(MemberInjector([*map(command, "ab")], ("a", "b"))) as members:
        port = members.ports["a"]
        assert accepts(port)
    with pytest.raises(ConnectionRefusedError):
        asked(port, b"1")


AT = "http://127.0.0.1:18000"
OWN = ["serve {port:mine}"]
TWO = {"local_hostname": "{port:store},{port:store2}"}
ELSEWHERE = {"master_server_address": "10.0.0.1:50051"}


@pytest.mark.parametrize(
    ("driver", "options", "services", "commands", "members"),
    [
        # Servers that the options do not name are not started.
        ("hf3fs", {}, None, 1, ()),
        ("hf3fs", {"file_size": "32MiB"}, None, 1, ()),
        ("hf3fs", {"metadata_url": AT}, None, 0, ()),
        ("hf3fs", {"metadata_url": AT}, OWN, 1, ()),
        # Stores that no option names are started for cases about several.
        ("mooncake", {}, None, 2, MOONCAKE),
        # Those that an option names are always started.
        ("mooncake", TWO, BESIDE, 2, MOONCAKE[:2]),
        # Fewer than two are not several.
        ("mooncake", ELSEWHERE, None, 0, ()),
        ("mooncake", {}, BESIDE[:1], 1, ()),
        ("file", {}, None, 0, ()),
    ],
)
def test_servers_and_stores_of_a_driver(driver, options, services, commands, members):
    setup = DriverSetup(driver, options, services)
    assert (len(setup.commands()), setup.members()) == (commands, members)
