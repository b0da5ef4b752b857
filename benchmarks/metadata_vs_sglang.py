"""Our metadata server, durable, against SGLang's own, which keeps nothing: same machine, same
requests, taking turns.

    python benchmarks/metadata_vs_sglang.py --sglang-python ENVIRONMENT/bin/python

ENVIRONMENT has SGLang 0.5.23 (scripts/make_sglang_env.sh); this project with its extra `server`
runs the script. Writes results.md and results.json. Both servers are asked by the same bare client:
what it takes is in both figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import machine, table, turns, wait_for_quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection as Connected
    from multiprocessing.synchronize import Event

BATCH = 128
PEER, OURS = "SGLang 0.5.23", "hicache"
PEER_COMMAND = [
    "-m",
    "sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server",
    "--host",
    "127.0.0.1",
    "--port",
]
OUR_COMMAND = [
    "-c",
    "from hicache_storage.cli.main import main; main()",
    "metadata",
    "serve",
    "--log-level",
    "warning",
    "--port",
]
TUNABLES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
"""Our server is started as deploy/ starts it."""
PAGES = 10_000_000
START_SECONDS = 300.0
GOALS = {
    "exists, 128 keys": 2.0,
    "get_page_indices, 128 keys": 2.0,
    "reserve + confirm, 128 keys": 1.0,
}


class Connection:
    """HTTP as bare as it can be."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, message: object) -> bytes:
        return self.send(path, msgspec.json.encode(message))

    def send(self, path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._receive()
        head_bytes, _, rest = answer.partition(b"\r\n\r\n")
        length = next(
            (
                int(line[15:])
                for line in head_bytes.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ),
            0,
        )
        while len(rest) < length:
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
    """One that runs."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    scope: int = 0
    next_batch: int = 0
    seconds_to_start: float = 0.0
    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )


@contextmanager
def started(
    name: str, command: list[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
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


def keys_of(batch: int, count: int = BATCH) -> list[str]:
    return [hashlib.sha256(b"%d/%d" % (batch, i)).hexdigest() for i in range(count)]


def write(connection: Connection, keys: list[str], rank: int = 0) -> None:
    answer = connection.post(
        f"/{rank}/reserve_and_allocate_page_indices", {"keys": [(key, "") for key in keys]}
    )
    pairs = [
        (key, slot)
        for key, (_, slot) in zip(keys, msgspec.json.decode(answer)["indices"], strict=True)
        if slot >= 0
    ]
    if len(pairs) != len(keys):
        raise AssertionError(f"{len(keys) - len(pairs)} of {len(keys)} keys get no page")
    connection.post(
        f"/{rank}/confirm_write", {"written_keys_to_confirm": pairs, "pages_to_release": []}
    )


def rate(
    server: Server,
    operation: str,
    clients: int,
    seconds: float,
    act: Callable[[Connection, int], None],
) -> None:
    """Calls a second, and the server's own CPU seconds a call, with so many clients at once."""
    calls, errors = [0] * clients, list[BaseException]()
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        connection = Connection(server.port)
        try:
            while time.monotonic() < until:
                act(connection, number)
                calls[number] += 1
        except AssertionError as error:
            errors.append(error)
        finally:
            connection.close()

    before, begin = server.cpu_seconds(), time.monotonic()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    took = time.monotonic() - begin
    server.rates.setdefault(operation, []).append(sum(calls) / took)
    server.cpu.setdefault(operation, []).append((server.cpu_seconds() - before) / sum(calls))


def measure(
    servers: list[Server], rounds: int, clients: int, seconds: float, patience: float
) -> None:
    known = keys_of(-1)
    body = msgspec.json.encode({"keys": known})
    lock = threading.Lock()
    for server in servers:
        connection = Connection(server.port)
        connection.post("/0/initialize", {"num_pages": PAGES})
        write(connection, known)
        connection.close()
    for server in turns(servers, rounds):
        wait_for_quiet(patience)
        rate(
            server,
            "exists, 128 keys",
            clients,
            seconds,
            lambda connection, _: connection.send("/0/exists", body) and None,
        )
        rate(
            server,
            "get_page_indices, 128 keys",
            clients,
            seconds,
            lambda connection, _: connection.send("/0/get_page_indices", body) and None,
        )

        def write_next(connection: Connection, _: int, server: Server = server) -> None:
            with lock:
                server.next_batch += 1
                batch = server.next_batch
            write(connection, keys_of(batch))

        rate(server, "reserve + confirm, 128 keys", clients, seconds, write_next)


@dataclass
class Blocked:
    """Time that other requests waited while pages were freed."""

    way: str
    seconds: float
    longest_read: float
    longest_write: float
    quiet_read: float
    quiet_write: float


def asking(port: int, rank: int, name: str, ready: Event, stop: Event, found: Connected) -> None:
    """One client that looks up or writes a key again and again, in a process of its own; sends when
    each call began and ended."""
    own, number, calls = Connection(port), 0, list[tuple[float, float]]()
    ready.set()
    while not stop.is_set():
        begin = time.monotonic()
        if name == "read":
            own.post(f"/{rank}/exists", {"keys": ["a"]})
        else:
            write(own, [f"w{number}"], rank)
        calls.append((begin, time.monotonic()))
        number += 1
        time.sleep(0.001)
    own.close()
    found.send(calls)


def blocked(
    server: Server, way: str, rank: int, pages: int, free: Callable[[Connection, list[str]], None]
) -> Blocked:
    """Free many pages while one client looks up and another writes."""
    connection = Connection(server.port)
    connection.post(f"/{rank}/initialize", {"num_pages": 4 * pages})
    connection.post(f"/{rank + 1}/initialize", {"num_pages": 4 * pages})
    keys = keys_of(-rank, pages)
    for start in range(0, pages, 1000):
        write(connection, keys[start : start + 1000], rank)
    # In one process with the client that frees they would wait for its interpreter lock.
    processes, stop = get_context("spawn"), get_context("spawn").Event()
    clients = []
    for name in ("read", "write"):
        ready, (found, sent) = processes.Event(), processes.Pipe(duplex=False)
        process = processes.Process(
            target=asking, args=(server.port, rank + 1, name, ready, stop, sent)
        )
        process.start()
        ready.wait(START_SECONDS)
        clients.append((name, process, found))
    time.sleep(1.0)
    begin = time.monotonic()
    free(connection, keys)
    took = time.monotonic() - begin
    # What the answer left to be done still counts.
    time.sleep(0.3)
    end = time.monotonic()
    stop.set()
    longest: dict[tuple[str, bool], float] = {}
    for name, process, found in clients:
        for started_at, ended_at in found.recv():
            during = started_at < end and ended_at > begin
            longest[name, during] = max(longest.get((name, during), 0.0), ended_at - started_at)
        process.join()
    connection.close()
    return Blocked(
        way,
        took,
        longest["read", True],
        longest["write", True],
        longest["read", False],
        longest["write", False],
    )


def free_by_clear(rank: int) -> Callable[[Connection, list[str]], None]:
    return lambda connection, keys: connection.post(f"/{rank}/clear", {}) and None


def free_by_delete(rank: int, size: int) -> Callable[[Connection, list[str]], None]:
    def free(connection: Connection, keys: list[str]) -> None:
        for start in range(0, len(keys), size):
            connection.post(f"/{rank}/delete_keys", {"keys": keys[start : start + size]})

    return free


def million(command: list[str], log: Path, pages: int) -> dict[str, float]:
    """Memory a live key, and how long a start takes with so many."""
    with started(OURS, command, log) as server:
        connection = Connection(server.port)
        connection.post("/0/initialize", {"num_pages": 2 * pages})
        before = server.resident_bytes()
        for batch in range(pages // 1000):
            write(connection, keys_of(batch, 1000))
        time.sleep(1.0)
        grown = (server.resident_bytes() - before) / pages
        connection.close()
        server.process.kill()
        server.process.wait()
    with started(OURS, command, log) as server:
        cpu = server.cpu_seconds()
        connection, some = Connection(server.port), keys_of(7, 1000)
        if not all(msgspec.json.decode(connection.post("/0/exists", {"keys": some}))["exists"]):
            raise AssertionError("a restarted server has lost pages")
        connection.close()
        return {
            "bytes a key": grown,
            "seconds to start after kill -9": server.seconds_to_start,
            "of these, CPU seconds of the server": cpu,
            "bytes a key after the start": (server.resident_bytes() - before) / pages,
            "MB of an empty server": before / 1e6,
        }


def spread(values: list[float], unit: float = 1.0) -> str:
    return f"{statistics.median(values) * unit:,.0f} ({min(values) * unit:,.0f} - {max(values) * unit:,.0f})"


def report(servers: list[Server], holds: list[Blocked], large: dict[str, float]) -> str:
    peer, ours = servers
    rows = []
    for operation, goal in GOALS.items():
        theirs, mine = peer.rates[operation], ours.rates[operation]
        cpu = [statistics.median(server.cpu[operation]) * 1e6 for server in servers]
        rows.append(
            [
                operation,
                spread(theirs),
                spread(mine),
                f"{statistics.median(mine) / statistics.median(theirs):.2f}x",
                f"{max(mine) / max(theirs):.2f}x",
                f"{goal:g}x",
                *(f"{value:.0f}" for value in cpu),
            ]
        )
    text = table(
        [
            "calls a second",
            PEER,
            OURS,
            "ratio",
            "of the fastest",
            "goal",
            "CPU us a call, peer",
            "ours",
        ],
        rows,
    )
    if holds:
        text += "\n" + table(
            [
                "100,000 pages freed by",
                "took, s",
                "longest read, ms",
                "longest write, ms",
                "before: longest read, ms",
                "longest write, ms",
            ],
            [
                [
                    hold.way,
                    f"{hold.seconds:.2f}",
                    *(
                        f"{value * 1e3:.1f}"
                        for value in (
                            hold.longest_read,
                            hold.longest_write,
                            hold.quiet_read,
                            hold.quiet_write,
                        )
                    ),
                ]
                for hold in holds
            ],
        )
    if large:
        text += "\n" + table(
            ["a million live keys", ""], [[name, f"{value:.1f}"] for name, value in large.items()]
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sglang-python", required=True, help="interpreter of an environment with SGLang 0.5.23"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/benchmarks/metadata"),
        help="where results.md and results.json go",
    )
    parser.add_argument(
        "--path",
        type=Path,
        default=Path(),
        help="where to make the store's directory; the disk to measure",
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each operation in a turn")
    parser.add_argument(
        "--clients", type=int, default=1, help="at once, each a thread of this process"
    )
    parser.add_argument("--durability", default="process", help="of our server: process or machine")
    parser.add_argument(
        "--pages",
        type=int,
        default=1_000_000,
        help="live keys for memory and start; 0 leaves that out",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="seconds to wait for a quiet machine before each turn",
    )
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="metadata-vs-sglang-", dir=options.path)).resolve()

    def ours(name: str) -> list[str]:
        return [
            "env",
            TUNABLES,
            sys.executable,
            *OUR_COMMAND,
            "PORT",
            "--store",
            f"sqlite:///{work}/{name}.db",
            "--durability",
            options.durability,
        ]

    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        peer = stack.enter_context(
            started(PEER, [options.sglang_python, *PEER_COMMAND, "PORT"], work / "peer.log")
        )
        mine = stack.enter_context(started(OURS, ours("rates"), work / "ours.log"))
        measure([peer, mine], options.rounds, options.clients, options.seconds, options.patience)
        holds = [
            blocked(mine, "one clear", 100, 100_000, free_by_clear(100)),
            blocked(mine, "deletes of 128", 200, 100_000, free_by_delete(200, 128)),
            blocked(mine, "deletes of 16,384", 300, 100_000, free_by_delete(300, 16_384)),
        ]
        mine.process.terminate()
        peer.process.terminate()
        large = million(ours("large"), work / "large.log", options.pages) if options.pages else {}
    text = report([peer, mine], holds, large)
    facts = {
        **machine(),
        "durability": options.durability,
        "clients": str(options.clients),
        "our server's environment": TUNABLES,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.md").write_text(text)
    raw = {server.name: {"rates": server.rates, "cpu": server.cpu} for server in (peer, mine)}
    (options.out / "results.json").write_text(
        json.dumps({"machine": facts, "servers": raw, "large": large}, indent=1)
    )
    print(json.dumps(facts, indent=1), text, sep="\n")


if __name__ == "__main__":
    main()
