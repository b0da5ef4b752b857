"""Requests a second of one, two and four metadata servers on one Redis, beside one server with its
SQLite store, taking turns.

    python benchmarks/metadata_servers.py --rounds 7 --seconds 3 --clients 4

Needs `redis-server` and this project with its extra `redis`. Writes results.md and results.json.
Every store keeps what it has answered over kill -9 (durability `process`; Redis with `appendonly
yes` and `appendfsync no`). Clients are processes of their own, and share the cores with servers and
Redis: with few cores, more servers have nothing more to run on.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import machine, table, turns, wait_for_quiet
from metadata_vs_sglang import BATCH, OUR_COMMAND, Connection, Server, keys_of, started

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Barrier

SCOPE = "0:bench"
WRITES_A_SECOND = 4_000
"""Of which a scope never gets full: more than any store here can do. Slots that nobody has used
cost nothing."""
KNOWN = 64
"""Batches that are there from the beginning, for those who read."""
OPERATIONS = ("exists", "lookup", "reserve + commit")


@dataclass
class Candidate:
    """Servers on one store."""

    name: str
    ports: list[int]
    batch: int = 1_000_000
    rates: dict[str, list[float]] = field(default_factory=dict)


class Client:
    """One process's connection to one server."""

    def __init__(self, port: int, number: int, first_batch: int) -> None:
        self._connection = Connection(port)
        self._number = number
        self._batch = first_batch

    def act(self, operation: str) -> None:
        self._number += 1
        known = keys_of(self._number % KNOWN)
        if operation == "exists":
            found = msgspec.json.decode(
                self._connection.post("/0/exists", {"keys": known, "namespace": "bench"})
            )["exists"]
        elif operation == "lookup":
            answer = self._connection.post(
                "/v2/lookup", {"scopes": [{"scope": SCOPE, "keys": known}]}
            )
            found = [slot >= 0 for slot in msgspec.json.decode(answer)["scopes"][0]["slots"]]
        else:
            self._batch += 1
            found = [state == "done" for state in self.write(keys_of(self._batch))]
        if found != [True] * BATCH:
            raise AssertionError(f"{operation} answers {found.count(False)} times no")

    def write(self, keys: list[str]) -> list[str]:
        reserve = {"scopes": [{"scope": SCOPE, "keys": keys}]}
        leases = msgspec.json.decode(self._connection.post("/v2/reserve", reserve))["scopes"][0][
            "leases"
        ]
        part = {
            "scope": SCOPE,
            "leases": leases,
            "lengths": [1] * len(keys),
            "checksums": [2**63] * len(keys),
        }
        answer = self._connection.post("/v2/commit", {"scopes": [part]})
        states: list[str] = msgspec.json.decode(answer)["scopes"][0]["states"]
        return states


def client(
    operation: str, port: int, number: int, batch: int, seconds: float, barrier: Barrier
) -> float:
    """Calls a second of one client."""
    one = Client(port, number, batch)
    one.act(operation)
    barrier.wait(60)
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        one.act(operation)
        calls += 1
    return calls / passed


def measure(candidate: Candidate, operation: str, clients: int, seconds: float) -> None:
    context = get_context("fork")
    with context.Manager() as manager, context.Pool(clients) as pool:
        barrier = manager.Barrier(clients)
        jobs = []
        for number in range(clients):
            port = candidate.ports[number % len(candidate.ports)]
            candidate.batch += 100_000
            jobs.append(
                pool.apply_async(
                    client, (operation, port, 7 * number, candidate.batch, seconds, barrier)
                )
            )
        rates = [job.get(seconds + 120) for job in jobs]
    candidate.rates.setdefault(operation, []).append(sum(rates))


@contextmanager
def redis(directory: Path) -> Iterator[str]:
    """A Redis that writes before it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "yes",
        "--appendfsync",
        "no",
    ]
    directory.mkdir()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            ["redis-server", *options, "--dir", str(directory)], stdout=log, stderr=log
        )
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise AssertionError((directory / "log").read_text()) from None
                time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(30)


def begin(
    stack: ExitStack, name: str, store: str, servers: int, slots: int, directory: Path
) -> Candidate:
    command = [sys.executable, *OUR_COMMAND, "PORT", "--store", store]
    running: list[Server] = [
        stack.enter_context(started(name, command, directory / "log")) for _ in range(servers)
    ]
    connection = Connection(running[0].port)
    connection.post("/v2/initialize", {"scopes": [{"scope": SCOPE, "slots": slots}]})
    connection.close()
    writer = Client(running[0].port, 0, 0)
    for batch in range(KNOWN):
        writer.write(keys_of(batch))
    return Candidate(name, [server.port for server in running])


def candidates_in(
    stack: ExitStack, directory: Path, counts: list[int], slots: int
) -> list[Candidate]:
    found = [begin(stack, "sqlite, 1 server", f"sqlite:///{directory}/m.db", 1, slots, directory)]
    for servers in counts:
        # A Redis of its own for each: what one has written is not in another's way.
        url = stack.enter_context(redis(directory / f"redis-{servers}"))
        found.append(
            begin(
                stack,
                f"redis, {servers} server{'s' if servers > 1 else ''}",
                url,
                servers,
                slots,
                directory,
            )
        )
    return found


def report(candidates: list[Candidate], options: argparse.Namespace) -> str:
    rows = []
    for candidate in candidates:
        cells = [candidate.name]
        for operation in OPERATIONS:
            rates = candidate.rates[operation]
            cells.append(f"{statistics.median(rates):,.0f} ({min(rates):,.0f} - {max(rates):,.0f})")
        rows.append(cells)
    told = f"{os.cpu_count()} cores, {options.clients} client processes, {BATCH} keys a call, medians of {options.rounds} turns of {options.seconds:g} s"
    return f"Calls a second; {told}.\n\n" + table(["store", *OPERATIONS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=Path("out/metadata_servers"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        slots = int(BATCH * WRITES_A_SECOND * options.seconds * options.rounds)
        candidates = candidates_in(stack, Path(directory), options.servers, slots)
        for operation in OPERATIONS:
            for candidate in turns(candidates, options.rounds):
                wait_for_quiet(2.0)
                measure(candidate, operation, options.clients, options.seconds)
    text = report(candidates, options)
    (options.out / "results.md").write_text(text)
    rates = {candidate.name: candidate.rates for candidate in candidates}
    (options.out / "results.json").write_text(
        json.dumps({"machine": machine(), "rates": rates}, indent=1)
    )
    print(text)


if __name__ == "__main__":
    main()
