"""The metadata server on SQLite and on Redis, beside SGLang's own, which keeps nothing, and beside an
earlier commit of ours: same machine, same requests, taking turns.

    python benchmarks/metadata.py --sglang-python ENVIRONMENT/bin/python [--before WORKTREE]

ENVIRONMENT has SGLang 0.5.23 (scripts/make_sglang_env.sh); needs `redis-server` and the extras
`server` and `redis`. Writes results.md and results.json.

Clients are processes with bare connections, and share the cores with the servers: what they take is
in all figures alike. `exists`, `get_page_indices` and `reserve + confirm` are SGLang's requests,
`lookup` and `reserve + commit` ours. Each store keeps what it has acknowledged over kill -9
(durability `process`; Redis with `appendonly yes` and `appendfsync no`). At last a million pages are
stored, the server is killed, and another one starts on the same store.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import HERE, Run, awake_cores, environment, table, turns, wait_for_quiet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from multiprocessing.synchronize import Barrier

BATCH = 128
PEER, SQLITE, REDIS = "SGLang 0.5.23", "SQLite", "Redis"
PEER_COMMAND = [
    "-m",
    "sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server",
    "--host",
    "127.0.0.1",
    "--port",
]
OUR_COMMAND = [
    "-P",  # else the packages of the current directory precede those of a checkout
    "-c",
    "from hicache_storage.cli.main import main; main()",
    "metadata",
    "serve",
    "--port",
]
TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Our server is started as deploy/ starts it."""
RANK, SCOPE = 0, "0:bench"
START_SECONDS = 300.0
THEIRS = ("exists", "get_page_indices", "reserve + confirm")
OURS = ("lookup", "reserve + commit")
KNOWN = 16
"""Batches that are there from the beginning, for those who read."""
SLOTS = 50_000_000
"""More than any store here fills. Slots that nobody has used cost nothing."""


class Connection:
    """An HTTP connection as bare as it can be."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, message: object) -> bytes:
        body = msgspec.json.encode(message)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._receive()
        head_bytes, _, rest = answer.partition(b"\r\n\r\n")
        _, _, length = head_bytes.lower().partition(b"content-length:")
        while len(rest) < int(length.split(b"\r\n")[0] or 0):
            rest += self._receive()
        if head_bytes[9:12] not in (b"200", b"204"):
            raise AssertionError(f"{path} answers {head_bytes[9:12].decode()}: {rest[:200]!r}")
        return rest

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> bytes:
        part = self._socket.recv(1 << 18)
        if not part:
            raise AssertionError("the server has closed the connection")
        return part


@dataclass
class Server:
    """A process that listens."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    seconds_to_start: float = 0.0
    batch: int = 1_000_000

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def started(
    name: str, command: list[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a command, in which PORT stands for a free port, and wait until it listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [part.replace("PORT", str(port)) for part in command],
            stdout=output,
            stderr=output,
            env=env,
        )
    try:
        while True:
            try:
                Connection(port).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > begin + START_SECONDS:
                    raise AssertionError(
                        f"{name} does not start: {log.read_text()[-2000:]}"
                    ) from None
                time.sleep(0.01)
        yield Server(name, port, process, seconds_to_start=time.monotonic() - begin)
    finally:
        process.terminate()
        process.wait(30)


def redis(directory: Path) -> AbstractContextManager[Server]:
    """Start a Redis that writes before it answers."""
    directory.mkdir()
    options = "--bind 127.0.0.1 --appendonly yes --appendfsync no --port PORT"
    command = ["redis-server", *options.split(), "--save", "", "--dir", str(directory)]
    return started("redis-server", command, directory / "log")


def ours(name: str, checkout: Path, url: str, log: Path) -> AbstractContextManager[Server]:
    """Start our server of some checkout."""
    command = [sys.executable, *OUR_COMMAND, "PORT", "--store", url]
    return started(name, command, log, {**environment(checkout), **TUNABLES})


def keys_of(batch: int, count: int = BATCH) -> list[str]:
    return [hashlib.sha256(b"%d/%d" % (batch, number)).hexdigest() for number in range(count)]


class Client:
    """One connection, on which each call is checked."""

    def __init__(self, port: int, batch: int = 0) -> None:
        self._connection = Connection(port)
        self._batch = batch
        self._known = [keys_of(number) for number in range(KNOWN)]

    def call(self, operation: str) -> None:
        self._batch += 1
        known = self._known[self._batch % KNOWN]
        if operation == "exists":
            found = self._post(f"/{RANK}/exists", {"keys": known, "namespace": "bench"})["exists"]
        elif operation == "get_page_indices":
            body = {"keys": known, "namespace": "bench"}
            indices = self._post(f"/{RANK}/get_page_indices", body)["indices"]
            found = [slot is not None and slot >= 0 for slot in indices]
        elif operation == "lookup":
            scopes = [{"scope": SCOPE, "keys": known}]
            slots = self._post("/v2/lookup", {"scopes": scopes})["scopes"][0]["slots"]
            found = [slot >= 0 for slot in slots]
        elif operation == "reserve + confirm":
            found = self.confirm(keys_of(self._batch))
        else:
            found = self.commit(keys_of(self._batch))
        if found != [True] * BATCH:
            raise AssertionError(f"{operation} answers {found.count(False)} times no")

    def confirm(self, keys: list[str]) -> list[bool]:
        """Store pages as SGLang's client does."""
        named = {"namespace": "bench"}
        asked = {"keys": [(key, "") for key in keys]} | named
        indices = self._post(f"/{RANK}/reserve_and_allocate_page_indices", asked)["indices"]
        pairs = [(key, slot) for key, (_, slot) in zip(keys, indices, strict=True) if slot >= 0]
        body = {"written_keys_to_confirm": pairs, "pages_to_release": []} | named
        self._connection.post(f"/{RANK}/confirm_write", body)
        return [slot >= 0 for _, slot in indices]

    def commit(self, keys: list[str]) -> list[bool]:
        """Store pages as the driver `hf3fs` does; each names the one before it."""
        reserve = {"scope": SCOPE, "keys": keys, "prefixes": ["", *keys[:-1]]}
        leases = self._post("/v2/reserve", {"scopes": [reserve]})["scopes"][0]["leases"]
        commit = {
            "scope": SCOPE,
            "leases": leases,
            "lengths": [1 << 16] * len(keys),
            "checksums": [int(key[:15], 16) for key in keys],
        }
        states = self._post("/v2/commit", {"scopes": [commit]})["scopes"][0]["states"]
        return [state == "done" for state in states]

    def declare(self, slots: int) -> None:
        """Make the scope. A server that has just started may not serve it yet."""
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                self._connection.post(
                    f"/{RANK}/initialize", {"num_pages": slots, "namespace": "bench"}
                )
                return
            except AssertionError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        self._connection.close()

    def _post(self, path: str, message: object) -> Any:
        return msgspec.json.decode(self._connection.post(path, message))


def client(port: int, operation: str, batch: int, seconds: float, barrier: Barrier) -> float:
    """Calls a second of one client, in a process of its own."""
    one = Client(port, batch)
    one.call(operation)
    barrier.wait(60)
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        one.call(operation)
        calls += 1
    one.close()
    return calls / passed


def measure(run: Run, server: Server, operation: str, clients: int, seconds: float) -> None:
    context = get_context("fork")
    with context.Manager() as manager, context.Pool(clients) as pool:
        barrier, jobs = manager.Barrier(clients), []
        before = server.cpu_seconds()
        for _ in range(clients):
            server.batch += 100_000
            arguments = (server.port, operation, server.batch, seconds, barrier)
            jobs.append(pool.apply_async(client, arguments))
        rate = sum(job.get(seconds + 120) for job in jobs)
    cost = (server.cpu_seconds() - before) / (rate * seconds)
    run.of(server.name, (0, clients, BATCH, operation)).add(clients / rate, clients * cost)


def million(name: str, checkout: Path, url: str, pages: int, log: Path) -> dict[str, float]:
    """Memory a page, and the start of another server after kill -9, until it has the scope."""
    with ours(name, checkout, url, log) as server:
        one = Client(server.port)
        one.declare(2 * pages)
        before = server.resident_bytes()
        for batch in range(pages // 1000):
            if not all(one.commit(keys_of(batch, 1000))):
                raise AssertionError(f"{name} stores not all pages")
        time.sleep(1.0)
        grown = (server.resident_bytes() - before) / pages
        server.process.kill()
        server.process.wait()
    begin = time.monotonic()
    with ours(name, checkout, url, log) as server:
        Client(server.port).declare(2 * pages)
        seconds, cpu = time.monotonic() - begin, server.cpu_seconds()
        again = Connection(server.port).post(
            f"/{RANK}/exists", {"keys": keys_of(7, 1000), "namespace": "bench"}
        )
        if not all(msgspec.json.decode(again)["exists"]):
            raise AssertionError(f"{name} has lost pages")
        return {
            "bytes a page": grown,
            "bytes a page after the start": (server.resident_bytes() - before) / pages,
            "seconds until the scope is served": seconds,
            "CPU seconds of the start": cpu,
        }


def report(run: Run, clients: int) -> str:
    """Tables of rates, of CPU time, and of the large stores."""
    servers = dict.fromkeys(one.label for one in run.report.measurements)
    rates, costs = list[list[str]](), list[list[str]]()
    for server in servers:
        measured = [run.find(server, (0, clients, BATCH, one)) for one in (*THEIRS, *OURS)]
        calls = [[rate / BATCH for rate in one.rounds] if one else [] for one in measured]
        spread = [
            f"{statistics.median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f})" if each else ""
            for each in calls
        ]
        cpu = [f"{BATCH * statistics.median(one.cpu_us):.0f}" if one else "" for one in measured]
        rates.append([server, *spread])
        costs.append([server, *cpu])
    text = f"Calls a second, {BATCH} keys each: median, slowest and fastest turn.\n\n"
    text += table(["server", *THEIRS, *OURS], rates)
    text += "\nCPU time of the server in microseconds a call.\n\n"
    text += table(["server", *THEIRS, *OURS], costs)
    if run.report.figures:
        rows = [[name, f"{run.figure(name):.1f}"] for name in run.report.figures]
        text += "\nLarge stores; the start is after kill -9.\n\n" + table(["store", ""], rows)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sglang-python", help="interpreter of an environment with SGLang 0.5.23")
    parser.add_argument("--before", type=Path, help="a work tree of an earlier commit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pages", type=int, default=1_000_000, help="0 for no large store")
    parser.add_argument("--path", type=Path, help="directory of the stores, on a disk")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/metadata"))
    options = parser.parse_args()
    checkouts = {"": HERE} | ({", before": options.before} if options.before else {})
    work = Path(tempfile.mkdtemp(prefix="metadata-", dir=options.path)).resolve()
    run = Run()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        stack.enter_context(awake_cores())

        def store(kind: str, suffix: str, use: str) -> str:
            if kind == SQLITE:
                return f"sqlite:///{work}/{use}{len(suffix)}.db"
            one = stack.enter_context(redis(work / f"redis-{use}{len(suffix)}"))
            return f"redis://127.0.0.1:{one.port}/0"

        with ExitStack() as running:
            servers = [
                running.enter_context(
                    ours(kind + suffix, tree, store(kind, suffix, "rates"), work / "log")
                )
                for kind in (SQLITE, REDIS)
                for suffix, tree in checkouts.items()
            ]
            if options.sglang_python:
                command = [options.sglang_python, *PEER_COMMAND, "PORT"]
                servers.append(running.enter_context(started(PEER, command, work / "peer.log")))
            for server in servers:
                one = Client(server.port)
                one.declare(SLOTS)
                for batch in range(KNOWN):
                    one.confirm(keys_of(batch))
            for server in turns(servers, options.rounds):
                for operation in (*THEIRS, *(() if server.name == PEER else OURS)):
                    wait_for_quiet(2.0)
                    measure(run, server, operation, options.clients, options.seconds)
        for kind in (SQLITE, REDIS) if options.pages else ():
            for suffix, tree in checkouts.items():
                url = store(kind, suffix, "large")
                for name, value in million(kind, tree, url, options.pages, work / "log").items():
                    run.note(f"{kind}{suffix}: {name}", value)
    text = report(run, options.clients)
    run.save(options.out, text)
    run.show(text)


if __name__ == "__main__":
    main()
