"""An event loop in a thread of its own, behind a synchronous face."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from hicache_backends.hf3fs.client.failures import MetadataError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

MARGIN_SECONDS: Final = 0.25
"""How long after a work's own deadline the event loop may take to say so."""


class LoopThread:
    """Its thread starts with the first work, and ends with `close`.

    Args:
        end: awaited in the loop before it is closed.
        after: called in the thread thereafter.
    """

    def __init__(self, name: str, *, end: Callable[[], Coroutine[Any, Any, None]], after: Callable[[], None]) -> None:
        self._name, self._end, self._after = name, end, after
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._state = threading.Lock()
        self._closed = False

    def start(self) -> asyncio.AbstractEventLoop:
        """The running loop.

        Raises:
            MetadataError: it is closed.
        """
        with self._state:
            if self._closed:
                raise MetadataError("the client of the metadata server is closed")
            if self._loop is None:
                self._loop = new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Wait for some work, which ends within `seconds` by itself.

        Raises:
            TimeoutError: it has not, or says so.
            asyncio.CancelledError: the loop was closed meanwhile.
            MetadataError: the loop is closed, or what the work raises.
        """
        awaited = _Awaited(work)
        loop = self._begin(work, awaited.start)
        try:
            return awaited.result(seconds + MARGIN_SECONDS)
        except TimeoutError:
            # The loop may have been closed meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(awaited.cancel)
            raise

    def post(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin some work that nobody waits for.

        Raises:
            MetadataError: the loop is closed.
        """
        self._begin(work, _Awaited(work).start)

    def close(self) -> None:
        with self._state:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _begin(self, work: Coroutine[Any, Any, Any], start: Callable[[], None]) -> asyncio.AbstractEventLoop:
        try:
            loop = self.start()
            loop.call_soon_threadsafe(start)
        except (MetadataError, RuntimeError) as error:
            # Work that is dropped without this warns that it was never awaited.
            work.close()
            raise MetadataError("the client of the metadata server is closed") from error
        return loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._end())
        finally:
            loop.close()
            self._after()


class _Awaited(Generic[T]):
    """Work of the event loop that one thread waits for; with `run_coroutine_threadsafe` it would wait two of the loop's turns longer."""

    __slots__ = ("_answer", "_error", "_pending", "_task", "_work")

    _answer: T

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._pending = threading.Lock()
        """Held until the work has ended."""
        self._pending.acquire()

    def start(self) -> None:
        """Called by the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """Called by the event loop, after `start`."""
        if self._task is not None:
            self._task.cancel()

    def result(self, seconds: float) -> T:
        """Called by the waiting thread, once."""
        if not self._pending.acquire(timeout=seconds):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._answer

    async def _run(self) -> None:
        try:
            self._answer = await self._work
        except asyncio.CancelledError as error:
            self._error = error
            raise
        except Exception as error:  # noqa: BLE001 - it is the waiting thread's
            self._error = error
        finally:
            self._pending.release()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: a round trip takes a fifth less time, and a quarter less of the processor."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
