"""Comparing candidates fairly on a machine that is not quiet: they take turns, and medians are
compared."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from checkouts import Timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

ItemT = TypeVar("ItemT")
MAX_ORDERED = 6
"""Candidates of which every order is tried; of more, random ones."""


@dataclass
class Samples:
    """Seconds that one operation took, by candidate."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, who: str, seconds: float) -> None:
        self.seconds.setdefault(who, []).append(seconds)

    def median(self, who: str) -> float:
        return statistics.median(self.seconds[who])

    def ratio(self, who: str, peer: str) -> float:
        """Return the ratio of the speed of `who` to that of `peer`."""
        return self.median(peer) / self.median(who)

    def best_ratio(self, who: str, peer: str) -> float:
        """The same of the fastest runs, which others on the machine have disturbed the least."""
        return min(self.seconds[peer]) / min(self.seconds[who])


@dataclass
class Results:
    """Samples by subject (a page size, say) and operation."""

    samples: dict[tuple[str, str], Samples] = field(default_factory=dict)

    def time(
        self,
        subject: str,
        operation: str,
        who: str,
        action: Callable[[], object],
        *,
        expect: object = True,
    ) -> None:
        """Run an action once and keep how long it took; a wrong answer is no result."""
        started = time.perf_counter()
        answer = action()
        seconds = time.perf_counter() - started
        if isinstance(answer, Timed):
            answer, seconds = answer.answer, answer.seconds
        if answer != expect:
            raise AssertionError(
                f"{who}: {operation} of {subject} answered {answer!r}, not {expect!r}"
            )
        self.samples.setdefault((subject, operation), Samples()).add(who, seconds)


@dataclass
class Costs:
    """What operations took, on the clock and of the processor."""

    seconds: Results = field(default_factory=Results)
    cpu: Results = field(default_factory=Results)
    """Of all threads of this process, without the servers: what a busy machine hardly changes."""

    def time(
        self,
        subject: str,
        who: str,
        operation: str,
        action: Callable[[], object],
        *,
        expect: object = True,
    ) -> None:
        """Run an action once and keep what it took, as `Results.time`."""
        before, cpu = time.process_time(), 0.0

        def measured() -> object:
            nonlocal cpu
            answer = action()
            cpu = answer.cpu_seconds if isinstance(answer, Timed) else time.process_time() - before
            return answer

        self.seconds.time(subject, operation, who, measured, expect=expect)
        self.cpu.samples.setdefault((subject, operation), Samples()).add(who, cpu)


def turns(candidates: Sequence[ItemT], rounds: int) -> Iterator[ItemT]:
    """Everyone once a round, in every order in turn: whoever comes after a writer finds its pages
    still on their way to the disk."""
    draw = random.Random(0)
    if len(candidates) > MAX_ORDERED:
        for _ in range(rounds):
            yield from draw.sample(candidates, len(candidates))
        return
    orders = list(itertools.permutations(candidates))
    # Of four candidates there are more orders than rounds, and the first ones all begin alike.
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


def machine() -> dict[str, str]:
    """Describe hardware and versions, on which the figures depend."""
    with open("/proc/cpuinfo") as file:
        model = next(
            (line.partition(":")[2].strip() for line in file if line.startswith("model name")),
            platform.machine(),
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "cpu": f"{model}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
