"""`AsyncObjectStorage`: three coroutines of a driver, one request for each page, become a driver."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import abstractmethod
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hicache_storage.objects.storage import ObjectStorage
from hicache_storage.spec import (
    DriverContractError,
    StorageTimeoutError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from hicache_storage.objects.batches import (
        Call,
        LookupBatch,
        ObjectRead,
        ObjectWrite,
        ReadBatch,
        WriteBatch,
    )
    from hicache_storage.objects.namespace import Namespace
    from hicache_storage.spec import Capabilities, StorageIdentity

DEFAULT_CONCURRENCY: Final = 32
"""Requests in flight at a time: a quarter of a call of 128 pages, which is what rule BU-2 leaves
for copies of pages."""

OPEN_SECONDS: Final = 10.0
"""Limit of `open_store` and of `close_store`, each."""

MARGIN: Final = 0.05
"""Part of a call's time that is kept back, so that what is known by then is the answer, and not the
deadline layer's miss."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class AsyncObjectStorage(ObjectStorage):
    """Base class of drivers whose store serves one request for each page.

    A driver implements three coroutines: look one object up, read one into its buffers, write one
    from its buffers. This class runs them for all pages of a call, at most `concurrency` at a time
    for all calls of all threads together, on one event loop in a thread of its own. Pages take
    their turn in the order of their chain, the same place of each pool together.

    A coroutine raises the errors of its store: that page is a miss, or not stored, and the others
    are served. Shortly before the deadline of a call the coroutines that run are cancelled, and
    none begins any more: what has been answered by then stands, and the rest are misses.

    The event loop runs from `connect` to `disconnect`, which belong to this class; a driver has
    `open_store` and `close_store` in their place.

    Args:
        concurrency: requests in flight at a time, at least 1. Declare it as
            `Capabilities.requests_in_flight`.
        identity, driver_name, capabilities, verifies_checksums: as of `ObjectStorage`.
    """

    def __init__(
        self,
        identity: StorageIdentity,
        *,
        driver_name: str,
        capabilities: Capabilities,
        concurrency: int = DEFAULT_CONCURRENCY,
        verifies_checksums: bool = True,
    ) -> None:
        super().__init__(
            identity,
            driver_name=driver_name,
            capabilities=capabilities,
            verifies_checksums=verifies_checksums,
        )
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._concurrency = concurrency
        # Its loop is the one that first waits at it; `connect` comes before any call.
        self._slots = asyncio.Semaphore(concurrency)
        self._loop: _LoopThread | None = None

    # What a driver implements
    # ------------------------------------------------------------------------------------

    @abstractmethod
    async def object_exists(self, namespace: Namespace, key: str) -> bool:
        """Look one object up; `True` if it exists with `namespace.object_bytes` bytes."""

    @abstractmethod
    async def read_object(self, read: ObjectRead) -> bool:
        """Read one object, into memory of the driver, and answer `read.fill(payload)`.

        `False` if there is none.
        """

    @abstractmethod
    async def write_object(self, write: ObjectWrite, call: Call) -> bool:
        """Write one object; `True` if it is visible, whole.

        Take the bytes (`write.tobytes()`) before the first `await`, and publish nothing if
        `call.expired()` afterwards: from then on the memory may be another request's.
        """

    async def delete_object(self, namespace: Namespace, key: str) -> bool:
        """Remove one object; `True` if there was one. Only with the capability `deletes`."""
        raise DriverContractError(
            f"{type(self).__name__} declares 'deletes' without delete_object()"
        )

    async def discard_object(self, read: ObjectRead) -> bool:
        """Remove one damaged object, unless another has been stored in its place since.

        `True` if the damaged one does not exist any more; `discard_objects` says what it owes.
        """
        return False

    async def clear_namespace(self, namespace: Namespace, call: Call) -> None:
        """Remove all objects of a namespace. Only with the capability `clears`.

        Cancelled at the deadline of the call; `clear_namespaces` says what it owes.
        """
        raise DriverContractError(
            f"{type(self).__name__} declares 'clears' without clear_namespace()"
        )

    async def open_store(self) -> None:
        """Open the client of the store; cancelled after 10 s."""

    async def close_store(self) -> None:
        """Undo `open_store`; called once, when no coroutine runs any more."""

    # What a driver may call
    # ----------------------------------------------------------------------------------------

    def run(
        self, work: Callable[[], Coroutine[Any, Any, ResultT]], seconds: float | None = None
    ) -> ResultT:
        """Run a coroutine function on the event loop, and wait for its result.

        For synchronous methods such as `check_health`; never called from a coroutine.

        Args:
            work: called without arguments, in the event loop.
            seconds: after which it is cancelled; None for no limit.

        Raises:
            TimeoutError: it had not ended after `seconds`.
            StorageUnavailableError: the event loop has ended, or ended meanwhile.
            Exception: what the coroutine raises.
        """
        return self._running().run(work, seconds)

    # The driver
    # ----------------------------------------------------------------------------------------

    def connect(self) -> None:
        self._loop = _LoopThread(f"hicache-{self.driver_name}")
        try:
            self.run(self.open_store, OPEN_SECONDS)
        except BaseException:
            self._loop.close()
            raise

    def disconnect(self) -> None:
        loop = self._running()
        try:
            # Calls that hang have been waited for (`CLOSE_TIMEOUT_SECONDS`): what they use goes.
            loop.run(loop.cancel_others)
            loop.run(self.close_store, OPEN_SECONDS)
        finally:
            loop.close()

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return self._fan_out(
            [batch.keys for batch in batches],
            lambda number, key: self.object_exists(batches[number].namespace, key),
            call,
        )

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        return self._fan_out(
            [batch.reads for batch in batches], lambda _, read: self.read_object(read), call
        )

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        return self._fan_out(
            [batch.writes for batch in batches],
            lambda _, write: self.write_object(write, call),
            call,
        )

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return self._fan_out(
            [batch.keys for batch in batches],
            lambda number, key: self.delete_object(batches[number].namespace, key),
            call,
        )

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        answers = self._fan_out(
            [batch.reads for batch in batches], lambda _, read: self.discard_object(read), call
        )
        return all(map(all, answers))

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        async def clear() -> None:
            for namespace in namespaces:
                if call.expired():
                    raise StorageTimeoutError("the clear was cancelled")
                await self.clear_namespace(namespace, call)

        self.run(clear, call.remaining())

    # How it is done
    # ----------------------------------------------------------------------------------------

    def _running(self) -> _LoopThread:
        if self._loop is None:
            raise StorageUnavailableError("the event loop of this storage does not run")
        return self._loop

    def _fan_out(
        self,
        batches: Sequence[Sequence[ItemT]],
        ask: Callable[[int, ItemT], Coroutine[Any, Any, bool]],
        call: Call,
    ) -> list[list[bool]]:
        """Ask for each item of each batch; `False` where that failed or was too late.

        Args:
            ask: takes the number of the batch, and the item.
        """
        answers = [[False] * len(batch) for batch in batches]
        faults = list[Exception]()
        turns = _turns(batches)
        items = sum(map(len, batches))
        answered = 0

        async def work() -> None:
            nonlocal answered
            for number, index in turns:
                # Held for one request and not for the call: calls of several threads take turns.
                async with self._slots:
                    # Cancelled, where the caller has not waited for the deadline.
                    if call.expired():
                        return
                    try:
                        answers[number][index] = await ask(number, batches[number][index])
                        answered += 1
                    except Exception as error:  # noqa: BLE001 - one page's failure, whatever it is
                        faults.append(error)

        async def work_together() -> None:
            # As many workers as requests, not as many tasks as pages: a call may have 250,000.
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, items)):
                    group.create_task(work())

        left = call.remaining()
        with contextlib.suppress(TimeoutError):
            self.run(work_together, None if left is None else left * (1 - MARGIN))
        late = items - answered - len(faults)
        if late:
            faults.append(
                StorageTimeoutError(f"{late} of {items} requests were not answered in time")
            )
        self.note_partial_faults(faults, served=answered > 0)
        return answers


class _LoopThread:
    """An event loop that runs in a thread of its own, until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a coroutine that blocks it must not keep the process from exiting.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            # Its descriptors; `open` is tried again and again.
            self._loop.close()
            raise StorageUnavailableError(str(error)) from error

    def run(
        self, work: Callable[[], Coroutine[Any, Any, ResultT]], seconds: float | None = None
    ) -> ResultT:
        """Run a coroutine function in the loop, and wait for its result; as `run` of the storage."""

        async def limited() -> ResultT:
            async with asyncio.timeout(seconds):
                return await work()

        asked = limited()
        try:
            future = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError as error:
            # A coroutine that is dropped without this warns that it was never awaited.
            asked.close()
            raise StorageUnavailableError("the event loop of this storage has ended") from error
        try:
            return future.result()
        except CancelledError as error:
            raise StorageUnavailableError("the storage was closed meanwhile") from error
        except BaseException:
            # Interrupted, as by Ctrl-C. Nothing happens where the coroutine has raised it.
            future.cancel()
            raise
        finally:
            # A cycle of the error, its traceback and this frame would keep the call's buffers.
            del future

    async def cancel_others(self) -> None:
        """Cancel all tasks but the one that calls this, and wait for their end."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def close(self) -> None:
        """End the loop, and wait for its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
            # A call that begins while the loop ends is cancelled, and not left waiting.
            self._loop.run_until_complete(self.cancel_others())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


def _turns(batches: Sequence[Sequence[object]]) -> Iterator[tuple[int, int]]:
    """Number of the batch and index in it, of each item: first all first ones, and so on.

    A call that ends early then knows as long a prefix of each pool.
    """
    for index in range(max(map(len, batches), default=0)):
        for number, batch in enumerate(batches):
            if index < len(batch):
                yield number, index
