from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.mooncake_cluster import DevCluster
from hicache_backends.mooncake.client.connection import check_master
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError
from tests.backends.file.harness import chain
from tests.backends.mooncake.harness import Rig
from tests.support.commands import run_program
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
        [*COMMAND, "--stores", "2", "--store-size", "16mb"], stdout=subprocess.PIPE, text=True
    ) as command:
        lines = [command.stdout.readline() for _ in range(2)]
        options = dict(re.findall(r"-c (\w+)=(\S*)", lines[1]))
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


def test_a_master_that_hangs_is_told_from_one_that_is_gone():
    with DevCluster(0) as cluster:
        host, port = cluster.address.split(":")
        master = SimpleNamespace(master=(host, int(port)))
        check_master(master)
        cluster.master.suspend()
        with pytest.raises(StorageTimeoutError, match="has not answered"):
            check_master(master)
        cluster.master.resume()
        check_master(master)
    with pytest.raises(StorageUnavailableError, match="cannot be reached"):
        check_master(master)
