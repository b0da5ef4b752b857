"""Redis servers, Sentinels and clusters of a test's own: on free ports, in its own directory, ended
with it.

`REDIS_SERVER` in the environment names another binary than `redis-server`, such as one of Valkey.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import redis
from redis.exceptions import RedisError

from hicache_conformance.harness.ports import free_ports
from tests.support.metadata import ServerProcess
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE = 30.0


class RedisServer(ServerProcess):
    """One server process. What it has written outlives `kill`, and the next `start` reads it. A
    setting of redis.conf that is given several times is a list."""

    mode: tuple[str, ...] = ()

    def __init__(self, directory: Path, **config: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.file = directory / "redis.conf"
        super().__init__([binary(), str(self.file), "--port", "{port:server}", *self.mode])
        self.config = {
            "save": "",
            "appendonly": "no",
            "dir": str(directory),
            "bind": "127.0.0.1",
            # Replicas need not wait for others that may come.
            "repl-diskless-sync-delay": 0,
        } | {name.replace("_", "-"): value for name, value in config.items()}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=PATIENCE)

    def start(self) -> None:
        """Start it, and wait until it serves."""
        lines = [
            f"{name} {value}" if value != "" else f'{name} ""'
            for name, values in self.config.items()
            for value in (values if isinstance(values, list) else [values])
        ]
        # A Sentinel writes what it learns into the same file.
        self.file.write_text("\n".join(lines))
        super().start()
        eventually(self._serves, f"{self.file} is not served")

    def follow(self, primary: RedisServer) -> None:
        """Be a replica of another, and wait until it has what that one has."""
        with self.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", primary.port)
            eventually(lambda: self.follows(client, primary), "the replica does not follow")

    def follows(self, client: redis.Redis, primary: RedisServer) -> bool:
        """Both say so."""
        if client.info("replication").get("master_link_status") != "up":
            return False
        with primary.client() as other:
            told = other.info("replication").values()
        online = {"port": self.port, "state": "online"}.items()
        return any(isinstance(one, dict) and online <= one.items() for one in told)

    def cut_off(self, primary: RedisServer) -> None:
        """Be no replica any more, with all that its primary has by now."""
        with self.client() as client, primary.client() as other:
            goal = other.info("replication")["master_repl_offset"]
            eventually(lambda: client.info("replication")["slave_repl_offset"] >= goal)
            client.execute_command("REPLICAOF", "NO", "ONE")

    def _serves(self) -> bool:
        with self.client() as client, suppress(RedisError):
            return bool(client.ping())
        return False


class Sentinel(RedisServer):
    """A process that watches one primary, under the name `cache`."""

    mode = ("--sentinel",)

    def sees(self, replicas: int) -> bool:
        with self.client() as client:
            state = client.sentinel_master("cache")
        return bool((state["num-slaves"], state["num-other-sentinels"]) == (replicas, 2))


class RedisCluster:
    """Masters that share all hash slots, and replicas."""

    def __init__(self, servers: list[RedisServer], replicas: int) -> None:
        self.servers = servers
        self.nodes = servers[: len(servers) - replicas]
        """The masters."""

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(map(self._host, self.nodes))}"

    def join(self) -> None:
        """Make one cluster of all, and wait until all know of all."""
        share = len(self.servers) // len(self.nodes) - 1
        made = [*map(self._host, self.servers), "--cluster-replicas", str(share), "--cluster-yes"]
        cli = binary().replace("-server", "-cli")
        subprocess.run([cli, "--cluster", "create", *made], check=True, capture_output=True)
        self.wait()

    def wait(self) -> None:
        """Wait until every node says that the cluster is whole."""
        eventually(
            lambda: all(map(self._is_whole, self.servers)), "the cluster does not become whole"
        )

    def _host(self, server: RedisServer) -> str:
        return f"127.0.0.1:{server.port}"

    def _is_whole(self, node: RedisServer) -> bool:
        with node.client() as client:
            fields = client.cluster("INFO")
        known = int(fields["cluster_known_nodes"]) == len(self.servers)
        return fields["cluster_state"] == "ok" and known


@contextmanager
def redis_server(directory: Path, name: str = "redis", **config: Any) -> Iterator[RedisServer]:
    """A running server, with settings of redis.conf by their names (`appendonly="yes"`)."""
    with RedisServer(directory / name, **config) as server:
        yield server


@contextmanager
def redis_cluster(
    directory: Path, nodes: int = 3, replicas: int = 0, **config: Any
) -> Iterator[RedisCluster]:
    """A running cluster of its own."""
    with ExitStack() as stack:
        servers = []
        for number, port in enumerate(free_ports(nodes + replicas)):
            more = {"cluster_enabled": "yes", "cluster_port": port, "cluster_node_timeout": 2000}
            server = redis_server(directory, f"redis-{number}", **(more | config))
            servers.append(stack.enter_context(server))
        cluster = RedisCluster(servers, replicas)
        cluster.join()
        yield cluster


@contextmanager
def redis_replicas(
    directory: Path, replicas: int = 1, **config: Any
) -> Iterator[list[RedisServer]]:
    """A primary and its replicas."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(redis_server(directory, f"redis-{number}", **config))
            for number in range(1 + replicas)
        ]
        for server in servers[1:]:
            server.follow(servers[0])
        yield servers


@contextmanager
def sentinels(
    directory: Path,
    primary: RedisServer,
    *,
    replicas: int,
    down_milliseconds: int = 400,
) -> Iterator[str]:
    """Three Sentinels that know of all replicas and of each other; the address of what they watch."""
    options = [
        f"monitor cache 127.0.0.1 {primary.port} 2",
        f"down-after-milliseconds cache {down_milliseconds}",
        "failover-timeout cache 4000",
    ]
    with ExitStack() as stack:
        started = [Sentinel(directory / f"sentinel-{i}", sentinel=options) for i in range(3)]
        for one in started:
            stack.enter_context(one)
        eventually(lambda: all(one.sees(replicas) for one in started))
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in started)
        yield f"redis+sentinel://{hosts}/cache/0"


def binary() -> str:
    name = os.environ.get("REDIS_SERVER", "redis-server")
    assert shutil.which(name), f"there is no {name}; scripts/setup.sh installs it"
    return name
