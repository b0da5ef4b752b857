"""Requests a second of one, two and four metadata servers on one Redis, beside one server with its
SQLite store, taking turns. Four scopes; each client uses one, at its owner.

    python benchmarks/metadata_servers.py --rounds 7 --seconds 3 --clients 4

Needs `redis-server` and this project with its extra `redis`. Writes results.md and results.json.
Every store keeps what it has answered over kill -9 (durability `process`; Redis with `appendonly
yes` and `appendfsync no`). Clients are processes of their own, and share the cores with servers and
Redis: with few cores, more servers have nothing more to run on. The CPU time of each process for a
call says what they would do with a core each.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from redis import Redis

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import awake_cores, machine, table, turns, wait_for_quiet
from metadata_vs_sglang import BATCH, OUR_COMMAND, Connection, Server, keys_of, started

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Barrier

SCOPES = [f"{rank}:bench" for rank in range(4)]
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
    servers: list[Server]
    redis: RedisProcess | None
    batch: int = 1_000_000
    rates: dict[str, list[float]] = field(default_factory=dict)
    server_seconds: dict[str, list[float]] = field(default_factory=dict)
    """CPU seconds of all servers together for a call."""
    redis_seconds: dict[str, list[float]] = field(default_factory=dict)
    command_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds in which Redis executed commands, by `INFO commandstats`, for a call."""

    def used(self) -> tuple[float, float, float]:
        """CPU seconds of the servers and of Redis, and seconds of Redis' commands."""
        return (
            sum(server.cpu_seconds() for server in self.servers),
            self.redis.cpu_seconds() if self.redis else 0.0,
            self.redis.command_seconds() if self.redis else 0.0,
        )

    def owner(self, scope: str) -> int:
        """Port of the server that serves a scope."""
        body = {"scopes": [{"scope": scope, "keys": []}]}
        for server in self.servers:
            with suppress(AssertionError):
                Connection(server.port).post("/v2/touch", body)
                return server.port
        raise AssertionError(f"{scope} has no owner")


@dataclass
class RedisProcess:
    """A Redis that runs."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def command_seconds(self) -> float:
        with Redis(port=self.port) as client:
            stats = client.info("commandstats")
        # What a script calls is counted in the script's time, too.
        return sum(
            float(stats[name]["usec"]) / 1e6
            for name in ("cmdstat_evalsha", "cmdstat_eval")
            if name in stats
        )


class Client:
    """One process's connection to one server."""

    def __init__(self, port: int, scope: int, number: int, first_batch: int) -> None:
        self._connection = Connection(port)
        self._scope = scope
        self._number = number
        self._batch = first_batch

    def act(self, operation: str) -> None:
        self._number += 1
        known = keys_of(self._number % KNOWN)
        if operation == "exists":
            found = msgspec.json.decode(
                self._connection.post(
                    f"/{self._scope}/exists", {"keys": known, "namespace": "bench"}
                )
            )["exists"]
        elif operation == "lookup":
            answer = self._connection.post(
                "/v2/lookup", {"scopes": [{"scope": SCOPES[self._scope], "keys": known}]}
            )
            found = [slot >= 0 for slot in msgspec.json.decode(answer)["scopes"][0]["slots"]]
        else:
            self._batch += 1
            found = [state == "done" for state in self.write(keys_of(self._batch))]
        if found != [True] * BATCH:
            raise AssertionError(f"{operation} answers {found.count(False)} times no")

    def write(self, keys: list[str]) -> list[str]:
        reserve = {"scopes": [{"scope": SCOPES[self._scope], "keys": keys}]}
        leases = msgspec.json.decode(self._connection.post("/v2/reserve", reserve))["scopes"][0][
            "leases"
        ]
        part = {
            "scope": SCOPES[self._scope],
            "leases": leases,
            "lengths": [1] * len(keys),
            "checksums": [2**63] * len(keys),
        }
        answer = self._connection.post("/v2/commit", {"scopes": [part]})
        states: list[str] = msgspec.json.decode(answer)["scopes"][0]["states"]
        return states


def client(
    operation: str, port: int, scope: int, number: int, batch: int, seconds: float, barrier: Barrier
) -> tuple[int, float]:
    """Calls of one client, and the seconds that they took."""
    one = Client(port, scope, number, batch)
    one.act(operation)
    barrier.wait(60)
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        one.act(operation)
        calls += 1
    return calls, passed


def measure(candidate: Candidate, operation: str, clients: int, seconds: float) -> None:
    context = get_context("fork")
    with context.Manager() as manager, context.Pool(clients) as pool:
        barrier = manager.Barrier(clients)
        jobs = []
        for number in range(clients):
            scope = number % len(SCOPES)
            candidate.batch += 100_000
            arguments = (scope, 7 * number, candidate.batch, seconds, barrier)
            jobs.append(
                pool.apply_async(client, (operation, candidate.owner(SCOPES[scope]), *arguments))
            )
        before = candidate.used()
        done = [job.get(seconds + 120) for job in jobs]
        after = candidate.used()
    calls = sum(count for count, _ in done)
    for kept, value in (
        (candidate.rates, sum(count / passed for count, passed in done)),
        (candidate.server_seconds, (after[0] - before[0]) / calls),
        (candidate.redis_seconds, (after[1] - before[1]) / calls),
        (candidate.command_seconds, (after[2] - before[2]) / calls),
    ):
        kept.setdefault(operation, []).append(value)


@contextmanager
def redis(directory: Path) -> Iterator[RedisProcess]:
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
        yield RedisProcess(port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def begin(
    stack: ExitStack,
    name: str,
    store: RedisProcess | str,
    servers: int,
    slots: int,
    directory: Path,
) -> Candidate:
    url = store if isinstance(store, str) else store.url
    running: list[Server] = []
    for _ in range(servers):
        command = [sys.executable, *OUR_COMMAND, "PORT", "--store", url]
        running.append(stack.enter_context(started(name, command, directory / "log")))
    made = Candidate(name, running, None if isinstance(store, str) else store)
    for scope, named in enumerate(SCOPES):
        # Each server makes the scopes that it is sent for, the one with the fewest first.
        part = {"scopes": [{"scope": named, "slots": slots}]}
        until = time.monotonic() + 60
        while True:
            try:
                Connection(running[scope % servers].port).post("/v2/initialize", part)
                break
            except AssertionError:
                assert time.monotonic() < until, "no server makes a scope"
                time.sleep(0.1)
        writer = Client(made.owner(named), scope, 0, 0)
        for batch in range(KNOWN):
            writer.write(keys_of(batch))
    return made


def candidates_in(
    stack: ExitStack, directory: Path, counts: list[int], slots: int
) -> list[Candidate]:
    found = [begin(stack, "sqlite, 1 server", f"sqlite:///{directory}/m.db", 1, slots, directory)]
    for servers in counts:
        # A Redis of its own for each: what one has written is not in another's way.
        one = stack.enter_context(redis(directory / f"redis-{servers}"))
        found.append(
            begin(
                stack,
                f"redis, {servers} server{'s' if servers > 1 else ''}",
                one,
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
    costs = [
        [
            candidate.name,
            *(
                f"{1e3 * statistics.median(kept[operation]):.3f}"
                for operation in OPERATIONS
                for kept in (
                    candidate.server_seconds,
                    candidate.redis_seconds,
                    candidate.command_seconds,
                )
            ),
        ]
        for candidate in candidates
    ]
    heads = [
        f"{operation}: {who}" for operation in OPERATIONS for who in ("server", "Redis", "scripts")
    ]
    return (
        f"Calls a second; {told}.\n\n"
        + table(["store", *OPERATIONS], rows)
        + "\n\nCPU milliseconds a call, of all servers, of Redis, and of its scripts alone.\n\n"
        + table(["store", *heads], costs)
    )


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
        stack.enter_context(awake_cores())
        candidates = candidates_in(stack, Path(directory), options.servers, slots)
        for operation in OPERATIONS:
            for candidate in turns(candidates, options.rounds):
                wait_for_quiet(2.0)
                measure(candidate, operation, options.clients, options.seconds)
    text = report(candidates, options)
    (options.out / "results.md").write_text(text)
    rates = {
        candidate.name: {
            "rates": candidate.rates,
            "server_seconds": candidate.server_seconds,
            "redis_seconds": candidate.redis_seconds,
            "command_seconds": candidate.command_seconds,
        }
        for candidate in candidates
    }
    (options.out / "results.json").write_text(
        json.dumps({"machine": machine(), "rates": rates}, indent=1)
    )
    print(text)


if __name__ == "__main__":
    main()
