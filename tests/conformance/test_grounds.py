"""The grounds that drivers stand on: each trouble as a plain program sees it, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hicache_conformance.faults.drawing import MENU
from hicache_conformance.faults.plan import Fault, FaultKind, FaultPlan
from hicache_conformance.grounds import disk as disk_module
from hicache_conformance.grounds import services as services_module
from hicache_conformance.grounds.disk import DiskGround, missing_for_disk
from hicache_conformance.grounds.network import NetworkGround
from hicache_conformance.grounds.network_apart import NetworkApart
from hicache_conformance.grounds.services import Services, ServicesGround
from hicache_conformance.grounds.standing import commands_of
from hicache_conformance.violation import Untestable

CONTENT = bytes(range(256)) * 64
MOST_SECONDS = 30.0

needs_fuse = pytest.mark.skipif(bool(missing_for_disk()), reason=f"needs {missing_for_disk()}")


def eventually(holds):
    until = time.monotonic() + MOST_SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def background(action):
    """A thread that does something, and what came of it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    return thread, results


def bits_that_differ(one, other):
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


# The disk ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mounted():
    ground = DiskGround()
    yield ground
    ground.close()


@pytest.fixture
def disk(mounted, request):
    """The ground, healed, and in `disk.file` a file with CONTENT."""
    mounted.heal()
    mounted.file = mounted.tmp / request.node.name.replace("/", "-")
    mounted.file.write_bytes(CONTENT)
    yield mounted
    mounted.heal()


def struck(ground, kind, **fields):
    ground.strike(FaultPlan(ground.name, (Fault(kind=kind, **fields),)))


def opened(path, flags=os.O_RDONLY):
    """A descriptor for a with statement; what closing says is of no interest."""

    @contextlib.contextmanager
    def manager():
        descriptor = os.open(path, flags, 0o600)
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    return manager()


def _look(file):
    os.stat(file)


def _open(file):
    os.close(os.open(file, os.O_RDONLY))


def _create(file):
    os.close(os.open(f"{file}.new", os.O_CREAT | os.O_WRONLY))


def _read(file):
    with opened(file) as descriptor:
        os.read(descriptor, 100)


def _write(file):
    with opened(file, os.O_WRONLY) as descriptor:
        os.write(descriptor, b"x")


def _sync(file):
    with opened(file, os.O_WRONLY) as descriptor:
        os.fsync(descriptor)


def _name(file):
    os.rename(file, f"{file}.renamed")


USES = {"look": _look, "open": _open, "create": _create, "read": _read, "write": _write, "sync": _sync, "name": _name}
ERRORS = [
    (fault.error, operation)
    for fault in MENU["disk"]
    if fault.kind is FaultKind.ERROR
    for operation in fault.operations or ("look", "open", "create", "read", "write", "sync", "name")
]


@needs_fuse
@pytest.mark.parametrize(("error", "operation"), list(dict.fromkeys(ERRORS)))
def test_an_error_reaches_the_program(disk, error, operation):
    struck(disk, FaultKind.ERROR, error=error, operations=(operation,))
    with pytest.raises(OSError, match=r"\[Errno") as raised:
        USES[operation](disk.file)
    assert raised.value.errno == getattr(errno, error)
    assert disk.struck() >= 1
    disk.heal()
    USES[operation](disk.file)


@needs_fuse
def test_an_error_strikes_where_it_was_told_to(disk):
    struck(disk, FaultKind.ERROR, error="EIO", operations=("write",), first=1, count=2)
    with opened(disk.file, os.O_WRONLY) as descriptor:
        answers = []
        for _ in range(5):
            try:
                answers.append(os.write(descriptor, b"abc"))
            except OSError as problem:
                answers.append(errno.errorcode[problem.errno])
    assert answers == [3, "EIO", "EIO", 3, 3]
    assert disk.struck() == 2


@needs_fuse
def test_a_short_read_leaves_the_rest_out(disk):
    struck(disk, FaultKind.SHORT_READ, operations=("read",))
    with opened(disk.file) as descriptor:
        assert os.read(descriptor, len(CONTENT)) == CONTENT[: len(CONTENT) // 2]
    # Who reads on until there is no more does not get everything either.
    assert len(disk.file.read_bytes()) < len(CONTENT)


@needs_fuse
def test_a_short_write_says_so(disk):
    struck(disk, FaultKind.SHORT_WRITE, operations=("write",))
    with opened(disk.file, os.O_WRONLY) as descriptor:
        assert os.write(descriptor, b"\xff" * 1000) == 500


@needs_fuse
def test_a_torn_write_says_that_all_is_well(disk):
    struck(disk, FaultKind.TORN_WRITE, operations=("write",))
    with opened(disk.file, os.O_WRONLY) as descriptor:
        assert os.write(descriptor, b"\xff" * 1000) == 1000
    assert (disk.backing / disk.file.name).read_bytes() == b"\xff" * 500 + CONTENT[500:]


@needs_fuse
@pytest.mark.parametrize("place", [0.0, 0.4, 0.999])
def test_one_bit_is_read_wrong(disk, place):
    struck(disk, FaultKind.BIT_FLIP, operations=("read",), count=1, place=place)
    assert bits_that_differ(disk.file.read_bytes(), CONTENT) == 1
    assert disk.file.read_bytes() == CONTENT


@needs_fuse
def test_one_bit_is_written_wrong_and_stays_so(disk):
    struck(disk, FaultKind.BIT_FLIP, operations=("write",))
    with opened(disk.file, os.O_WRONLY) as descriptor:
        os.write(descriptor, CONTENT[::-1])
    disk.heal()
    assert bits_that_differ(disk.file.read_bytes(), CONTENT[::-1]) == 1


@needs_fuse
def test_a_read_gets_another_file_s_bytes(disk):
    draft, other = disk.tmp / "draft", disk.tmp / "elsewhere" / "page"
    other.parent.mkdir()
    draft.write_bytes(CONTENT[::-1])
    draft.rename(other)
    struck(disk, FaultKind.WRONG_KEY, operations=("read",))
    assert disk.file.read_bytes() == CONTENT[::-1]
    assert other.read_bytes() == CONTENT


@needs_fuse
def test_a_lost_descriptor_stays_lost_and_the_file_does_not(disk):
    with opened(disk.file) as before:
        # What the kernel remembers of it is of no help.
        assert os.pread(before, len(CONTENT), 0) == CONTENT
        struck(disk, FaultKind.LOST_DESCRIPTOR, operations=("read",), count=1)
        with opened(disk.file) as later:
            for descriptor in (later, before, later):
                with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                    os.read(descriptor, 10)
        disk.heal()
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            os.read(before, 10)
    assert disk.file.read_bytes() == CONTENT


@needs_fuse
def test_a_delay_takes_time(disk):
    struck(disk, FaultKind.DELAY, operations=("look",), seconds=0.05, count=1)
    began = time.monotonic()
    os.stat(disk.file)
    assert time.monotonic() - began >= 0.05


@needs_fuse
def test_a_hang_ends_when_it_is_healed(disk):
    struck(disk, FaultKind.HANG, operations=("open",))
    thread, found = background(disk.file.read_bytes)
    eventually(lambda: disk.struck() == 1)
    thread.join(0.05)
    assert thread.is_alive()
    disk.heal()
    thread.join(MOST_SECONDS)
    assert found == [CONTENT]


@needs_fuse
def test_requests_are_counted(disk):
    before = disk.requests()
    disk.file.read_bytes()
    assert disk.requests() >= before + 2


def is_mounted(path):
    return str(path) in Path("/proc/self/mounts").read_text()


@needs_fuse
def test_a_closed_disk_is_gone_although_a_program_hangs_on_it():
    ground = DiskGround()
    (ground.tmp / "file").write_bytes(b"x")
    struck(ground, FaultKind.HANG)
    hung, _ = background(lambda: os.path.exists(ground.tmp / "file"))
    eventually(lambda: ground.struck() > 0)
    ground.close()
    hung.join(MOST_SECONDS)
    assert not hung.is_alive()
    assert not is_mounted(ground.tmp.parent)
    assert not ground.tmp.parents[1].exists()


@needs_fuse
def test_a_disk_goes_with_a_suite_that_is_killed():
    code = "from hicache_conformance.grounds.disk import DiskGround; g = DiskGround(); print(g.tmp, flush=True); input()"
    suite = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    tmp = Path(suite.stdout.readline().strip())
    assert is_mounted(tmp.parent)
    suite.kill()
    suite.wait()
    eventually(lambda: not is_mounted(tmp.parent) and not tmp.parents[1].exists())
    suite.stdin.close()
    suite.stdout.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda patch: patch.setattr(disk_module.importlib.util, "find_spec", lambda name: None), r"mfusepy \(pip install"),
        (lambda patch: patch.setattr(disk_module.shutil, "which", lambda name: None), r"fusermount3 \(package fuse3\)"),
        (lambda patch: patch.setattr(disk_module.os.path, "exists", lambda path: False), "/dev/fuse"),
    ],
)
def test_without_fuse_the_disk_says_what_is_missing(monkeypatch, spoil, words):
    if missing_for_disk():
        pytest.skip(f"lacks {missing_for_disk()} anyway")
    spoil(monkeypatch)
    with pytest.raises(Untestable, match=f"the ground 'disk' needs .*{words}"):
        DiskGround()


# The network ---------------------------------------------------------------------------------------------------------


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError):
            while content := self.request.recv(1 << 16):
                self.request.sendall(content)


@pytest.fixture(scope="module", params=[NetworkGround, NetworkApart], ids=["in this process", "apart"])
def proxied(request):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ground = request.param({"echo": server.server_address[1]})
        yield ground
        ground.close()
        server.shutdown()


@pytest.fixture
def network(proxied):
    proxied.heal()
    yield proxied
    proxied.heal()


@pytest.fixture
def client(network):
    with socket.create_connection(("127.0.0.1", network.ports["echo"]), timeout=MOST_SECONDS) as connection:
        yield connection


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
    struck(network, FaultKind.CUT, operations=(operation,))
    client.sendall(b"x" * 1000)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        found = said(client)
    assert len(found) < 1000
    assert network.struck() >= 1


@pytest.mark.parametrize("operation", ["request", "reply"])
def test_one_bit_of_a_turn_is_wrong(network, client, operation):
    struck(network, FaultKind.BIT_FLIP, operations=(operation,), count=1, place=0.7)
    client.sendall(b"x" * 1000)
    found = said(client)
    assert bits_that_differ(found, b"x" * 1000) == 1
    assert found[700] != ord("x")
    client.sendall(b"x" * 1000)
    assert said(client) == b"x" * 1000


def test_a_stall_ends_when_it_is_healed(network, client):
    struck(network, FaultKind.HANG, operations=("reply",))
    client.sendall(b"x" * 1000)
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(MOST_SECONDS)
    network.heal()
    assert said(client) == b"x" * 1000


def test_a_turn_is_delayed(network, client):
    struck(network, FaultKind.DELAY, operations=("request",), seconds=0.05)
    began = time.monotonic()
    client.sendall(b"x")
    assert said(client, 1) == b"x"
    assert time.monotonic() - began >= 0.05


def test_refused_and_taken_in_again_on_the_same_port(network, client):
    client.sendall(b"x")
    assert said(client, 1) == b"x"
    struck(network, FaultKind.REFUSE)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", network.ports["echo"]), timeout=MOST_SECONDS)
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
    network.heal()
    with socket.create_connection(("127.0.0.1", network.ports["echo"]), timeout=MOST_SECONDS) as again:
        again.sendall(b"x")
        assert said(again, 1) == b"x"


def test_a_network_whose_process_has_ended_says_so_and_closes():
    ground = NetworkApart({"nobody": 1})
    ground._process.kill()
    with pytest.raises(RuntimeError, match="the ground 'network' ended with -9"):
        ground.requests()
    ground.close()
    ground.close()


def test_the_process_of_a_network_ends_with_the_one_that_started_it():
    source = (
        "from hicache_conformance.grounds.network_apart import NetworkApart\n"
        "import os, signal\n"
        "print(NetworkApart({'nobody': 1})._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    # Gone, or a zombie until its new parent looks.
    eventually(
        lambda: (
            not Path(f"/proc/{int(done.stdout)}/cmdline").exists() or not Path(f"/proc/{int(done.stdout)}/cmdline").read_bytes()
        )
    )


# The servers ---------------------------------------------------------------------------------------------------------

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
    """A server that answers each line with all that it was ever told."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return [sys.executable, "-S", str(script), "{port:memory}", "{tmp}/memory"]


@pytest.fixture
def services(command):
    found = Services([command])
    found.start()
    yield found
    found.close()


def told(services, line):
    with socket.create_connection(("127.0.0.1", services.ports["memory"]), timeout=MOST_SECONDS) as connection:
        connection.sendall(line + b"\n")
        return connection.makefile("rb").readline().strip()


def accepts(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=MOST_SECONDS).close()
    except OSError:
        return False
    return True


def test_a_killed_server_is_back_on_its_port_and_has_its_files(services):
    ground = ServicesGround(services)
    assert told(services, b"a") == b"a"
    struck(ground, FaultKind.KILL)
    assert not accepts(services.ports["memory"])
    ground.heal()
    assert told(services, b"b") == b"ab"
    assert ground.struck() == 1
    ground.close()


def test_a_server_that_was_set_back_does_not_know_what_it_has_acknowledged(services):
    ground = ServicesGround(services)
    told(services, b"a")
    struck(ground, FaultKind.STALE)
    assert told(services, b"b") == b"ab"
    ground.heal()
    assert told(services, b"c") == b"ac"
    ground.close()


def test_a_suspended_server_answers_when_it_goes_on(services):
    ground = ServicesGround(services)
    struck(ground, FaultKind.HANG)
    thread, answers = background(lambda: told(services, b"a"))
    thread.join(0.1)
    assert thread.is_alive()
    ground.heal()
    thread.join(MOST_SECONDS)
    assert answers == [b"a"]
    ground.close()


def test_a_suspended_server_has_stopped_in_all_its_threads(tmp_path):
    busy = "import socket, sys, threading; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    busy += "def turn():\n    while True: pass\n"
    busy += "for _ in range(8): threading.Thread(target=turn).start()\n"
    services = Services([(sys.executable, "-S", "-c", busy, "{port:a}")], tmp_path)
    try:
        services.start()
        [server] = services._processes.values()
        for _ in range(20):
            services.suspend()
            stats = [stat.read_text() for stat in Path(f"/proc/{server.pid}/task").glob("*/stat")]
            assert {text.rpartition(")")[2].split()[0] for text in stats} == {"T"}
            services.resume()
    finally:
        services.close()


def test_a_stopped_server_s_files_can_be_damaged(services):
    ground = ServicesGround(services)
    told(services, b"a")
    with ground.stopped() as directory:
        assert not accepts(services.ports["memory"])
        (directory / "memory").write_bytes(b"rot")
    assert told(services, b"b") == b"rotb"
    ground.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((sys.executable, "-S", "-c", "import sys; sys.exit('no licence')", "{port:a}"), "ended with 1; it said: no licence"),
        (("no-such-server-anywhere", "{port:a}"), "it said: .*no-such-server-anywhere.*not found"),
    ],
)
def test_a_server_that_does_not_start_is_quoted(words, told):
    services = Services([words])
    with pytest.raises(Untestable, match=told):
        services.start()
    services.close()


def test_servers_are_gone_when_closed_even_if_they_will_not_go(tmp_path, monkeypatch):
    monkeypatch.setattr(services_module, "STOP_SECONDS", 0.2)
    script = tmp_path / "stubborn.py"
    script.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER)
    services = Services([[sys.executable, "-S", str(script), "{port:memory}", "{tmp}/memory"]])
    services.start()
    services.kill()
    services.start()
    told(services, b"a")
    services.close()
    assert not accepts(services.ports["memory"])
    assert not services.tmp.exists()


def test_servers_go_with_a_suite_that_is_killed(command):
    code = (
        "import sys; from hicache_conformance.grounds.services import Services; s = Services([sys.argv[1:]]); s.start(); "
        "print(s.ports['memory'], flush=True); input()"
    )
    suite = subprocess.Popen([sys.executable, "-c", code, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = int(suite.stdout.readline())
    assert accepts(port)
    suite.send_signal(signal.SIGKILL)
    suite.wait()
    eventually(lambda: not accepts(port))
    suite.stdin.close()
    suite.stdout.close()


def test_servers_that_the_options_do_not_name_are_not_started():
    assert len(commands_of("hf3fs", {}, None)) == 1
    assert len(commands_of("hf3fs", {"file_size": "32MiB"}, None)) == 1
    assert commands_of("hf3fs", {"metadata_url": ""}, None) == ()
    assert commands_of("hf3fs", {"metadata_url": "http://127.0.0.1:18000"}, None) == ()
    assert commands_of("hf3fs", {"metadata_url": "http://127.0.0.1:18000"}, ["serve --port {port:mine}"]) == (
        ("serve", "--port", "{port:mine}"),
    )
