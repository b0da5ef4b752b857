"""One caller: its pages, its keys, its calls."""

from __future__ import annotations

import hashlib
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hicache_storage.spec import PoolName, PoolTransfer
from hicache_storage.tools.bench.settings import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.pools import MHAHostPool
    from hicache_storage.spec import HiCacheStorage
    from hicache_storage.tools.bench.settings import Cell

PAGE_SIZE: Final = 64
"""Tokens in a page; only its bytes matter here."""
LOOKUPS: Final = 10
"""How often each batch is looked up: one lookup is too short to be measured well."""
STAMP: Final = struct.Struct("<qq")


class WrongAnswerError(Exception):
    """A page was not stored, not found, not delivered, or came with other bytes: what was measured is no result."""


@dataclass(slots=True)
class Burst:
    """Calls of one kind, one after the other. Times are those of `time.perf_counter()`, the same in all processes."""

    started: float
    ended: float
    seconds: list[float] = field(default_factory=list[float])
    """Of each call."""
    pages: int = 0

    @classmethod
    def joined(cls, bursts: Sequence[Burst]) -> Burst:
        """The bursts of several lanes at the same time, as one."""
        return cls(
            min(burst.started for burst in bursts),
            max(burst.ended for burst in bursts),
            [seconds for burst in bursts for seconds in burst.seconds],
            sum(burst.pages for burst in bursts),
        )


def make_pool(cell: Cell, lanes: int) -> MHAHostPool:
    """A host pool for so many lanes, filled, so that no call pays for the first touch of its memory.

    Raises:
        InvalidPoolError: there is not that much memory.
    """
    import torch

    from hicache_storage.pools import MHAHostPool

    pool = MHAHostPool(
        size=2 * lanes * cell.batch_pages * PAGE_SIZE, page_size=PAGE_SIZE, layer_num=1, head_num=1,
        head_dim=cell.page_bytes // (2 * PAGE_SIZE), dtype=torch.uint8,
    )  # fmt: skip
    for buffer in pool.buffers:
        # Eight bytes at a time: random bytes one by one take longer than the benchmark.
        buffer.view(-1).view(torch.int64).random_()
    return pool


class Lane:
    """Writes from its first `batch_pages` pages of the pool and reads into the second.

    Args:
        run: distinguishes the keys of this run from those of all others.
        number: of the lane; distinguishes its keys from the other lanes'.
        place: which share of the pool is the lane's.
    """

    def __init__(self, storage: HiCacheStorage, pool: MHAHostPool, cell: Cell, *, run: str, number: int, place: int) -> None:
        self._storage, self._pool = storage, pool
        self._run, self._number, self._pages = run, number, cell.batch_pages
        start = 2 * place * cell.batch_pages * PAGE_SIZE
        self._source = range(start, start + cell.batch_pages * PAGE_SIZE)
        self._target = range(self._source.stop, self._source.stop + cell.batch_pages * PAGE_SIZE)
        self._keys = dict[int, list[str]]()

    def prepare(self, batches: range) -> None:
        """Make the keys of batches that are to be written."""
        for batch in batches:
            self._keys[batch] = [self._key(batch, page) for page in range(self._pages)]

    def run(self, operation: Operation, batches: range) -> Burst:
        """Make one kind of call for each batch.

        Raises:
            WrongAnswerError: an answer is not what it has to be.
        """
        calls = {Operation.WRITE: self._write, Operation.EXISTS: self._exists, Operation.READ: self._read}
        repeats = LOOKUPS if operation is Operation.EXISTS else 1
        burst = Burst(time.perf_counter(), 0.0)
        for batch in batches:
            if operation is Operation.WRITE:
                self._stamp(batch)
            for _ in range(repeats):
                burst.seconds.append(calls[operation](batch))
        burst.ended = time.perf_counter()
        burst.pages = len(burst.seconds) * self._pages
        if operation is Operation.READ and batches:
            self._verify(batches[-1])
        return burst

    def remove(self) -> None:
        """Delete what has been written, where the driver can."""
        if self._storage.capabilities.deletes:
            for keys in self._keys.values():
                self._storage.delete(keys)
        self._keys.clear()

    def _write(self, batch: int) -> float:
        transfer = PoolTransfer(PoolName.KV, _indices(self._source), keys=self._keys[batch])
        started = time.perf_counter()
        answer = self._storage.batch_set_v2([transfer])
        seconds = time.perf_counter() - started
        self._expect_all("set", answer[PoolName.KV])
        return seconds

    def _read(self, batch: int) -> float:
        transfer = PoolTransfer(PoolName.KV, _indices(self._target), keys=self._keys[batch])
        started = time.perf_counter()
        answer = self._storage.batch_get_v2([transfer])
        seconds = time.perf_counter() - started
        self._expect_all("get", answer[PoolName.KV])
        return seconds

    def _exists(self, batch: int) -> float:
        started = time.perf_counter()
        found = self._storage.batch_exists_v2(self._keys[batch]).kv_hit_pages
        seconds = time.perf_counter() - started
        if found != self._pages:
            raise WrongAnswerError(f"{self._pages} pages were stored, and exists finds {found}")
        return seconds

    def _expect_all(self, call: str, answer: list[bool]) -> None:
        if answer != [True] * self._pages:
            raise WrongAnswerError(f"a {call} of {self._pages} pages answered False for {answer.count(False)} of them")

    def _stamp(self, batch: int) -> None:
        """Make the source pages those of a batch: their first bytes say which."""
        import torch

        stamp = torch.frombuffer(bytearray(STAMP.pack(self._number, batch)), dtype=torch.uint8)
        for buffer in (self._pool.k_buffer, self._pool.v_buffer):
            buffer[self._source.start : self._source.stop : PAGE_SIZE, 0, 0, : STAMP.size] = stamp

    def _verify(self, batch: int) -> None:
        """Compare every byte of the batch that was read last."""
        import torch

        self._stamp(batch)
        for buffer in (self._pool.k_buffer, self._pool.v_buffer):
            sent, came = (buffer[span.start : span.stop] for span in (self._source, self._target))
            if not torch.equal(sent, came):
                raise WrongAnswerError("a get answered True and delivered other bytes than were stored")

    def _key(self, batch: int, page: int) -> str:
        return hashlib.sha256(f"{self._run}/{self._number}/{batch}/{page}".encode()).hexdigest()


def _indices(slots: range) -> torch.Tensor:
    import torch

    return torch.arange(slots.start, slots.stop)
