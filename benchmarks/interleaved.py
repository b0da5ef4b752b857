"""Harness of the benchmarks: sides take turns, each in this process or in one of its own, and their
medians are compared. Results have the format of `hicache bench`."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_storage.tools.bench.results import (
    CandidateInfo,
    Measurement,
    Report,
    Workload,
    this_machine,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ItemT = TypeVar("ItemT")
MAX_ORDERED = 6
"""Sides of which every order is tried; of more, random ones."""
HERE = Path(__file__).resolve().parent.parent
PACKAGES = (".", "backends", "conformance", "metadata_server")
START_SECONDS = 180.0


class Run:
    """Measurements of a benchmark, by side and workload.

    Args:
        facts: on which the figures depend, beside the machine.
    """

    def __init__(self, **facts: str) -> None:
        self.report = Report([], machine=this_machine() | facts)
        self._known: dict[tuple[str, Workload], Measurement] = {}

    def of(self, side: str, workload: Workload) -> Measurement:
        """Return the measurement of a side in a workload; made if there is none."""
        if (side, workload) not in self._known:
            page_bytes, clients, pages, operation = workload
            made = Measurement(side, page_bytes, clients, operation, pages)
            self._known[side, workload] = made
            self.report.measurements.append(made)
        return self._known[side, workload]

    def find(self, side: str, workload: Workload) -> Measurement | None:
        """Return a measurement that has a round."""
        found = self._known.get((side, workload))
        return found if found is not None and found.rounds else None

    def time(
        self,
        side: str,
        workload: Workload,
        action: Callable[[], object],
        *,
        expect: object = True,
    ) -> None:
        """Run an action once and keep what it took; a wrong answer is no result.

        CPU time is that of all threads of the side's process, without servers.

        Raises:
            AssertionError: the answer is another one.
        """
        timed = timed_call(action)
        if isinstance(timed.answer, Timed):
            timed = timed.answer
        if timed.answer != expect:
            raise AssertionError(
                f"{side}: {workload[-1]} answered {timed.answer!r}, not {expect!r}"
            )
        self.of(side, workload).add(timed.seconds, timed.cpu_seconds)

    def note(self, figure: str, value: float) -> None:
        """Keep a value that is no rate."""
        self.report.figures.setdefault(figure, []).append(value)

    def figure(self, figure: str) -> float:
        """Return the median of such a value."""
        return statistics.median(self.report.figures[figure])

    def save(self, out: Path, text: str) -> None:
        """Write results.md and results.json; after each workload, so that a run that is ended early
        keeps what it has measured."""
        sides = dict.fromkeys(one.label for one in self.report.measurements)
        self.report.candidates = [CandidateInfo(side) for side in sides]
        for one in self.report.measurements:
            if one.rounds:
                pages = one.clients * one.batch_pages
                one.set_latencies([pages / rate for rate in one.rounds])
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.md").write_text(text)
        self.report.write(out / "results.json")

    def show(self, text: str) -> None:
        """Print the machine and the tables."""
        print(json.dumps(self.report.machine, indent=1), text, sep="\n")


def ratio(side: Measurement | None, peer: Measurement | None, *, best: bool = False) -> str:
    """Format the ratio of the speed of a side to that of a peer.

    Args:
        best: of the fastest rounds, which others on the machine have disturbed the least.
    """
    if side is None or peer is None:
        return ""
    if best:
        return f"{max(side.rounds) / max(peer.rounds):.2f}x"
    return f"{side.pages_per_second / peer.pages_per_second:.2f}x"


@dataclass(frozen=True)
class Timed:
    """An answer, and what it took in the process that gave it."""

    answer: object
    seconds: float
    cpu_seconds: float


def timed_call(action: Callable[..., object], *arguments: object) -> Timed:
    """Call something, and time it."""
    started, cpu = time.perf_counter(), time.process_time()
    answer = action(*arguments)
    return Timed(answer, time.perf_counter() - started, time.process_time() - cpu)


def environment(checkout: Path) -> dict[str, str]:
    """Variables with which Python imports this project from a checkout, whatever is installed."""
    paths = [str((checkout / package).resolve()) for package in PACKAGES]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Process:
    """A side in a process of its own, which runs a module of benchmarks/ with the packages of a
    checkout.

    Args:
        python: interpreter of the side's environment.
        module: has a function `made`, which makes the side.
        checkout: a work tree of this project.
        arguments: of that function.
    """

    def __init__(
        self, name: str, python: Path, module: str, checkout: Path, *arguments: object
    ) -> None:
        self.name, self._checkout = name, checkout
        self._connection, theirs = Pipe()
        # Not a pipe: nobody reads it before the end, and engines that log a lot would fill it.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._process = subprocess.Popen(
            [str(python), "-c", f"from {module} import serve; serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=self._printed,
            env=environment(checkout) | {"PYTHONWARNINGS": "ignore"},
            cwd=Path(__file__).parent,
        )
        theirs.close()
        self._connection.send(arguments)

    def wait_until_up(self) -> None:
        """Wait until the side is made.

        Raises:
            EOFError: it cannot be; the message has the last line that it printed.
            AssertionError: it runs another checkout's code.
        """
        try:
            if not self._connection.poll(START_SECONDS):
                raise EOFError
            imported = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.kill()
            self._process.wait()
            self._connection.close()
            with self._printed:
                self._printed.seek(0)
                lines = self._printed.read().decode(errors="replace").strip().splitlines()
            raise EOFError(lines[-1] if lines else "it has ended") from None
        if not Path(imported).resolve().is_relative_to(self._checkout.resolve()):
            raise AssertionError(f"{self.name} runs {imported}, not {self._checkout}")

    def ask(self, method: str, *arguments: object) -> Timed:
        """Call a method of the side."""
        self._connection.send((method, arguments))
        answer: Timed = self._connection.recv()
        return answer

    def close(self) -> None:
        """Close the side, and wait for the end of its process."""
        self.ask("close")
        self._connection.close()
        self._printed.close()
        self._process.wait(START_SECONDS)


def serve_side(descriptor: int, made: Callable[..., Any]) -> None:
    """Make the side that is asked for, and do what is asked until it is closed."""
    import hicache_storage

    connection = Connection(descriptor)
    side = made(*connection.recv())
    connection.send(hicache_storage.__file__)

    def answer_calls() -> None:
        method = ""
        while method != "close":
            method, arguments = connection.recv()
            connection.send(timed_call(getattr(side, method), *arguments))

    # Engines call from threads of their own; some of SGLang's drivers can be made in the main
    # thread only.
    caller = threading.Thread(target=answer_calls)
    caller.start()
    caller.join()


def turns(sides: Sequence[ItemT], rounds: int) -> Iterator[ItemT]:
    """Everyone once a round, in every order in turn: whoever comes after a writer finds its pages
    still on their way to the disk."""
    draw = random.Random(0)
    if len(sides) > MAX_ORDERED:
        for _ in range(rounds):
            yield from draw.sample(sides, len(sides))
        return
    orders = list(itertools.permutations(sides))
    # Of four sides there are more orders than rounds, and the first ones all begin alike.
    draw.shuffle(orders)
    for order in itertools.islice(itertools.cycle(orders), rounds):
        yield from order


def wait_for_quiet(seconds: float) -> None:
    """Wait until nobody else uses the machine, but no longer than that: its cores and its disk are
    shared."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before = _cpu_times()
        time.sleep(0.05)
        busy, idle = (after - earlier for after, earlier in zip(_cpu_times(), before, strict=True))
        if busy <= 0.1 * (busy + idle):
            return


@contextlib.contextmanager
def awake_cores() -> Iterator[None]:
    """Keep every core busy with a process that any other one displaces.

    A virtual machine's core that halts is given back to the host, and the guest starts a thread
    beside its caller rather than there: for the first milliseconds two threads share a core while
    the other one is idle. Of a busy server's cores few halt.
    """
    spinning = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.nice(19);"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "while os.getppid() == int(sys.argv[2]): pass"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", spinning, str(core), str(os.getpid())])
        for core in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _cpu_times() -> tuple[int, int]:
    with open("/proc/stat") as file:
        # "nice" is what `awake_cores` uses.
        user, nice, system, idle, iowait, *rest = map(int, file.readline().split()[1:])
    return user + system + iowait + sum(rest), nice + idle


_numbers = itertools.count()


def fresh_keys(count: int) -> list[str]:
    """Keys that nobody has seen, as an engine makes them."""
    number = next(_numbers)
    return [
        hashlib.sha256(f"{os.getpid()}/{number}/{page}".encode()).hexdigest()
        for page in range(count)
    ]


def drop_from_page_cache(paths: list[Path]) -> None:
    """Write files to disk and forget them, so that the next read is cold."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def size_of(page_bytes: int) -> str:
    """A page size in words."""
    return f"{page_bytes >> 20} MiB" if not page_bytes % (1 << 20) else f"{page_bytes >> 10} KiB"
