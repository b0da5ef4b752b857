"""Growth of the file driver's costs with the pages of a store.

    python benchmarks/file_scale.py [--path DIRECTORY] [--pages 10000 100000 1000000] [--out DIR]

Each store is opened by processes that have not seen it, with its index in the page cache and after
it was dropped from there; the memory is that of the process that opened it. Writes results.md and
results.json.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

from interleaved import HERE, Process, Run, drop_from_page_cache, serve_side, table

from hicache_storage import PoolTransfer, StorageIdentity, create_storage
from hicache_storage.pools import AttentionGeometry, PagedHostPool

BATCH_PAGES = 128
EXISTS_CALLS = 200
OPENING_CALLS = 10
"""Most calls until a process has read the index of a store."""
INDEXES = ("cached", "cold")
FIGURES = ("open and first exists, ms", "exists of 128 keys, us", "memory a page, B")


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
        identity = StorageIdentity(
            model="benchmark", kv_dtype="bfloat16", page_size=1, layout="page_first"
        )
        options = {"path": str(path), "capacity": "1TiB"}
        self.storage = create_storage("file", identity, options)
        self.storage.register_mem_host_pool_v2(self.pool, "kv")

    def fill(self, pages: int) -> None:
        """Store pages, in whole batches.

        Raises:
            AssertionError: a page was not stored.
        """
        for batch in range(-(-pages // BATCH_PAGES)):
            transfer = PoolTransfer("kv", torch.arange(BATCH_PAGES), keys=_keys(batch))
            if not all(self.storage.batch_set_v2([transfer])["kv"]):
                raise AssertionError(f"batch {batch} was not stored")

    def look_up(self, pages: int) -> tuple[float, float, float]:
        """Open the store of so many pages and look them up; values of `FIGURES`.

        Raises:
            AssertionError: a page is not found.
        """
        draw, before, batches = random.Random(os.getpid()), _resident_bytes(), pages // BATCH_PAGES
        started = time.perf_counter()
        self.storage.open()
        answers, seconds = [self._first_hits(batches - 1)], list[float]()
        opened = time.perf_counter() - started
        for _ in range(EXISTS_CALLS):
            keys = _keys(draw.randrange(batches))
            started = time.perf_counter()
            answers.append(self.storage.batch_exists_v2(keys).kv_hit_pages)
            seconds.append(time.perf_counter() - started)
        if answers != [BATCH_PAGES] * len(answers):
            raise AssertionError(f"a store of {pages} pages lacks some")
        memory = _resident_bytes() - before
        return 1e3 * opened, 1e6 * statistics.median(seconds), memory / pages

    def _first_hits(self, batch: int) -> int:
        """Ask until the index is read, and return the hits.

        The index of millions of pages may take longer than a call may; each call goes on where the
        last one has ended.
        """
        asked = (
            self.storage.batch_exists_v2(_keys(batch)).kv_hit_pages for _ in range(OPENING_CALLS)
        )
        return next(filter(None, asked), 0)

    def close(self) -> None:
        self.storage.close()


def serve(descriptor: int) -> None:
    """Be a user until it is closed."""
    serve_side(descriptor, User)


def measure(run: Run, path: Path, page_bytes: int, pages: int, rounds: int) -> None:
    """Open a store in fresh processes, with its index cached and cold in turns."""
    for index in INDEXES * rounds:
        if index == "cold":
            drop_from_page_cache(list(path.rglob("*.bundle")))
        process = Process("file", Path(sys.executable), "file_scale", HERE, path, page_bytes)
        process.wait_until_up()
        found = process.ask("look_up", pages).answer
        process.close()
        assert isinstance(found, tuple)
        for name, value in zip(FIGURES, found, strict=True):
            run.note(_figure(name, pages, index), value)


def _figure(name: str, pages: int, index: str) -> str:
    return f"{name}: {pages:,} pages, index {index}"


def _keys(batch: int) -> list[str]:
    """Keys as long as an engine's; one digest for all, which would take longer than their lookup."""
    digest = hashlib.sha256(f"{batch}".encode()).hexdigest()[:56]
    return [f"{digest}{page:08x}" for page in range(BATCH_PAGES)]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(run: Run, counts: list[int]) -> str:
    """A table of the medians, each with the least and the most."""
    rows = list[list[str]]()
    for pages in counts:
        for index in INDEXES:
            figures = [run.report.figures[_figure(name, pages, index)] for name in FIGURES]
            cells = [f"{statistics.median(f):.0f} ({min(f):.0f} - {max(f):.0f})" for f in figures]
            rows.append([f"{pages:,}", index, *cells])
    return table(["pages", "index", *FIGURES], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path(), help="where to make the stores")
    parser.add_argument("--out", type=Path, default=Path("out/file-scale"))
    parser.add_argument("--pages", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--page-bytes", type=int, default=1024, help="a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if min(options.pages) < BATCH_PAGES or options.page_bytes % 4:
        parser.error(f"--pages are {BATCH_PAGES} at least, --page-bytes a multiple of 4")
    options.path.mkdir(parents=True, exist_ok=True)
    run, counts = Run(), sorted(options.pages)
    for pages in counts:
        with tempfile.TemporaryDirectory(prefix="file-scale-", dir=options.path) as directory:
            path = Path(directory).resolve()
            user = User(path, options.page_bytes)
            user.fill(pages)
            user.close()
            measure(run, path, options.page_bytes, pages, options.rounds)
    text = report(run, counts)
    run.save(options.out, text)
    run.show(text)


if __name__ == "__main__":
    main()
