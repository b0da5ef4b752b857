"""Growth of the file driver's costs: with the pages of a store, and with the processes that use it.

    python benchmarks/file_scale.py [--path DIRECTORY] [--pages 10000 100000 1000000] [--out DIR]

Growth: each store is opened by processes that have not seen it, with its index in the page cache
and after it was dropped from there; the memory is that of the process that opened it. Sharing:
processes on the largest store take turns at sets of new pages and gets of pages that are there.
What a get delivers is compared with what was stored. Writes results.md and results.json.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

from interleaved import Run, drop_from_page_cache, table

from hicache_storage import PoolTransfer, StorageIdentity, create_storage
from hicache_storage.pools import AttentionGeometry, PagedHostPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from hicache_storage import HiCacheStorage

BATCH_PAGES = 128
PROCESSES = (1, 2, 4, 8)
EXISTS_CALLS = 200
OPENING_CALLS = 10
"""Most calls until a process has read the index of a store."""
STORED, NEW = "stored", "new"
"""Prefixes of keys: of the pages that a store begins with, and of those that processes add."""
INDEXES = ("cached", "cold")
OPENING, LOOKUP, MEMORY = "open and first exists, ms", "exists of 128 keys, us", "memory a page, B"
SHARED = "set and get"
_spawn = multiprocessing.get_context("spawn")


class User:
    """A storage on the store, with a host pool of one batch."""

    def __init__(self, path: Path, page_bytes: int) -> None:
        self.pool = PagedHostPool(
            AttentionGeometry(
                layers=range(1), head_num=1, head_dim=page_bytes // 4, dtype=torch.bfloat16
            ),
            size=BATCH_PAGES,
            page_size=1,
            layout="page_first",
        )
        # Of several processes the threads of each would wait for a core, and spin meanwhile.
        torch.set_num_threads(1)
        self.indices = torch.arange(BATCH_PAGES)
        self.memory = [buffer.view(torch.uint8) for buffer in self.pool.buffers]
        self.storage: HiCacheStorage = create_storage(
            "file",
            StorageIdentity(
                model="benchmark", kv_dtype="bfloat16", page_size=1, layout="page_first"
            ),
            {"path": str(path), "capacity": "1TiB"},
        )
        self.storage.register_mem_host_pool_v2(self.pool, "kv")

    def set(self, prefix: str, batch: int) -> None:
        """Store a batch of pages whose bytes follow from its number.

        Raises:
            AssertionError: a page was not stored.
        """
        for memory in self.memory:
            memory.fill_(batch % 251)
        transfer = PoolTransfer("kv", self.indices, keys=_keys(prefix, batch))
        if not all(self.storage.batch_set_v2([transfer])["kv"]):
            raise AssertionError(f"batch {prefix}{batch} was not stored")

    def get(self, prefix: str, batch: int) -> None:
        """Read a batch and compare its bytes.

        Raises:
            AssertionError: a page was not delivered, or has other bytes.
        """
        transfer = PoolTransfer("kv", self.indices, keys=_keys(prefix, batch))
        if not all(self.storage.batch_get_v2([transfer])["kv"]):
            raise AssertionError(f"batch {prefix}{batch} was not delivered")
        if not all(bool((memory == batch % 251).all()) for memory in self.memory):
            raise AssertionError(f"batch {prefix}{batch} has other bytes")


def fill(path: Path, page_bytes: int, pages: int) -> None:
    """Store pages, in whole batches."""
    user = User(path, page_bytes)
    with closing(user.storage):
        for batch in range(-(-pages // BATCH_PAGES)):
            user.set(STORED, batch)


def measure_growth(run: Run, path: Path, page_bytes: int, pages: int, rounds: int) -> None:
    """Open a store in fresh processes, with its index cached and cold in turns."""
    for _ in range(rounds):
        for index in INDEXES:
            if index == "cold":
                drop_from_page_cache(list(path.rglob("*.bundle")))
            opened, exists, memory = _in_process(_open, path, page_bytes, pages)
            for name, value in (
                (OPENING, 1e3 * opened),
                (LOOKUP, 1e6 * exists),
                (MEMORY, memory / pages),
            ):
                run.note(_figure(name, pages, index), value)


def measure_sharing(
    run: Run, path: Path, page_bytes: int, pages: int, processes: int, seconds: float, turn: int
) -> None:
    """Let processes set and get in turns, for a while that begins when all are open."""
    pipes, started = list["Connection"](), list["BaseProcess"]()
    for number in range(processes):
        ours, theirs = _spawn.Pipe()
        first = (turn * max(PROCESSES) + number) << 20
        process = _spawn.Process(
            target=_use, args=(theirs, path, page_bytes, pages // BATCH_PAGES, seconds, first)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        started.append(process)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send(None)
    parts = [pipe.recv() for pipe in pipes]
    for process in started:
        process.join()
    moved = sum(count for _, count, _ in parts)
    one = run.of("file", (page_bytes, processes, BATCH_PAGES, SHARED))
    # Of a call of each process.
    share = processes * BATCH_PAGES / moved
    one.add(share * max(took for took, _, _ in parts), share * sum(cpu for *_, cpu in parts))


def _figure(name: str, pages: int, index: str) -> str:
    return f"{name}: {pages:,} pages, index {index}"


def _keys(prefix: str, batch: int) -> list[str]:
    """Keys as long as an engine's; one digest for all, which would take longer than their lookup."""
    digest = hashlib.sha256(f"{prefix}{batch}".encode()).hexdigest()[:56]
    return [f"{digest}{page:08x}" for page in range(BATCH_PAGES)]


def _in_process(target: Callable[..., None], *arguments: object) -> tuple[float, ...]:
    """Run a function in a fresh process; return what it sends.

    Raises:
        EOFError: it ended before.
    """
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        answer: tuple[float, ...] = ours.recv()
        return answer
    finally:
        process.join()


def _open(pipe: Connection, path: Path, page_bytes: int, pages: int) -> None:
    user, batches = User(path, page_bytes), range(pages // BATCH_PAGES)
    draw, before = random.Random(os.getpid()), _resident_bytes()
    with closing(user.storage) as storage:
        started = time.perf_counter()
        storage.open()
        answers, seconds = [_first_hits(storage, _keys(STORED, batches[-1]))], list[float]()
        opened = time.perf_counter() - started
        for _ in range(EXISTS_CALLS):
            keys = _keys(STORED, draw.choice(batches))
            started = time.perf_counter()
            answers.append(storage.batch_exists_v2(keys).kv_hit_pages)
            seconds.append(time.perf_counter() - started)
        if answers != [BATCH_PAGES] * len(answers):
            raise AssertionError(f"a store of {pages} pages lacks some")
        pipe.send((opened, statistics.median(seconds), _resident_bytes() - before))


def _first_hits(storage: HiCacheStorage, keys: list[str]) -> int:
    """Ask until the index is read, and return the hits.

    The index of millions of pages may take longer than a call may; each call goes on where the last
    one has ended.
    """
    for _ in range(OPENING_CALLS - 1):
        if hits := storage.batch_exists_v2(keys).kv_hit_pages:
            return hits
    return storage.batch_exists_v2(keys).kv_hit_pages


def _use(
    pipe: Connection, path: Path, page_bytes: int, batches: int, seconds: float, first: int
) -> None:
    """Set a new batch, get one that is there, and so on; the first numbers are this process'."""
    user, draw = User(path, page_bytes), random.Random(first)
    with closing(user.storage):
        _first_hits(user.storage, _keys(STORED, 0))
        user.get(STORED, 0)
        pipe.send(None)
        pipe.recv()
        cpu, started, calls = time.process_time(), time.perf_counter(), 0
        while (took := time.perf_counter() - started) < seconds:
            user.set(NEW, first + calls)
            user.get(STORED, draw.randrange(batches))
            calls += 1
        pipe.send((took, 2 * calls * BATCH_PAGES, time.process_time() - cpu))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(run: Run, page_bytes: int, counts: Sequence[int]) -> str:
    """A table of each."""
    rows = [
        [
            f"{pages:,}",
            index,
            *(
                _spread(run.report.figures[_figure(name, pages, index)])
                for name in (OPENING, LOOKUP, MEMORY)
            ),
        ]
        for pages in counts
        for index in INDEXES
    ]
    text = table(["pages", "index", OPENING, LOOKUP, MEMORY], rows)
    shared = [run.of("file", (page_bytes, count, BATCH_PAGES, SHARED)) for count in PROCESSES]
    rows = [
        [
            str(one.clients),
            _spread(one.rounds),
            f"{one.pages_per_second / shared[0].pages_per_second:.2f}x",
            f"{statistics.median(one.cpu_us):.1f}",
        ]
        for one in shared
    ]
    header = ["processes", "pages/s", "of one process", "CPU us a page"]
    return f"{text}\n{table(header, rows)}"


def _spread(values: Sequence[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.0f} ({low:.0f} - {high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path(), help="where to make the stores")
    parser.add_argument("--out", type=Path, default=Path("out/file-scale"))
    parser.add_argument("--pages", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--page-bytes", type=int, default=1024, help="a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of sets and gets")
    options = parser.parse_args()
    if min(options.pages) < BATCH_PAGES or options.page_bytes % 4:
        parser.error(f"--pages are {BATCH_PAGES} at least, --page-bytes a multiple of 4")
    options.path.mkdir(parents=True, exist_ok=True)
    run, counts = Run(), sorted(options.pages)
    for pages in counts:
        with tempfile.TemporaryDirectory(prefix="file-scale-", dir=options.path) as directory:
            path, length = Path(directory), options.page_bytes
            fill(path, length, pages)
            measure_growth(run, path, length, pages, options.rounds)
            if pages != counts[-1]:
                continue
            for turn in range(options.rounds):
                for count in PROCESSES:
                    measure_sharing(run, path, length, pages, count, options.seconds, turn)
    text = report(run, options.page_bytes, counts)
    run.save(options.out, text)
    run.show(text)


if __name__ == "__main__":
    main()
