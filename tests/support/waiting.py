"""Waiting for other threads and processes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
PATIENCE_SECONDS = 60.0


def eventually(
    condition: Callable[[], T],
    complaint: str = "nothing happened",
    *,
    seconds: float = PATIENCE_SECONDS,
) -> T:
    """Ask again and again until a condition holds, and return what it answered then."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, complaint
        time.sleep(0.005)
    return answer


@contextmanager
def repeated(*works: Callable[[], object]) -> Iterator[None]:
    """Do some works again and again until the end of a block, each in a thread; raise what went wrong
    in one."""
    over = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not over.is_set():
            work()

    with ThreadPoolExecutor(len(works)) as threads:
        working = [threads.submit(repeat, work) for work in works]
        try:
            yield
        finally:
            over.set()
            for one in working:
                one.result(PATIENCE_SECONDS)
