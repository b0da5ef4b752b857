"""An event loop that its callers run themselves, one at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hicache_backends.hf3fs.client.loop_thread import new_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from hicache_backends.hf3fs.client.web import Web

T = TypeVar("T")

IDLE_SECONDS: Final = 0.5
"""After that, servers may have closed their connections, and nobody has looked."""


class CallersLoop:
    """Without a thread: whoever calls runs it for the time of its work, and waits for no other thread.

    On two processors half of a round trip's time is the way to an event loop in another thread and back. Who finds this loop in
    use takes the other one.

    The owner calls `close`; work that is under way then may go on until the owner's patience ends.
    """

    def __init__(self, web: Web) -> None:
        self._web = web
        self._turn = threading.Lock()
        """Held by the thread that runs the loop, and for ever once that is closed."""
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._left_at = 0.0

    def is_free(self) -> bool:
        """Whether the calling thread may run it now: then `run` has to follow.

        Never in the main thread, whose signal handlers may raise wherever the loop is; never in one that runs a loop already.
        """
        if threading.get_ident() == threading.main_thread().ident or _runs_a_loop():
            return False
        return self._turn.acquire(blocking=False)

    def run(self, work: Callable[[Web], Coroutine[Any, Any, T]]) -> T:
        """Do some work in the calling thread.

        Raises:
            asyncio.CancelledError: `close` has ended it.
        """
        try:
            if self._loop is None:
                self._loop = new_event_loop()
            return self._loop.run_until_complete(self._done(work))
        finally:
            self._left_at = time.monotonic()
            self._turn.release()

    def close(self, patience: float) -> None:
        """Let the work that is under way end, for a time, then cancel it; close the connections.

        Idempotent, for one thread, which is not the main one.
        """
        if self._closed:
            return
        while not self._turn.acquire(timeout=patience):
            patience = 0.1
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel)
        self._closed = True
        if self._loop is not None:
            self._loop.run_until_complete(self._web.close())
            self._loop.close()

    async def _done(self, work: Callable[[Web], Coroutine[Any, Any, T]]) -> T:
        self._task = asyncio.current_task()
        try:
            if time.monotonic() - self._left_at > IDLE_SECONDS:
                await asyncio.sleep(0)
            return await work(self._web)
        finally:
            self._task = None

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
