"""An event loop in its own thread, for synchronous callers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from hicache_metadata_server.client.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

MARGIN_SECONDS: Final = 0.25
"""Grace after a coroutine's own deadline, within which the loop reports the timeout."""


class LoopThread:
    """A thread that runs an event loop, from the first coroutine until `close`.

    Args:
        end: awaited in the loop before it is closed.
        after: called in the thread after the loop was closed.
    """

    def __init__(
        self, name: str, *, end: Callable[[], Coroutine[Any, Any, None]], after: Callable[[], None]
    ) -> None:
        self._name = name
        self._end = end
        self._after = after
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._state = threading.Lock()
        self._closed = False

    def start(self) -> asyncio.AbstractEventLoop:
        """Start the thread if necessary, and return its loop.

        Raises:
            MetadataError: `close` was called, or no thread can be started.
        """
        with self._state:
            if self._closed:
                raise MetadataError("the client of the metadata server is closed")
            if self._loop is None:
                self._loop = new_event_loop()
                self._thread = threading.Thread(
                    target=self._serve, args=(self._loop,), name=self._name, daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._loop.close()
                    self._loop = None
                    self._thread = None
                    raise MetadataError(
                        f"the client's thread cannot be started: {error}"
                    ) from error
            return self._loop

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run a coroutine, which ends within `seconds` by itself, and wait for its result.

        Raises:
            TimeoutError: the coroutine raises it, or has not ended after a grace of 0.25 s.
            asyncio.CancelledError: the loop was closed while the coroutine ran.
            MetadataError: the loop is closed, or the coroutine raises it.
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
        """Start a coroutine without waiting for it.

        Raises:
            MetadataError: the loop is closed.
        """
        self._begin(work, _Awaited(work).start)

    def close(self) -> None:
        with self._state:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
            self._thread = None
        if loop is None or thread is None:
            return
        # Outside of the lock: a thread that starts a request must get its error, not wait here.
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _begin(
        self, work: Coroutine[Any, Any, Any], start: Callable[[], None]
    ) -> asyncio.AbstractEventLoop:
        try:
            loop = self.start()
            loop.call_soon_threadsafe(start)
        except (MetadataError, RuntimeError) as error:
            # A coroutine that is dropped without this warns that it was never awaited.
            work.close()
            if isinstance(error, MetadataError):
                raise
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


class _DaemonLookups:
    """Name lookups of a loop, each in a daemon thread that neither `close` nor the exit waits for.

    A lookup cannot be cancelled. uvloop makes it in a thread of libuv, for which closing the loop
    waits, and asyncio in an executor, for which the interpreter does.
    """

    async def getaddrinfo(self, host: str, port: int, **options: int) -> list[Any]:
        lookup = partial(socket.getaddrinfo, host, port, **options)
        with contextlib.suppress(socket.gaierror):
            return lookup(flags=options.get("flags", 0) | socket.AI_NUMERICHOST)
        found = Future[list[Any]]()
        # From now on it is not cancelled with the task that waits for it.
        found.set_running_or_notify_cancel()

        def run() -> None:
            try:
                found.set_result(lookup())
            except Exception as error:  # noqa: BLE001 - raised in the loop
                found.set_exception(error)

        try:
            threading.Thread(target=run, name="hicache-name-lookup", daemon=True).start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error
        return await asyncio.wrap_future(found)


class _Awaited(Generic[T]):
    """A coroutine of the event loop and the thread that waits for its result.

    `asyncio.run_coroutine_threadsafe` would cost two further turns of the loop.
    """

    __slots__ = ("_answer", "_error", "_pending", "_task", "_work")

    _answer: T

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._pending = threading.Lock()
        """Held until the coroutine has ended."""
        self._pending.acquire()

    def start(self) -> None:
        """Start the coroutine; called by the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """Cancel the coroutine; called by the event loop, after `start`."""
        if self._task is not None:
            self._task.cancel()

    def result(self, seconds: float) -> T:
        """Wait for the result; called once, by the waiting thread."""
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
        except Exception as error:  # noqa: BLE001 - raised in the waiting thread
            self._error = error
        finally:
            self._pending.release()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create a loop, uvloop's if installed: a fifth less time a round trip, a quarter less CPU."""
    base: type[asyncio.AbstractEventLoop]
    try:
        from uvloop import Loop as base
    except ImportError:
        base = asyncio.SelectorEventLoop
    return cast("asyncio.AbstractEventLoop", type("Loop", (_DaemonLookups, base), {})())
