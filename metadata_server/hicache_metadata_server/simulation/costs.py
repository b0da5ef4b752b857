"""CPU time of requests and memory of pages: documented figures, or measured on this machine."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from hicache_metadata_server import protocol as p
from hicache_storage.observability import metric_defs as v

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

BATCH: Final = 128
CPU_SECONDS: Final = 0.5
"""CPU time of the server in one measurement."""
CALLS_PER_READING: Final = 100
"""Requests between two readings of the server's CPU time, which cost CPU time themselves."""
FILL_PAGES: Final = 100_000
START_SECONDS: Final = 60.0
SERVE: Final = "from hicache_storage.cli.main import main; main()"


class Line(msgspec.Struct, frozen=True):
    """CPU time of a request in microseconds, linear in its keys."""

    request: float
    key: float

    def microseconds(self, requests: float, keys: float) -> float:
        """CPU time of some requests with some keys in all."""
        return requests * self.request + keys * self.key

    @classmethod
    def through(cls, one: float, batch: float) -> Line:
        """Line through the times of requests of 1 key and of `BATCH` keys."""
        # Noise must give no negative time: such a line would make larger batches cheaper.
        key = max(0.0, (batch - one) / (BATCH - 1))
        return cls(max(0.0, one - key), key)


class Costs(msgspec.Struct, frozen=True):
    """Costs of a server with an SQLite store of durability `process`."""

    lookup: Line
    pair: Line
    """A reserve and its commit."""
    page_bytes: float
    """Memory of a live page with a key of 64 characters."""
    base_bytes: float
    """Memory without any page."""
    measured: str
    """Description of the machine."""

    def cpu(self, requests: dict[str, float], keys: dict[str, float]) -> float:
        """CPU seconds of requests. A delete counts as a reserve and a commit."""
        lookups = self.lookup.microseconds(requests.get("lookup", 0.0), keys.get("lookup", 0.0))
        kinds = ("reserve", "delete")
        pairs = self.pair.microseconds(
            sum(requests.get(k, 0.0) for k in kinds), sum(keys.get(k, 0.0) for k in kinds)
        )
        return (lookups + pairs) / 1e6


DOCUMENTED: Final = Costs(
    Line(160.0, 0.75),
    Line(370.0, 2.8),
    354.0,
    75e6,
    "docs/capacity.md: 2 cores of an Intel Xeon, Python 3.11",
)


class CannotMeasureError(RuntimeError):
    """The server to measure does not start."""


def measure() -> Costs:
    """Measure a server with a store of its own, for about ten seconds.

    Raises:
        CannotMeasureError: the server does not start, or refuses a request.
    """
    with _server() as server:
        server.send(
            "/v2/initialize", p.Initialize(scopes=[p.ScopeGeometry(scope="0:kv", slots=4_000_000)])
        )
        base = server.metric(v.PROCESS_RESIDENT_BYTES.name)
        # Enough pages that the memory of the empty server does not matter.
        pages = 0
        while pages < FILL_PAGES:
            server.store(BATCH)
            pages += BATCH
        page_bytes = (server.metric(v.PROCESS_RESIDENT_BYTES.name) - base) / pages
        lookup = Line.through(
            server.cost(lambda: server.look_up(1)), server.cost(lambda: server.look_up(BATCH))
        )
        pair = Line.through(
            server.cost(lambda: server.store(1)), server.cost(lambda: server.store(BATCH))
        )
    return Costs(lookup, pair, page_bytes, base, f"this machine, {os.cpu_count()} cores, just now")


class _Server:
    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        self._number = 0

    def send(self, path: str, request: p.Request) -> bytes:
        self._connection.request(
            "POST", path, p.encode(request, p.MSGPACK), {"Content-Type": p.MSGPACK}
        )
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise CannotMeasureError(f"{path} is answered {response.status}")
        return body

    def metric(self, name: str) -> float:
        self._connection.request("GET", "/metrics")
        text = self._connection.getresponse().read().decode()
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        return next(sample.value for sample in samples if sample.name == name)

    def store(self, count: int) -> None:
        keys = [f"{self._number + i:064x}" for i in range(count)]
        self._number += count
        asked = p.Reserve(
            scopes=[p.ReserveScope(scope="0:kv", keys=keys, prefixes=["", *keys[:-1]])]
        )
        leases = p.decode(self.send("/v2/reserve", asked), p.Leases, p.MSGPACK).scopes[0].leases
        part = p.CommitScope(
            scope="0:kv",
            leases=leases,
            lengths=[1 << 20] * count,
            checksums=[2**63 + i for i in range(count)],
        )
        self.send("/v2/commit", p.Commit(scopes=[part]))

    def look_up(self, count: int) -> None:
        # A prime step spreads lookups over all pages, or they would be served from CPU caches.
        first = (self._number * 7919) % (FILL_PAGES - count)
        self._number += 1
        self.send(
            "/v2/lookup",
            p.Lookup(
                scopes=[
                    p.LookupScope(scope="0:kv", keys=[f"{first + i:064x}" for i in range(count)])
                ]
            ),
        )

    def cost(self, ask: Callable[[], None]) -> float:
        """Microseconds of the server's CPU time a call.

        Enough calls are made that the resolution of the CPU clock, 10 ms, does not matter.
        """
        before = now = self.metric(v.PROCESS_CPU_SECONDS.name)
        calls = 0
        while now - before < CPU_SECONDS:
            for _ in range(CALLS_PER_READING):
                ask()
            calls += CALLS_PER_READING
            now = self.metric(v.PROCESS_CPU_SECONDS.name)
        return 1e6 * (now - before) / calls

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _server() -> Generator[_Server]:
    with (
        tempfile.TemporaryDirectory(prefix="hicache-measure-") as directory,
        socket.socket() as taken,
    ):
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        # Closed before the server binds it. Another process could take the port meanwhile; the
        # server then does not start, which is reported.
        taken.close()
        command = [
            "metadata",
            "serve",
            "--port",
            str(port),
            "--store",
            f"sqlite:///{directory}/m.db",
            "--log-level",
            "error",
        ]
        process = subprocess.Popen([sys.executable, "-c", SERVE, *command])
        server = _Server(port)
        try:
            _wait(process, port)
            yield server
        finally:
            server.close()
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise CannotMeasureError("the server to measure does not start")
