"""The cluster that docs/hf3fs.md has the conformance suite start as a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import redis

from hicache_conformance.harness.ports import accepts, free_ports
from tests.metadata_server.redis_servers import PATIENCE
from tests.support.waiting import eventually


@contextmanager
def three_nodes(directory, ports):
    command = [
        sys.executable,
        "-m",
        "tests.backends.hf3fs.three_nodes",
        str(directory),
        *map(str, ports),
    ]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[3], start_new_session=True)
    try:
        eventually(lambda: accepts(ports[-1]), "the cluster does not come up")
        yield redis.RedisCluster(host="127.0.0.1", port=ports[0], socket_timeout=PATIENCE)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_what_was_written_is_there_when_the_command_is_given_again(tmp_path):
    ports = free_ports(7)
    keys = [f"key-{number}" for number in range(30)]
    with three_nodes(tmp_path, ports) as cluster:
        assert len(cluster.get_primaries()) == 3
        for key in keys:
            cluster.set(key, key)
        cluster.close()
    eventually(lambda: not any(map(accepts, ports[:3])), "nodes are left behind")
    with three_nodes(tmp_path, ports) as cluster:
        assert [cluster.get(key) for key in keys] == [key.encode() for key in keys]
        cluster.close()
