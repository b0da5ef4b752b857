"""The lanes of a cell at work together: threads of this process, or processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, cast

from hicache_storage.plugins import create_storage, registry
from hicache_storage.spec import StorageIdentity
from hicache_storage.tools.bench.lane import PAGE_SIZE, Burst, Lane, WrongAnswerError, make_pool
from hicache_storage.tools.bench.settings import LaneKind, Operation

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hicache_storage.spec import HiCacheStorage
    from hicache_storage.tools.bench.settings import Cell, Contender

SETUP_SECONDS = 120.0
"""For a process to import torch, fill its pool and open its storage."""
BURST_SECONDS = 600.0
"""No burst takes as long: calls have deadlines."""


class Crew(Protocol):
    """All lanes of one contender in one cell."""

    verifies_checksums: bool
    deletes: bool
    """Whether `remove` makes room; otherwise `close` does, if anything can."""

    def prepare(self, batches: range) -> None:
        """Make the keys of batches that are to be written."""
        ...

    def run(self, operation: Operation, batches: range) -> Burst:
        """All lanes at once: one kind of call for each batch.

        Raises:
            WrongAnswerError: an answer is not what it has to be.
        """
        ...

    def remove(self) -> None:
        """Delete what has been written, where the driver can."""
        ...

    def close(self) -> None:
        """Remove all pages, and close."""
        ...


def assemble(contender: Contender, cell: Cell, run: str) -> Crew:
    """Open the storages of a cell.

    Raises:
        HiCacheError: that is not possible.
    """
    if cell.lane_kind is LaneKind.PROCESSES:
        return ProcessCrew(contender, cell, run)
    return ThreadCrew(contender, cell, run, range(cell.lanes))


class ThreadCrew:
    """Lanes that call one storage from a thread each."""

    def __init__(self, contender: Contender, cell: Cell, run: str, numbers: range) -> None:
        self._storage = open_storage(contender, run)
        try:
            pool = make_pool(cell, len(numbers))
            self._storage.register_mem_host_pool_v2(pool, "kv")
            self._storage.on_host_pools_registered()
        except BaseException:
            self._storage.close()
            raise
        self.verifies_checksums = self._storage.get_stats().verifies_checksums
        self.deletes = self._storage.capabilities.deletes
        self._lanes = [
            Lane(self._storage, pool, cell, run=run, number=number, place=place) for place, number in enumerate(numbers)
        ]
        self._threads = ThreadPoolExecutor(len(self._lanes), thread_name_prefix="hicache-bench")

    def prepare(self, batches: range) -> None:
        for lane in self._lanes:
            lane.prepare(batches)

    def run(self, operation: Operation, batches: range) -> Burst:
        start = threading.Barrier(len(self._lanes))

        def burst(lane: Lane) -> Burst:
            start.wait()
            return lane.run(operation, batches)

        return Burst.joined(list(self._threads.map(burst, self._lanes)))

    def remove(self) -> None:
        for lane in self._lanes:
            lane.remove()

    def close(self) -> None:
        try:
            # After an interruption, lanes may be in the middle of a burst.
            self._threads.shutdown(cancel_futures=True)
            self.remove()
            if self._storage.capabilities.clears and not self.deletes:
                self._storage.clear()
        finally:
            self._storage.close()


class ProcessCrew:
    """Lanes that have a process and a storage each."""

    def __init__(self, contender: Contender, cell: Cell, run: str) -> None:
        self._mates = list[_Mate]()
        try:
            for number in range(cell.lanes):
                self._mates.append(_Mate(contender, cell, run, number))
            told = [cast("tuple[bool, bool]", mate.answer(SETUP_SECONDS)) for mate in self._mates]
            self.verifies_checksums = all(verifies for verifies, _ in told)
            self.deletes = all(deletes for _, deletes in told)
        except BaseException:
            self.close()
            raise

    def prepare(self, batches: range) -> None:
        self._all("prepare", batches)

    def run(self, operation: Operation, batches: range) -> Burst:
        # A common start a little ahead: every process has read its orders by then.
        bursts = self._all("run", operation, batches, time.perf_counter() + 0.02)
        return Burst.joined([burst for burst in bursts if isinstance(burst, Burst)])

    def remove(self) -> None:
        self._all("remove")

    def close(self) -> None:
        for mate in self._mates:
            mate.dismiss()

    def _all(self, *order: object) -> list[object]:
        for mate in self._mates:
            mate.order(*order)
        return [mate.answer(BURST_SECONDS) for mate in self._mates]


class _Mate:
    """A process with one lane, from outside."""

    def __init__(self, contender: Contender, cell: Cell, run: str, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender, cell, run, number), daemon=True)
        self._process.start()
        theirs.close()

    def order(self, *order: object) -> None:
        self._pipe.send(order)

    def answer(self, seconds: float) -> object:
        """What the process answers.

        Raises:
            WrongAnswerError: it does not answer, or is gone.
            Exception: whatever was raised there.
        """
        try:
            if not self._pipe.poll(seconds):
                raise WrongAnswerError(f"a lane's process did not answer within {seconds:.0f} s")
            answer: object = self._pipe.recv()
        except EOFError:
            self._process.join(5.0)
            raise WrongAnswerError(f"a lane's process ended with status {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def dismiss(self) -> None:
        """Let it remove its pages and close; end it if it does not."""
        self._pipe.close()
        self._process.join(SETUP_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, contender: Contender, cell: Cell, run: str, number: int) -> None:
    """A lane's process: carries out orders until the pipe is closed."""
    crew: ThreadCrew | None = None
    answer: object
    try:
        crew = ThreadCrew(contender, cell, run, range(number, number + 1))
        answer = (crew.verifies_checksums, crew.deletes)
    except Exception as error:  # noqa: BLE001 - raised again in the process that asked
        answer = error
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        pipe.send(answer)
        while crew is not None:
            pipe.send(_carry_out(crew, *pipe.recv()))
    if crew is not None:
        crew.close()


def _carry_out(crew: ThreadCrew, name: str, *arguments: Any) -> object:
    try:
        if name != "run":
            return getattr(crew, name)(*arguments)
        operation, batches, start = arguments
        time.sleep(max(0.0, start - time.perf_counter()))
        return crew.run(operation, batches)
    except Exception as error:  # noqa: BLE001 - raised again in the process that asked
        return error


def open_storage(contender: Contender, run: str) -> HiCacheStorage:
    """The storage of a lane, with the layers that an engine's would have.

    Raises:
        HiCacheError: it cannot be constructed or opened.
    """
    # What can only be cleared needs a namespace that nobody else has; what is deleted leaves none behind for every run.
    salt = "" if registry().get(contender.driver).capabilities.deletes else run
    identity = StorageIdentity(model="hicache-bench", kv_dtype="uint8", page_size=PAGE_SIZE, layout="page_first", salt=salt)
    storage = create_storage(contender.driver, identity, contender.options)
    try:
        storage.open()
    except BaseException:
        storage.close()
        raise
    return storage
