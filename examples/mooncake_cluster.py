"""A Mooncake cluster on loopback: a master and some store processes, to try the driver on.

All processes listen at 127.0.0.1. `close` stops exactly the processes that were started here. The
kernel kills them when the thread that started them ends. The command stops them on Ctrl-C or
SIGTERM. Needs `pip install 'hicache-storage[mooncake]'`.

    python examples/mooncake_cluster.py [--stores 2] [--store-size 256mb] [--port 50051]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Final, Self

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.config import MIN_SEGMENT_BYTES, size_of
from hicache_storage.spec import ConfigError, HiCacheError, StorageUnavailableError

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 5.0
LOOPBACK: Final = "127.0.0.1"
MAX_PORT: Final = 65535
_LAUNCH: Final = (
    "import ctypes, importlib, signal, sys; "
    "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL)); "
    "sys.argv.pop(0); importlib.import_module(sys.argv[0]).main()"
)
"""Runs a module's `main` so that the kernel kills it when its parent dies."""


class Process:
    """One process of a cluster, which can be killed and started again on its port.

    Args:
        module: full name of a module with a `main`.
        arguments: of the command line, without spaces in them.
        port: the process listens there.
        log: file for the output.
    """

    def __init__(self, module: str, arguments: str, port: int, log: Path) -> None:
        self.command = [sys.executable, "-c", _LAUNCH, module, *arguments.split()]
        self.port = port
        self.log = log
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while the process does not run."""
        running = self._running
        return running.pid if running is not None and running.poll() is None else None

    def start(self) -> None:
        """Start the process, and wait until it listens.

        Raises:
            StorageUnavailableError: another process uses the port, or this one has exited or does
                not listen. The message has the end of its output.
        """
        try:
            socket.create_server((LOOPBACK, self.port)).close()
        except OSError as error:
            raise StorageUnavailableError(
                f"port {self.port} of {LOOPBACK} cannot be used ({os.strerror(error.errno or 0)}); "
                f"choose another one, or 0 for a free one"
            ) from error
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + START_SECONDS
        while not listens(self._running.pid, self.port):
            ended = self._running.poll()
            if ended is not None or time.monotonic() > until:
                self.kill()
                said = " ".join(self.log.read_text("utf-8", "replace").split())[-300:]
                raise StorageUnavailableError(
                    f"{self.command[3]} does not listen at port {self.port}, and its status is "
                    f"{ended}; it said: {said or 'nothing'}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._signal(signal.SIGKILL)
        if self._running is not None:
            self._running.wait()

    def stop(self) -> None:
        """Stop the process with SIGTERM, and with SIGKILL after 5 s."""
        self.resume()
        self._signal(signal.SIGTERM)
        if self._running is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.wait(STOP_SECONDS)
        self.kill()

    def suspend(self) -> None:
        """Suspend the process with SIGSTOP. It keeps its connections and does not answer."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            # Wait, because threads may run on for a moment. WNOWAIT leaves an exit for `poll`.
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Resume the suspended process."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._running is not None:
            self._running.send_signal(number)


class DevCluster:
    """A master and store processes.

    Args:
        stores: number of store processes.
        store_bytes: memory of each store, at least 16 MiB.
        port: of the master; a free one if 0.
        client_ttl_seconds: the master drops a store that has been silent for so long.
        lease_milliseconds: time for which a looked up page is not evicted. A longer read is a miss.
        fixed_names: stores keep their names when they are restarted, by an HTTP metadata server in
            the master.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        stores: int = 1,
        store_bytes: int = 256 << 20,
        *,
        port: int = 0,
        client_ttl_seconds: int = 10,
        lease_milliseconds: int = 2000,
        fixed_names: bool = False,
    ) -> None:
        if store_bytes < MIN_SEGMENT_BYTES:
            raise ConfigError(
                f"store_bytes (--store-size) is {store_bytes:,}, and Mooncake takes "
                f"{MIN_SEGMENT_BYTES:,} or more; write '16mb'"
            )
        if not 0 <= port <= MAX_PORT:
            raise ConfigError(
                f"port (--port) is {port}; write 1 to {MAX_PORT}, or 0 for a free one"
            )
        self._directory = tempfile.TemporaryDirectory(prefix="hicache-mooncake-")
        logs = Path(self._directory.name)
        free, self._metrics, metadata, *ports = _free_ports(3 + 2 * stores)
        self._store_bytes = store_bytes
        self._metadata_server, named = "P2PHANDSHAKE", ""
        if fixed_names:
            self._metadata_server = f"http://{LOOPBACK}:{metadata}/metadata"
            named = (
                f"--enable_http_metadata_server=true --http_metadata_server_host={LOOPBACK} "
                f"--http_metadata_server_port={metadata} --enable_metadata_cleanup_on_timeout=true"
            )
        port = port or free
        self.address = f"{LOOPBACK}:{port}"
        self.master = Process(
            "mooncake.cli",
            f"--rpc_address={LOOPBACK} --rpc_port={port} --metrics_host={LOOPBACK} "
            f"--metrics_port={self._metrics} --default_kv_lease_ttl={lease_milliseconds} "
            f"--client_ttl={client_ttl_seconds} --put_start_discard_timeout_sec=1 "
            f"--put_start_release_timeout_sec=60 {named}",
            port,
            logs / "master.log",
        )
        self.stores = [
            Process(
                "mooncake.cli_client",
                f"--host={LOOPBACK}{f':{name}' if fixed_names else ''} --port={number} "
                f"--master_server_address={self.address} --protocol=tcp "
                f"--metadata_server={self._metadata_server} --global_segment_size={store_bytes}",
                number,
                logs / f"store{number}.log",
            )
            for number, name in zip(ports[:stores], ports[stores:], strict=True)
        ]

    @property
    def options(self) -> dict[str, object]:
        """Options of the driver for a pure client of this cluster."""
        return {
            "master_server_address": self.address,
            "metadata_server": self._metadata_server,
            "local_hostname": LOOPBACK,
            "global_segment_size": 0,
        }

    def start(self) -> None:
        """Start all processes, and wait until the master has the memory of each store.

        Raises:
            DriverUnavailableError: Mooncake is not installed, or a library that it is linked to.
            StorageUnavailableError: a process does not start. The others are stopped.
        """
        library.new_store()
        try:
            for process in (self.master, *self.stores):
                process.start()
            self.wait_for_stores(len(self.stores))
        except BaseException:
            self.close()
            raise

    def wait_for_stores(self, count: int, seconds: float = START_SECONDS) -> None:
        """Wait until the master has the memory of `count` stores.

        Raises:
            StorageUnavailableError: not within `seconds`.
        """
        until = time.monotonic() + seconds
        while (known := self.capacity() // self._store_bytes) != count:
            if time.monotonic() > until:
                raise StorageUnavailableError(
                    f"the master knows {known} stores after {seconds:.0f} s and should know {count}"
                )
            time.sleep(0.05)

    def close(self) -> None:
        """Stop all processes of the cluster. Idempotent."""
        for process in (*self.stores, self.master):
            process.stop()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def capacity(self) -> int:
        """Return the memory of all stores that the master knows, in bytes."""
        metrics = ""
        with contextlib.suppress(OSError):
            address = f"http://{LOOPBACK}:{self._metrics}/metrics"
            with urllib.request.urlopen(address, timeout=5) as answer:
                metrics = answer.read().decode()
        total = re.search(r"^master_total_capacity_bytes (\S+)", metrics, re.MULTILINE)
        return int(float(total[1])) if total else 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        # All at once, so that none is given out twice.
        sockets = [held.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def listens(pid: int, port: int) -> bool:
    """Return True if this process listens at the port; another may accept connections there."""
    with contextlib.suppress(OSError):
        sockets = {
            f"socket:[{fields[9]}]"
            for fields in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines())
            if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"
        }
        return any(os.readlink(file) in sockets for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def main() -> int:
    """Run a cluster until SIGINT or SIGTERM; return the exit status."""
    parser = argparse.ArgumentParser(description="A Mooncake cluster on this machine.")
    parser.add_argument("--stores", type=int, default=1, help="store processes")
    parser.add_argument(
        "--store-size", default="256mb", help="memory that each lends, such as '1gb'"
    )
    parser.add_argument("--port", type=int, default=0, help="port of the master; a free one if 0")
    given = parser.parse_args()
    ended = threading.Event()
    try:
        cluster = DevCluster(
            given.stores, size_of(given.store_size, "--store-size"), port=given.port
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: ended.set())
        with cluster:
            options = " ".join(f"-c {name}={value}" for name, value in cluster.options.items())
            print(f"master at {cluster.address}, {given.stores} stores of {given.store_size}")
            print(f"try: hicache doctor mooncake {options}", flush=True)
            ended.wait()
    except HiCacheError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
