"""Threads that share the copying and verifying of large pages.

Not beside a transfer: the library's caller spins until it has ended, while another of its threads serves the connections.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_THREADS: Final = 4
"""The caller's own among them."""
LEAST_BYTES: Final = 256 << 10
"""Of an item that is worth a thread: smaller ones take longer in Python, of which one thread runs at a time."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Crew:
    """Does work in several threads, the caller's and its own. Safe for many threads.

    Calls that were given up may come after `close`: their work is done by the caller alone.
    """

    def __init__(self) -> None:
        self._size = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        self._helpers: ThreadPoolExecutor | None = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="hicache-mooncake")

    def share(self, work: Callable[[Sequence[ItemT]], ResultT], items: Sequence[ItemT], item_bytes: int) -> list[ResultT]:
        """Results of the work on parts of the items, in their order.

        Args:
            work: waits for nobody.
            item_bytes: which it moves for each item.
        """
        length = -(-len(items) // self._size) if item_bytes >= LEAST_BYTES else len(items)
        if length == len(items):
            return [work(items)]
        begun = list[Future[ResultT]]()
        try:
            for start in range(length, len(items), length):
                begun.append(self._begin(work, items[start : start + length]))
            results = [work(items[:length])]
        finally:
            # The memory that they work on is given back after this.
            wait(begun)
        return results + [future.result() for future in begun]

    def close(self) -> None:
        """End the threads, after what was begun. Idempotent."""
        with self._lock:
            helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.shutdown()

    def _begin(self, work: Callable[[Sequence[ItemT]], ResultT], items: Sequence[ItemT]) -> Future[ResultT]:
        with self._lock:
            if self._helpers is not None:
                return self._helpers.submit(work, items)
        future = Future[ResultT]()
        future.set_result(work(items))
        return future
