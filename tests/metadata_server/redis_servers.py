"""Redis servers and clusters of a test's own: on free ports, in its own directory, ended with it.

`REDIS_SERVER` in the environment names another binary than `redis-server`, such as one of Valkey.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import redis
from redis.exceptions import BusyLoadingError, RedisError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE = 30.0
SLOTS = 16_384


class RedisServer:
    """One server process. What it has written outlives `kill` and `stop`, and the next `start` reads it."""

    def __init__(self, directory: Path, **config: object) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.config = {"save": "", "appendonly": "no", "dir": str(directory), "bind": "127.0.0.1"} | {
            name.replace("_", "-"): value for name, value in config.items()
        }
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=PATIENCE)

    def start(self) -> None:
        """Start it, and wait until it serves."""
        binary = os.environ.get("REDIS_SERVER", "redis-server")
        assert shutil.which(binary), f"there is no {binary}; scripts/setup.sh installs it"
        options = [f"--{name} {value}" if value != "" else f'--{name} ""' for name, value in self.config.items()]
        command = [binary, "-", "--port", str(self.port)]
        lines = "\n".join(option.removeprefix("--") for option in options)
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self.process.stdin is not None
        self.process.stdin.write(lines.encode() + b"\n")
        self.process.stdin.close()
        self._wait()

    def kill(self) -> None:
        """Kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def suspend(self) -> None:
        """It answers nothing, and its connections stay open, until `resume`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it in good order, if it runs."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        with self.client() as client:
            while True:
                try:
                    client.ping()
                except (RedisError, BusyLoadingError):
                    assert self.process is not None
                    log = (self.directory / "log").read_text()
                    assert self.process.poll() is None, f"it ended with {self.process.returncode}: {log}"
                    assert time.monotonic() < deadline, f"it does not serve: {log}"
                    time.sleep(0.02)
                else:
                    return


class RedisCluster:
    """Masters without replicas that share all hash slots."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def client(self) -> redis.RedisCluster:
        return redis.RedisCluster(host="127.0.0.1", port=self.nodes[0].port, socket_timeout=PATIENCE)

    def join(self) -> None:
        """Give each node its share of the hash slots, and wait until all know of all."""
        share = -(-SLOTS // len(self.nodes))
        first = self.nodes[0]
        for number, node in enumerate(self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                start = number * share
                client.execute_command("CLUSTER ADDSLOTSRANGE", start, min(start + share, SLOTS) - 1)
                if node is not first:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", first.port, first.config["cluster-port"])
        self.wait()

    def wait(self) -> None:
        """Wait until every node says that the cluster is whole."""
        deadline = time.monotonic() + PATIENCE
        while not all(self._is_whole(node) for node in self.nodes):
            assert time.monotonic() < deadline, "the cluster does not become whole"
            time.sleep(0.05)

    def _is_whole(self, node: RedisServer) -> bool:
        with node.client() as client:
            info = client.execute_command("CLUSTER INFO")
            fields = (
                info if isinstance(info, dict) else dict(line.split(":", 1) for line in str(info).splitlines() if ":" in line)
            )
        return fields["cluster_state"] == "ok" and int(fields["cluster_known_nodes"]) == len(self.nodes)


@contextmanager
def redis_server(directory: Path, **config: object) -> Iterator[RedisServer]:
    """A running server, with settings of redis.conf by their names (`appendonly="yes"`)."""
    server = RedisServer(directory / "redis", **config)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def redis_cluster(directory: Path, nodes: int = 3, **config: object) -> Iterator[RedisCluster]:
    """A running cluster of its own."""
    with ExitStack() as stack:
        servers = []
        for number in range(nodes):
            where = directory / f"redis-{number}"
            more = {"cluster_enabled": "yes", "cluster_port": free_port(), "cluster_node_timeout": 2000}
            server = RedisServer(where, **more, **config)
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        cluster = RedisCluster(servers)
        cluster.join()
        yield cluster


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
