from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.mooncake_cluster import DevCluster
from hicache_backends.mooncake.client.connection import check_master
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError
from tests.backends.mooncake.harness import Rig, chain
from tests.support.commands import run_program, run_python
from tests.support.waiting import eventually

COMMAND = [sys.executable, "-m", "examples.mooncake_cluster"]


def is_alive(pid: str) -> bool:
    """One that the kernel has killed may be a zombie until its new parent looks."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name
)
def test_the_command_stops_what_it_started(number):
    """It prints options that work, and nothing outlives it however it ends."""
    with subprocess.Popen(
        [*COMMAND, "--stores", "2", "--store-size", "16mb", "--json"], stdout=subprocess.PIPE
    ) as command:
        options = json.loads(command.stdout.readline())
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        started = children.read_text().split()
        assert len(started) == 3
        rig = Rig(options)
        assert rig.put(chain("command", 2)) == [True] * 2
        rig.storage.close()
        command.send_signal(number)
        assert command.wait(60) == (0 if number is not signal.SIGKILL else -signal.SIGKILL)
    # The kernel's signal to the children of a killed parent may be on its way.
    eventually(lambda: not any(map(is_alive, started)))


def test_a_port_in_use():
    """No process is started: its stores would join the cluster that listens there."""
    with DevCluster(1, 16 << 20) as cluster:
        port = cluster.address.split(":")[1]
        done = run_program(*COMMAND, "--store-size", "16mb", "--port", port)
        assert done.returncode == 2
        assert done.stderr.startswith(f"port {port} of 127.0.0.1 cannot be used")
        assert len(done.stderr.splitlines()) == 1
        assert cluster.capacity() == 16 << 20
        cluster.master.kill()
        with socket.create_server(("127.0.0.1", int(port))):
            with pytest.raises(StorageUnavailableError, match=f"port {port} .*cannot be used"):
                cluster.master.start()
            assert cluster.master.pid is None
        cluster.master.start()


def test_a_master_that_hangs_is_told_from_one_that_is_gone():
    with DevCluster(0) as cluster:
        host, port = cluster.address.split(":")
        master = SimpleNamespace(master=(host, int(port)), rpc_timeout_seconds=0.3)
        check_master(master)
        cluster.master.suspend()
        with pytest.raises(StorageTimeoutError, match="has not answered"):
            check_master(master)
        cluster.master.resume()
        check_master(master)
    with pytest.raises(StorageUnavailableError, match="cannot be reached"):
        check_master(master)


def test_an_interrupted_process_is_interrupted():
    """The library leaves signal handlers and masks as they are: SIGINT is Python's
    KeyboardInterrupt."""
    script = (
        "import sys, json, signal, os, time\n"
        "from tests.backends.mooncake.harness import Rig\n"
        # What a shell starts behind `&` ignores it from its birth.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)], "
        "signal.pthread_sigmask(0, [])\n"
        "rig = Rig(json.loads(sys.argv[1]))\n"
        "rig.storage.open()\n"
        "assert before == ([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, "
        "signal.SIGHUP)], signal.pthread_sigmask(0, []))\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(30)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    with DevCluster(1, 16 << 20) as cluster:
        done = run_python(script, json.dumps(cluster.options))
    assert done.stdout.strip() == "interrupted", done.stderr
