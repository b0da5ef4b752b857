"""A Mooncake cluster on loopback, for tests and examples: a master and some store processes.

All processes listen at 127.0.0.1 on free ports. `close` stops exactly the processes that were
started here. The kernel kills them when the thread that started them ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from hicache_backends.mooncake.client import library
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from types import TracebackType

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 5.0
LOOPBACK: Final = "127.0.0.1"
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
        arguments: of the command line.
        log: file for the output.
    """

    def __init__(self, module: str, arguments: list[str], port: int, log: Path) -> None:
        self._command = [sys.executable, "-c", _LAUNCH, module, *arguments]
        self.port = port
        self.log = log
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while the process does not run."""
        return (
            self._running.pid
            if self._running is not None and self._running.poll() is None
            else None
        )

    def start(self) -> None:
        """Start the process, and wait until it listens.

        Raises:
            StorageUnavailableError: the process has exited, or does not listen. The message has
                the end of its output.
        """
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + START_SECONDS
        while not _listens(self.port):
            ended = self._running.poll()
            if ended is not None or time.monotonic() > until:
                self.kill()
                said = " ".join(self.log.read_text("utf-8", "replace").split())[-300:]
                why = (
                    f"ended with {ended}"
                    if ended is not None
                    else f"does not listen at port {self.port}"
                )
                raise StorageUnavailableError(
                    f"{self._command[3]} {why}; it said: {said or 'nothing'}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._end(signal.SIGKILL, 0)

    def stop(self) -> None:
        """Stop the process with SIGTERM, and with SIGKILL after 5 s."""
        self.resume()
        self._end(signal.SIGTERM, STOP_SECONDS)

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

    def _end(self, number: signal.Signals, timeout: float) -> None:
        if self._running is None:
            return
        self._signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running.wait(timeout or None)
            return
        self._signal(signal.SIGKILL)
        self._running.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._running is not None and self._running.poll() is None:
            self._running.send_signal(number)


class DevCluster:
    """A master and store processes.

    Args:
        stores: number of store processes.
        store_bytes: memory of each store.
        port: of the master; a free one if 0.
        client_ttl_seconds: the master drops a store that has been silent for so long.
        lease_milliseconds: time for which a looked up page is not evicted. A longer read is a miss.
        fixed_names: stores keep their names when they are restarted, by an HTTP metadata server in
            the master.
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
        self._directory = tempfile.TemporaryDirectory(prefix="hicache-mooncake-")
        logs = Path(self._directory.name)
        master, metrics, metadata, *ports = _free_ports(3 + 2 * stores)
        master = port or master
        metadata_options = (
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_host={LOOPBACK}",
            f"--http_metadata_server_port={metadata}",
            "--enable_metadata_cleanup_on_timeout=true",
        )
        self._metrics = metrics
        self._store_bytes = store_bytes
        self.address = f"{LOOPBACK}:{master}"
        self.master = Process(
            "mooncake.cli",
            [
                *(
                    f"--rpc_address={LOOPBACK}",
                    f"--rpc_port={master}",
                    f"--metrics_host={LOOPBACK}",
                    f"--metrics_port={metrics}",
                ),
                *(
                    f"--default_kv_lease_ttl={lease_milliseconds}",
                    f"--client_ttl={client_ttl_seconds}",
                ),
                *("--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=2"),
                *(metadata_options if fixed_names else ()),
            ],
            master,
            logs / "master.log",
        )
        self._metadata_server = (
            f"http://{LOOPBACK}:{metadata}/metadata" if fixed_names else "P2PHANDSHAKE"
        )
        self.stores = [
            Process(
                "mooncake.cli_client",
                [
                    *(
                        f"--host={LOOPBACK}:{named}" if fixed_names else f"--host={LOOPBACK}",
                        f"--port={number}",
                        f"--master_server_address={self.address}",
                    ),
                    *(
                        f"--metadata_server={self._metadata_server}",
                        "--protocol=tcp",
                        f"--global_segment_size={store_bytes}",
                    ),
                ],
                number,
                logs / f"store{index}.log",
            )
            for index, (number, named) in enumerate(
                zip(ports[:stores], ports[stores:], strict=True)
            )
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
        library.check_installed()
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
        while (known := self._capacity() // self._store_bytes) != count:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _capacity(self) -> int:
        """Capacity of the master in bytes."""
        address = f"http://{LOOPBACK}:{self._metrics}"
        try:
            with urllib.request.urlopen(f"{address}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0
        totals = [
            line.split()[-1] for line in lines if line.startswith("master_total_capacity_bytes")
        ]
        return int(float(totals[0])) if totals else 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        # All at once, so that none is given out twice.
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True
