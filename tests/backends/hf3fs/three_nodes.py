"""A Redis cluster of three as one command, for `hicache conformance run --start-server`.

    python -m tests.backends.hf3fs.three_nodes {tmp} {port:r0} {port:r1} {port:r2} {port:b0}
    {port:b1} {port:b2} {port:whole}

The last port accepts connections when the cluster serves. What the nodes have written outlives
them.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from tests.metadata_server.redis_servers import RedisCluster, RedisServer


def main(directory: str, *ports: str) -> None:
    numbers = [int(port) for port in ports]
    nodes = list[RedisServer]()
    for number, (port, bus) in enumerate(zip(numbers[:3], numbers[3:6], strict=True)):
        node = RedisServer(
            Path(directory) / f"redis-{number}",
            appendonly="yes",
            appendfsync="always",
            cluster_enabled="yes",
            cluster_port=bus,
            cluster_node_timeout=2000,
        )
        node.port = port
        nodes.append(node)
    knows = (Path(directory) / "redis-0" / "nodes.conf").exists()
    for node in nodes:
        node.start()
    cluster = RedisCluster(nodes, [])
    cluster.wait() if knows else cluster.join()
    with socket.create_server(("127.0.0.1", numbers[6])):
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
