"""An event loop that the calling thread runs itself, one caller at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hicache_metadata_server.client.loop_thread import new_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from hicache_metadata_server.client.http_transport import HttpTransport

T = TypeVar("T")

IDLE_SECONDS: Final = 0.5
"""After this idle time servers may have closed connections that the loop has not looked at."""


class InlineLoop:
    """An event loop without a thread: a caller runs it for the time of one request.

    On two cores, half of a round trip's time is the way to an event loop in another thread and
    back. A caller that finds this loop in use takes the loop thread.

    The owner calls `close`, which waits for a running request up to a timeout.
    """

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        """Held by the thread that runs the loop; after `close`, for ever."""
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._last_used = 0.0

    def try_acquire(self) -> bool:
        """Acquire the loop for the calling thread. If True, the caller must call `run`.

        Always False in the main thread, because a signal handler may raise inside the loop, and in
        a thread that runs another event loop.
        """
        if threading.get_ident() == threading.main_thread().ident or _has_running_loop():
            return False
        return self._lock.acquire(blocking=False)

    def run(self, work: Callable[[HttpTransport], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the calling thread, and release the loop.

        Raises:
            asyncio.CancelledError: `close` has cancelled it.
        """
        try:
            if self._loop is None:
                self._loop = new_event_loop()
            return self._loop.run_until_complete(self._run(work))
        finally:
            self._last_used = time.monotonic()
            self._lock.release()

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a running request, cancel it, close the connections.

        Idempotent. For one thread, which is not the main thread.
        """
        if self._closed:
            return
        while not self._lock.acquire(timeout=timeout):
            # Repeated, because the task may not exist yet when the first cancellation arrives.
            timeout = 0.1
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel)
        self._closed = True
        if self._loop is not None:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        """Cancel what a request has left, such as the lookup of a name, and close the connections."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()

    async def _run(self, work: Callable[[HttpTransport], Coroutine[Any, Any, T]]) -> T:
        self._task = asyncio.current_task()
        try:
            if time.monotonic() - self._last_used > IDLE_SECONDS:
                # One turn of the loop, in which it notices connections that servers have closed.
                await asyncio.sleep(0)
            return await work(self._transport)
        finally:
            self._task = None

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
