"""Duration of a call while one of two metadata servers on a Redis is dead or hangs, by the deadline
of the call.

    python benchmarks/metadata_failover.py

A client asks for 8 keys, with both servers well; then the server that it uses is struck, and it
asks again, and once more. Each row is the median of its rounds, and the longest. Needs
redis-server. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import shlex
import signal
import statistics
import sys
import time
from contextlib import ExitStack, closing
from typing import Final

from hicache_conformance.injectors.servers import Servers, stand_still
from hicache_metadata_server import protocol as p
from hicache_metadata_server.cli.admin_client import AdminClient, RemoteError
from hicache_metadata_server.client.http_client import HttpMetadataClient
from hicache_storage.objects import Call
from tests.support.metadata import Served

REDIS: Final = "redis-server --port {port:redis} --bind 127.0.0.1 --dir {tmp} --save '' --appendonly yes --appendfsync always"
SERVE: Final = f'{sys.executable} -c "from hicache_storage.cli.main import main; main()" metadata serve --port {{port}} --store '
SCOPE: Final = "0:kv-failover"
ASKED: Final = [p.LookupScope(scope=SCOPE, keys=[f"key-{number}" for number in range(8)])]
BOTH_WELL, FIRST, SECOND = "both well", "first call", "second call"


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deadlines", default="0.5,1,3,10", help="seconds")
    parser.add_argument("--rounds", type=int, default=5, help="of each")
    options = parser.parse_args()
    # The client tells of each server that it leaves.
    logging.disable(logging.WARNING)
    with ExitStack() as stack:
        redis = stack.enter_context(closing(Servers([shlex.split(REDIS)])))
        redis.start()
        command = f"{SERVE}redis://127.0.0.1:{redis.ports['redis']}/0"
        servers = [stack.enter_context(Served(command=command)) for _ in range(2)]
        print(
            f"| the server is | deadline | {BOTH_WELL} | {FIRST} | {SECOND} "
            f"|\n|---|---|---|---|---|"
        )
        for manner, deadline in itertools.product(
            ("killed", "suspended"), map(float, options.deadlines.split(","))
        ):
            rounds = [one_round(servers, manner, deadline, seed) for seed in range(options.rounds)]
            print(
                f"| {manner} | {deadline:g} s | "
                f"{' | '.join(map(shown, zip(*rounds, strict=True)))} |",
                flush=True,
            )


def one_round(
    servers: list[Served], manner: str, deadline: float, seed: int
) -> tuple[float, float, float]:
    """Seconds of the three calls."""
    with closing(
        HttpMetadataClient([server.url for server in servers], rng=random.Random(seed))
    ) as client:
        client.declare(p.ScopeGeometry(scope=SCOPE, slots=1024, slot_bytes=1 << 16))
        client.refresh(Call(10.0))
        ask(client, 10.0)
        before = ask(client, deadline)
        struck = next(server for server in servers if server.url == client.endpoint)
        strike(struck, manner)
        try:
            return before, ask(client, deadline), ask(client, deadline)
        finally:
            heal(struck, manner)


def ask(client: HttpMetadataClient, deadline: float) -> float:
    """Seconds that a question takes."""
    begin = time.perf_counter()
    client.lookup(ASKED, Call(deadline))
    return time.perf_counter() - begin


def strike(server: Served, manner: str) -> None:
    """Take a server away."""
    if manner == "killed":
        server.kill()
    else:
        group = process_group(server)
        os.killpg(group, signal.SIGSTOP)
        stand_still(group)


def heal(server: Served, manner: str) -> None:
    """Bring it back."""
    if manner == "killed":
        server.start()
    else:
        os.killpg(process_group(server), signal.SIGCONT)
    while True:
        try:
            if AdminClient(server.url).is_ready()[0]:
                return
        except RemoteError:
            time.sleep(0.05)


def process_group(server: Served) -> int:
    """Of a server that runs."""
    return server.process.pid


def shown(seconds: tuple[float, ...]) -> str:
    """The median and the longest, in milliseconds."""
    return f"{1e3 * statistics.median(seconds):.1f} ms ({1e3 * max(seconds):.1f})"


if __name__ == "__main__":
    main()
