"""A candidate in a process of its own, which runs the code of some checkout: today's drivers beside
those of an earlier commit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

PACKAGES = (".", "backends", "conformance", "metadata_server")
HERE = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0


@dataclass(frozen=True)
class Timed:
    """An answer, and what it took in the process that gave it."""

    answer: object
    seconds: float
    cpu_seconds: float


def environment(checkout: Path) -> dict[str, str]:
    """Variables with which Python imports this project from a checkout, whatever is installed."""
    paths = [str((checkout / package).resolve()) for package in PACKAGES]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class OfCheckout:
    """Our side of a benchmark, run by another process with the code of a checkout.

    Args:
        checkout: a work tree of this project; its benchmarks are not used, only its packages.
        name: of the candidate.
        module: of the benchmarks, whose `Ours` is made.
        page_bytes: size of a page of the host pool, which the other process makes for itself with
            the module's `host_pool`.
        layout: of the host pool.
        arguments: of `Ours`, behind the pool.
    """

    def __init__(
        self,
        checkout: Path,
        name: str,
        module: str,
        page_bytes: int,
        layout: str,
        *arguments: object,
        **options: object,
    ) -> None:
        self.name = name
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment(checkout),
        )
        theirs.close()
        self._connection.send((module, page_bytes, layout, arguments, options))
        if not self._connection.poll(START_SECONDS):
            raise AssertionError(f"{name} does not start within {START_SECONDS} s")
        imported = self._connection.recv()
        if not Path(imported).resolve().is_relative_to(checkout.resolve()):
            raise AssertionError(f"{name} runs {imported}, which is not in {checkout}")

    def write(self, keys: list[str]) -> Any:
        return self._ask("write", keys)

    def read(self, keys: list[str]) -> Any:
        return self._ask("read", keys)

    def exists(self, keys: list[str]) -> Any:
        return self._ask("exists", keys)

    def announce(self, keys: list[str]) -> None:
        self._ask("announce", keys)

    def is_sound(self, pages: int) -> bool:
        return bool(self._ask("is_sound", pages).answer)

    def prepare(self) -> None:
        self._ask("prepare")

    def remove(self) -> None:
        self._ask("remove")

    def files(self) -> list[Path]:
        return [Path(path) for path in self._ask("files").answer]

    def close(self) -> None:
        self._ask("close")
        self._connection.close()
        self._process.wait(START_SECONDS)

    def _ask(self, method: str, *arguments: object) -> Any:
        self._connection.send((method, arguments))
        return self._connection.recv()


def serve(connection: Connection) -> None:
    """Make the candidate that is asked for, and run what it is asked to do until it is closed."""
    sys.path.insert(0, str(HERE / "benchmarks"))
    from importlib import import_module

    import hicache_storage

    module, page_bytes, layout, arguments, options = connection.recv()
    found = import_module(module)
    candidate = found.Ours(found.host_pool(page_bytes, layout), *arguments, **options)
    connection.send(hicache_storage.__file__)
    method = ""
    while method != "close":
        method, arguments = connection.recv()
        started, cpu = time.perf_counter(), time.process_time()
        answer = getattr(candidate, method)(*arguments)
        connection.send(Timed(answer, time.perf_counter() - started, time.process_time() - cpu))


if __name__ == "__main__":
    # What is sent must be of the same class on both sides, whatever this file is called.
    from checkouts import serve as serve_pickled

    # Engines call from threads of their own.
    caller = threading.Thread(target=serve_pickled, args=(Connection(int(sys.argv[1])),))
    caller.start()
    caller.join()
