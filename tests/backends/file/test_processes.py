"""Several processes on one directory keep its capacity, also where some of them are killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from typing import TYPE_CHECKING

from tests.backends.file.harness import Rig, bundle_bytes, chain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

# A fork is a process as good as any, and need not import torch again.
FORK = multiprocessing.get_context("fork")


@contextlib.contextmanager
def standing(processes: list[BaseProcess]) -> Iterator[None]:
    """Nobody of them does anything meanwhile, so that a listing counts no file beside the one that
    has replaced it."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        for process in processes:
            # Told when all its threads have stopped.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


def test_three_processes_keep_one_capacity_while_some_are_killed(rig, tmp_path):
    batch, stop = bundle_bytes(16), tmp_path / "stop"
    path, limit, chance = tmp_path / "store", int(batch * 6.5), random.Random(7)

    def play() -> None:
        writer, number = Rig(path, pages=16, capacity=limit), 0
        while not stop.exists():
            writer.put(chain(f"{os.getpid()}/{number % 40}", 1 + number * 7 % 16))
            number += 1
        writer.storage.close()

    def started() -> BaseProcess:
        process = FORK.Process(target=play)
        process.start()
        return process

    def used() -> int:
        files = [*path.rglob("*.bundle"), *path.rglob("*.temporary")]
        return sum(file.stat().st_size for file in files)

    processes = [started() for _ in range(3)]
    most, until = 0, time.monotonic() + 3
    while time.monotonic() < until or most <= limit // 2:
        for _ in range(20):
            with standing(processes):
                most = max(most, used())
        if chance.random() < 0.2:
            processes[0].kill()
            processes.pop(0).join(30)
            processes.append(started())
    stop.touch()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    # A bundle that is shortened is copied first, and each of them may be at that.
    assert most <= limit + len(processes) * batch
    last = rig(path, pages=16, capacity=limit)
    last.put(chain("last", 16))
    assert used() <= limit
    assert last.holds(chain("last", 16))
    assert used() > limit // 2
