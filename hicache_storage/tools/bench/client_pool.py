"""Pools of clients that run at the same time: threads of this process, or worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, cast

from hicache_storage.plugins import create_storage, registry
from hicache_storage.spec import StorageIdentity
from hicache_storage.tools.bench.client import (
    PAGE_SIZE,
    CallSample,
    Client,
    WrongAnswerError,
    make_pool,
)
from hicache_storage.tools.bench.settings import ClientKind, Operation

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hicache_storage.spec import HiCacheStorage
    from hicache_storage.tools.bench.settings import BenchWorkload, Candidate

SETUP_SECONDS = 120.0
"""Limit of the start of a process: it imports torch, fills its host pool and opens its storage."""
MAX_SAMPLE_SECONDS = 600.0
"""Limit of one sample, never reached by clients whose calls have deadlines."""


class ClientPool(Protocol):
    """All clients of one candidate in one workload."""

    verifies_checksums: bool
    deletes: bool
    """True if `remove` frees the space of pages; otherwise only `close` may."""

    def prepare(self, batches: range) -> None:
        """Prepare the keys of batches that are to be written."""
        ...

    def run(self, operation: Operation, batches: range) -> CallSample:
        """Run one kind of call for each batch, in all clients at once.

        Raises:
            WrongAnswerError: an answer is wrong.
        """
        ...

    def remove(self) -> None:
        """Delete the written pages, if the driver implements it."""
        ...

    def close(self) -> None:
        """Remove all pages, and close."""
        ...


def open_clients(candidate: Candidate, workload: BenchWorkload, run: str) -> ClientPool:
    """Open the storages of a workload.

    Raises:
        HiCacheError: a storage cannot be constructed or opened.
    """
    if workload.client_kind is ClientKind.PROCESSES:
        return ProcessClients(candidate, workload, run)
    return ThreadClients(candidate, workload, run, range(workload.clients))


class ThreadClients:
    """Clients that share one storage, with a thread each."""

    def __init__(
        self, candidate: Candidate, workload: BenchWorkload, run: str, numbers: range
    ) -> None:
        self._storage = open_storage(candidate, run)
        try:
            pool = make_pool(workload, len(numbers))
            self._storage.register_mem_host_pool_v2(pool, "kv")
            self._storage.on_host_pools_registered()
        except BaseException:
            self._storage.close()
            raise
        self.verifies_checksums = self._storage.get_stats().verifies_checksums
        self.deletes = self._storage.capabilities.deletes
        self._clients = [
            Client(self._storage, pool, workload, run=run, number=number, place=place)
            for place, number in enumerate(numbers)
        ]
        self._threads = ThreadPoolExecutor(len(self._clients), thread_name_prefix="hicache-bench")

    def prepare(self, batches: range) -> None:
        for client in self._clients:
            client.prepare(batches)

    def run(self, operation: Operation, batches: range) -> CallSample:
        # The executor starts its threads one after the other; the calls have to overlap from the
        # first on.
        start = threading.Barrier(len(self._clients))

        def run_client(client: Client) -> CallSample:
            start.wait()
            return client.run(operation, batches)

        return CallSample.merged(list(self._threads.map(run_client, self._clients)))

    def remove(self) -> None:
        for client in self._clients:
            client.remove()

    def close(self) -> None:
        try:
            # After an interruption, clients may still be in their calls.
            self._threads.shutdown(cancel_futures=True)
            self.remove()
            # Only such a store has a namespace of this run alone (`open_storage`): no other pages
            # are cleared.
            if self._storage.capabilities.clears and not self.deletes:
                self._storage.clear()
        finally:
            self._storage.close()


class ProcessClients:
    """Clients with a process and a storage each."""

    def __init__(self, candidate: Candidate, workload: BenchWorkload, run: str) -> None:
        self._workers = list[_WorkerProcess]()
        try:
            for number in range(workload.clients):
                self._workers.append(_WorkerProcess(candidate, workload, run, number))
            ready = [
                cast("tuple[bool, bool]", worker.receive(SETUP_SECONDS)) for worker in self._workers
            ]
            self.verifies_checksums = all(verifies for verifies, _ in ready)
            self.deletes = all(deletes for _, deletes in ready)
        except BaseException:
            self.close()
            raise

    def prepare(self, batches: range) -> None:
        self._all("prepare", batches)

    def run(self, operation: Operation, batches: range) -> CallSample:
        # A common start, a little later than now: by then every process has received the request.
        samples = self._all("run", operation, batches, time.perf_counter() + 0.02)
        return CallSample.merged([sample for sample in samples if isinstance(sample, CallSample)])

    def remove(self) -> None:
        self._all("remove")

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _all(self, *request: object) -> list[object]:
        for worker in self._workers:
            worker.send(*request)
        return [worker.receive(MAX_SAMPLE_SECONDS) for worker in self._workers]


class _WorkerProcess:
    """The parent's side of a process with one client."""

    def __init__(
        self, candidate: Candidate, workload: BenchWorkload, run: str, number: int
    ) -> None:
        # Not `fork`: a locked host pool is not in a forked child, and a storage that is open
        # refuses to work there (rule LC-5).
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, candidate, workload, run, number), daemon=True
        )
        self._process.start()
        # Otherwise this process keeps the other end open, and `recv` would not notice that the
        # child has ended.
        theirs.close()

    def send(self, *request: object) -> None:
        self._pipe.send(request)

    def receive(self, seconds: float) -> object:
        """Return the process' answer to a request.

        Raises:
            WrongAnswerError: the process does not answer within `seconds`, or has ended.
            Exception: the request has raised it in the process.
        """
        try:
            if not self._pipe.poll(seconds):
                raise WrongAnswerError(f"a client's process did not answer within {seconds:.0f} s")
            answer: object = self._pipe.recv()
        except EOFError:
            self._process.join(5.0)
            raise WrongAnswerError(
                f"a client's process ended with status {self._process.exitcode}"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Let the process remove its pages and end; kill it if it does not."""
        # The child's `recv` ends with that: it removes its pages and exits.
        self._pipe.close()
        self._process.join(SETUP_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def _serve(
    pipe: Connection, candidate: Candidate, workload: BenchWorkload, run: str, number: int
) -> None:
    """Serve requests in a worker process, until the pipe is closed."""
    clients: ThreadClients | None = None
    answer: object
    try:
        clients = ThreadClients(candidate, workload, run, range(number, number + 1))
        answer = (clients.verifies_checksums, clients.deletes)
    except Exception as error:  # noqa: BLE001 - raised again in the process that asked
        answer = error
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        pipe.send(answer)
        while clients is not None:
            pipe.send(_execute(clients, *pipe.recv()))
    if clients is not None:
        clients.close()


def _execute(clients: ThreadClients, name: str, *arguments: Any) -> object:
    try:
        if name != "run":
            return getattr(clients, name)(*arguments)
        operation, batches, start = arguments
        # `perf_counter` is one clock for all processes of a machine, so that they start together.
        time.sleep(max(0.0, start - time.perf_counter()))
        return clients.run(operation, batches)
    except Exception as error:  # noqa: BLE001 - raised again in the process that asked
        return error


def open_storage(candidate: Candidate, run: str) -> HiCacheStorage:
    """Open the storage of a client, with the layers that an engine's would have.

    Raises:
        HiCacheError: the storage cannot be constructed or opened.
    """
    # A store that is cleared needs a namespace of this run alone. Pages that are deleted need none,
    # and a namespace for each run would stay in the store.
    salt = "" if registry().get(candidate.driver).capabilities.deletes else run
    identity = StorageIdentity(
        model="hicache-bench", kv_dtype="uint8", page_size=PAGE_SIZE, layout="page_first", salt=salt
    )
    # With the default options, so that the layers of the SDK are part of what is measured.
    storage = create_storage(candidate.driver, identity, candidate.options)
    try:
        storage.open()
    except BaseException:
        storage.close()
        raise
    return storage
