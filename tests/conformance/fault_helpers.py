"""What the tests of all injectors need: content, waiting, and calls that hang."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from hicache_conformance.harness.process_state import read_stat
from hicache_conformance.model.fault_plan import Fault, FaultPlan
from tests.support.commands import run_python

CONTENT = bytes(range(256)) * 64
MAX_SECONDS = 30.0


def find_fault(injector, kind, **fields):
    injector.inject(FaultPlan(injector.name, (Fault(kind=kind, **fields),)))


def background(action):
    """A thread that does something, and what came of it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    return thread, results


def killed_after(source, *arguments):
    """What a program has printed that kills itself at its end."""
    killed = f"{source}\nimport os; os.kill(os.getpid(), {signal.SIGKILL:d})"
    return run_python(killed, *arguments, status=-signal.SIGKILL).stdout.strip()


def threads_of(pid):
    """The state of each thread of a process, as ps(1) shows it."""
    return [read_stat(stat)[1][0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]


def bits_that_differ(one, other):
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))
