"""Clients of a storage, a thread each: their pages, their keys, their calls, and their sweep."""

from __future__ import annotations

import hashlib
import secrets
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hicache_storage.plugins import create_storage
from hicache_storage.spec import (
    PoolName,
    PoolTransfer,
    StorageIdentity,
    StorageRefusedError,
    UnsupportedOperationError,
)
from hicache_storage.tools.bench.results import (
    CandidateInfo,
    Measurement,
    Operation,
    Report,
    this_machine,
)
from hicache_storage.tools.options import redacted, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.pools import PagedHostPool
    from hicache_storage.spec import HiCacheStorage

PAGE_SIZE: Final = 64
"""Tokens in a page; the results depend on its bytes only."""
BATCH_PAGES: Final = 128
"""Pages in a call, as many as engines send."""
MIN_PAGE_BYTES: Final = 4096
"""Shortest page that can be measured; longer ones are multiples of it."""
LOOKUPS: Final = 10
"""Lookups of each batch: a single one is too short to be measured well."""
ROUNDS: Final = 5
"""Rounds that a workload is planned to have; slow stores have fewer, at least one."""
STAMP: Final = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A driver with its options."""

    driver: str
    options: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """One combination of page size and number of clients."""

    page_bytes: int
    clients: int
    """Threads that call one storage, as in an engine."""
    batch_pages: int = BATCH_PAGES

    @property
    def stored_bytes(self) -> int:
        """Bytes that one call of each client stores."""
        return self.clients * self.batch_pages * self.page_bytes


class WrongAnswerError(Exception):
    """A page was not stored, not found, not delivered, or has other bytes.

    The measurement is void.
    """


class MissingPagesError(WrongAnswerError):
    """A page was not stored, not found or not delivered, which a store without room may answer."""


@dataclass(slots=True)
class CallSample:
    """Durations of calls of one kind, one after the other; times of `time.perf_counter()`."""

    started: float
    ended: float
    seconds: list[float] = field(default_factory=list[float])
    """Duration of each call."""
    pages: int = 0

    @classmethod
    def merged(cls, samples: Sequence[CallSample]) -> CallSample:
        """Merge the samples that several clients took at the same time."""
        return cls(
            min(sample.started for sample in samples),
            max(sample.ended for sample in samples),
            [seconds for sample in samples for seconds in sample.seconds],
            sum(sample.pages for sample in samples),
        )


def make_pool(workload: BenchWorkload) -> PagedHostPool:
    """Make a host pool for all clients, and fill it.

    No call is then charged for the page faults of its memory.

    Raises:
        InvalidPoolError: there is not enough memory.
    """
    import torch

    from hicache_storage.pools import AttentionGeometry, PagedHostPool

    pool = PagedHostPool(
        AttentionGeometry(
            layers=range(1),
            head_num=1,
            head_dim=workload.page_bytes // (2 * PAGE_SIZE),
            dtype=torch.uint8,
        ),
        size=2 * workload.clients * workload.batch_pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
    )
    for buffer in pool.buffers:
        # Eight bytes at a time: random bytes one by one take longer than the benchmark.
        buffer.view(-1).view(torch.int64).random_()
    return pool


class Client:
    """A caller that writes from its first `batch_pages` pages of the pool.

    It reads into the next ones.

    Args:
        run: prefix of the keys of this run, different from those of all others.
        number: part of the client's keys, and index of its part of the pool.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        pool: PagedHostPool,
        workload: BenchWorkload,
        *,
        run: str,
        number: int,
    ) -> None:
        self._storage = storage
        self._pool = pool
        self._run = run
        self._number = number
        self._pages = workload.batch_pages
        start = 2 * number * workload.batch_pages * PAGE_SIZE
        self._source = range(start, start + workload.batch_pages * PAGE_SIZE)
        self._target = range(
            self._source.stop, self._source.stop + workload.batch_pages * PAGE_SIZE
        )
        self.keys = dict[int, list[str]]()
        """Of each batch that was prepared, until it is removed."""

    def prepare(self, batches: range) -> None:
        """Prepare the keys of batches that are to be written."""
        for batch in batches:
            self.keys[batch] = [self._key(batch, page) for page in range(self._pages)]

    def run(self, operation: Operation, batches: range) -> CallSample:
        """Run one kind of call for each batch.

        Raises:
            WrongAnswerError: an answer is wrong.
        """
        calls = {
            Operation.WRITE: self._write,
            Operation.EXISTS: self._exists,
            Operation.READ: self._read,
        }
        repeats = LOOKUPS if operation is Operation.EXISTS else 1
        sample = CallSample(time.perf_counter(), 0.0)
        for batch in batches:
            if operation is Operation.WRITE:
                # Otherwise all batches have equal bytes, and a get that delivers another batch
                # would pass.
                self._stamp(batch)
            for _ in range(repeats):
                sample.seconds.append(calls[operation](batch))
        sample.ended = time.perf_counter()
        sample.pages = len(sample.seconds) * self._pages
        if operation is Operation.READ and batches:
            # After `ended`: comparing bytes is not part of the measurement.
            self._verify(batches[-1])
        return sample

    def remove(self) -> None:
        """Delete the written pages, if the driver implements it."""
        if self._storage.capabilities.deletes:
            for keys in self.keys.values():
                self._storage.delete(keys)
        self.keys.clear()

    def _write(self, batch: int) -> float:
        # Outside of the measured time: an engine has its indices already.
        transfer = PoolTransfer(PoolName.KV, _indices(self._source), keys=self.keys[batch])
        started = time.perf_counter()
        answer = self._storage.batch_set_v2([transfer])
        seconds = time.perf_counter() - started
        self._expect_all("set", answer[PoolName.KV])
        return seconds

    def _read(self, batch: int) -> float:
        transfer = PoolTransfer(PoolName.KV, _indices(self._target), keys=self.keys[batch])
        started = time.perf_counter()
        answer = self._storage.batch_get_v2([transfer])
        seconds = time.perf_counter() - started
        self._expect_all("get", answer[PoolName.KV])
        return seconds

    def _exists(self, batch: int) -> float:
        started = time.perf_counter()
        found = self._storage.batch_exists_v2(self.keys[batch]).kv_hit_pages
        seconds = time.perf_counter() - started
        if found != self._pages:
            raise MissingPagesError(f"{self._pages} pages were stored, and exists finds {found}")
        return seconds

    def _expect_all(self, call: str, answer: list[bool]) -> None:
        if answer != [True] * self._pages:
            raise MissingPagesError(
                f"a {call} of {self._pages} pages answered False for {answer.count(False)} of them"
            )

    def _stamp(self, batch: int) -> None:
        """Write the number of a batch into the first bytes of the source pages."""
        import torch

        stamp = torch.frombuffer(bytearray(STAMP.pack(self._number, batch)), dtype=torch.uint8)
        for buffer in self._pool.parts:
            buffer[self._source.start : self._source.stop : PAGE_SIZE, 0, 0, : STAMP.size] = stamp

    def _verify(self, batch: int) -> None:
        """Compare every byte of the batch that was read last."""
        import torch

        # Whatever was written last: the source pages must have the stamp of this batch.
        self._stamp(batch)
        for buffer in self._pool.parts:
            sent, came = (buffer[span.start : span.stop] for span in (self._source, self._target))
            if not torch.equal(sent, came):
                raise WrongAnswerError(
                    "a get answered True and delivered other bytes than were stored"
                )

    def _key(self, batch: int, page: int) -> str:
        return hashlib.sha256(f"{self._run}/{self._number}/{batch}/{page}".encode()).hexdigest()


def _indices(slots: range) -> torch.Tensor:
    import torch

    return torch.arange(slots.start, slots.stop)


class ClientPool:
    """All clients of one candidate in one workload; they share one storage.

    Raises:
        HiCacheError: the storage cannot be constructed or opened.
    """

    def __init__(self, candidate: Candidate, workload: BenchWorkload, run: str) -> None:
        self._storage = open_storage(candidate)
        try:
            pool = make_pool(workload)
            self._storage.register_mem_host_pool_v2(pool, "kv")
            self._storage.on_host_pools_registered()
        except BaseException:
            self._storage.close()
            raise
        self.verifies_checksums = self._storage.get_stats().verifies_checksums
        self._clients = [
            Client(self._storage, pool, workload, run=run, number=number)
            for number in range(workload.clients)
        ]
        self._threads = ThreadPoolExecutor(len(self._clients), thread_name_prefix="hicache-bench")

    def prepare(self, batches: range) -> None:
        """Prepare the keys of batches that are to be written."""
        for client in self._clients:
            client.prepare(batches)

    def run(self, operation: Operation, batches: range) -> CallSample:
        """Run one kind of call for each batch, in all clients at once.

        Raises:
            StorageRefusedError: the store has refused or evicted pages.
            WrongAnswerError: an answer is wrong.
        """
        # The executor starts its threads one after the other; the calls have to overlap from the
        # first on.
        start = threading.Barrier(len(self._clients))

        def run_client(client: Client) -> CallSample:
            start.wait()
            return client.run(operation, batches)

        try:
            return CallSample.merged(list(self._threads.map(run_client, self._clients)))
        except MissingPagesError:
            check_room(self._storage)
            raise

    def remove(self) -> None:
        """Delete the written pages."""
        for client in self._clients:
            client.remove()

    def close(self) -> None:
        """Remove all pages, and close."""
        try:
            # After an interruption, clients may still be in their calls.
            self._threads.shutdown(cancel_futures=True)
            self.remove()
        finally:
            self._storage.close()


def check_room(storage: HiCacheStorage) -> None:
    """Check that a store has neither evicted pages nor refused them without a fault.

    Raises:
        StorageRefusedError: it has.
    """
    stats, health = storage.get_stats(), storage.health()
    evicted = sum(pool.pages_evicted for pool in stats.pools.values())
    refused = sum(pool.pages_refused for pool in stats.pools.values())
    if evicted or (refused and not stats.faults):
        counts = f"{refused} were refused, {evicted} were evicted before they were read"
        raise StorageRefusedError(
            f"the store has no room for the pages: {health.detail or counts}; give a smaller "
            "--max-stored or --batch"
        )


def open_storage(candidate: Candidate) -> HiCacheStorage:
    """Open a storage with the default options, so that the layers of the SDK are measured, too.

    Raises:
        UnsupportedOperationError: the driver cannot delete.
        HiCacheError: the storage cannot be constructed or opened.
    """
    # Always the same identity: a namespace for each run would stay in the store.
    identity = StorageIdentity(
        model="hicache-bench", kv_dtype="uint8", page_size=PAGE_SIZE, layout="page_first"
    )
    storage = create_storage(candidate.driver, identity, candidate.options)
    try:
        storage.open()
        if not storage.capabilities.deletes:
            raise UnsupportedOperationError(
                f"driver {candidate.driver!r} cannot delete: its pages would stay"
            )
    except BaseException:
        storage.close()
        raise
    return storage


def run_sweep(
    candidate: Candidate,
    workloads: Sequence[BenchWorkload],
    *,
    seconds: float = 3.0,
    max_stored_bytes: int = 2 << 30,
) -> Report:
    """Measure every workload, and remove the stored pages, also after an error.

    Args:
        candidate: what is measured.
        workloads: page sizes and numbers of clients.
        seconds: time for each workload, warm-up included; the round that runs then is finished.
        max_stored_bytes: limit of the bytes of pages that are stored at a time.

    Raises:
        ValueError: a workload stores more at a time; nothing has been written.
        StorageRefusedError: the store has no room for as many pages.
        WrongAnswerError: the driver answered wrongly.
        HiCacheError: the storage cannot be constructed or opened.
    """
    largest = max(workload.stored_bytes for workload in workloads)
    if largest > max_stored_bytes:
        raise ValueError(
            f"the clients store {size_text(largest)} at a time, more than --max-stored "
            f"{size_text(max_stored_bytes)}"
        )
    verifies, measurements = True, list[Measurement]()
    for workload in workloads:
        # New keys for each workload: pages of an earlier run would be found and not written.
        with closing(ClientPool(candidate, workload, secrets.token_hex(8))) as pool:
            verifies = pool.verifies_checksums
            most = max_stored_bytes // workload.stored_bytes
            measurements += _run_workload(pool, candidate.driver, workload, seconds, most)
    about = CandidateInfo(candidate.driver, candidate.driver, redacted(candidate.options), verifies)
    return Report([about], measurements, seconds=seconds, machine=this_machine())


def _run_workload(
    pool: ClientPool, label: str, workload: BenchWorkload, seconds: float, most: int
) -> list[Measurement]:
    """Measure a workload; each client stores at most so many batches at a time."""
    started = time.monotonic()
    _run_round(pool, range(1))
    # The first round does not count: its duration, which may be 0, decides the number of batches
    # that each client stores in one of the others.
    duration = max(1e-3, time.monotonic() - started)
    count = max(1, min(most, int(seconds / (ROUNDS + 1) / duration)))
    measurements = {
        op: Measurement(label, workload.page_bytes, workload.clients, op, workload.batch_pages)
        for op in Operation
    }
    durations = {op: list[float]() for op in Operation}
    first, over = 1, False
    while not over:
        for op, sample in _run_round(pool, range(first, first + count)).items():
            measurements[op].rounds.append(sample.pages / (sample.ended - sample.started))
            durations[op] += sample.seconds
        first += count
        over = time.monotonic() - started >= seconds
    for op, measurement in measurements.items():
        measurement.set_latencies(durations[op])
    return list(measurements.values())


def _run_round(pool: ClientPool, batches: range) -> dict[Operation, CallSample]:
    """Write, look up and read batches, then remove them."""
    pool.prepare(batches)
    samples = {operation: pool.run(operation, batches) for operation in Operation}
    pool.remove()
    return samples
