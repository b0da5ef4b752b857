"""The cost of pages in shards of KV heads, against whole pages of the same bytes, taking turns.

    python benchmarks/tp_shards.py [--driver file] [-c path=DIRECTORY] [--rounds 5] [--out DIR]

A rank holds 1, 2, 4 or 8 shards of each of 128 pages. `page_head` is stored as it lies,
`page_first` through copies. The second table compares those copies with a transfer of a shard in
parts, by the length of a part. Writes results.md and results.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parent))

from checkouts import Timed
from interleaved import Results, fresh_keys, machine, table, turns

from hicache_storage import StorageIdentity, create_storage
from hicache_storage.layers.options import StorageOptions
from hicache_storage.pools import MHAHostPool
from hicache_storage.spec import HiCacheStorage, PageGeometry, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Callable

PAGES, PAGE_SIZE, HEAD_DIM = 128, 16, 128
SHARDS = (1, 2, 4, 8)
SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10}
PARTS = {"256 B": 256, "1 KiB": 1 << 10, "4 KiB": 4 << 10, "16 KiB": 16 << 10, "64 KiB": 64 << 10}
GOALS = {"64 KiB": 0.6, "256 KiB": 0.8}
EXISTS_CALLS = 10
OPERATIONS = ("set", "exists", "get")


class RowsPool:
    """A host pool whose pages have rows of two halves.

    Args:
        part: bytes of half a row.
        half: the half that is lent, each row a component; None for whole pages that tell their
            rows, from which shards are copied.
    """

    def __init__(self, part: int, half: int | None = None) -> None:
        self.part, self.half = part, half
        self.length = 2 * SIZES["256 KiB"]
        rows = self.length // (2 * part)
        self.memory = memoryview(bytearray(PAGES * self.length))
        components = (self.length,) if half is None else (part,) * rows
        heads = (2, (rows,)) if half is None else (0, ())
        self.geometry = PageGeometry(
            "rows", "uint8", PAGE_SIZE, PAGES * PAGE_SIZE, components, *heads
        )

    def page_buffers(self, first_slots: list[int]) -> list[list[memoryview]]:
        memory, part = self.memory, self.part
        starts = [slot // PAGE_SIZE * self.length for slot in first_slots]
        if self.half is None:
            return [[memory[start : start + self.length]] for start in starts]
        return [
            [
                memory[at : at + part]
                for at in range(start + self.half * part, start + self.length, 2 * part)
            ]
            for start in starts
        ]


@dataclass
class Candidate:
    """A storage with its pools."""

    name: str
    storage: HiCacheStorage
    pools: tuple[str, ...]

    def move(self, keys: list[str], *, writes: bool) -> bool:
        slots = torch.arange(PAGES * PAGE_SIZE)
        transfers = [PoolTransfer(pool, slots, keys=keys) for pool in self.pools]
        call = self.storage.batch_set_v2 if writes else self.storage.batch_get_v2
        return all(map(all, call(transfers).values()))

    def exists(self, keys: list[str]) -> int:
        return self.storage.batch_exists_v2(keys).kv_hit_pages


class Bench:
    """Opens candidates over one store, and lets them take turns."""

    def __init__(self, driver: str, config: dict[str, str], rounds: int) -> None:
        self.driver, self.config, self.rounds = driver, config, rounds
        self.results = Results()
        self.cpu = Results()
        """The same in seconds of the processor, which others on the machine disturb less."""

    def open(self, name: str, *pools: object, **identity: object) -> Candidate:
        fields = {"model": "bench", "kv_dtype": "bfloat16", "page_size": PAGE_SIZE}
        layout = pools[0].geometry.layout
        storage = create_storage(
            self.driver,
            StorageIdentity(**fields, layout=layout, salt=name, **identity),
            self.config,
            options=StorageOptions(deadline_seconds=None),
        )
        names = ("kv", "draft")[: len(pools)]
        for pool, pool_name in zip(pools, names, strict=True):
            storage.register_mem_host_pool_v2(pool, pool_name)
        storage.open()
        return Candidate(name, storage, names)

    def run(self, subject: str, candidates: list[Candidate]) -> None:
        for candidate in candidates:
            keys = fresh_keys(PAGES)
            candidate.move(keys, writes=True)
            candidate.move(keys, writes=False)
        for candidate in turns(candidates, self.rounds):
            keys, who = fresh_keys(PAGES), candidate.name
            measure = partial(self._time, subject)
            measure("set", who, partial(candidate.move, keys, writes=True))
            for _ in range(EXISTS_CALLS):
                measure("exists", who, partial(candidate.exists, keys), expect=PAGES)
            for _ in range(2):
                measure("get", who, partial(candidate.move, keys, writes=False))
            candidate.storage.clear()
        for candidate in candidates:
            candidate.storage.close()

    def _time(
        self,
        subject: str,
        operation: str,
        who: str,
        action: Callable[[], object],
        *,
        expect: object = True,
    ) -> None:
        cpu, started = time.process_time(), time.perf_counter()
        answer = action()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        for results, took in ((self.results, seconds), (self.cpu, cpu)):
            results.time(subject, operation, who, partial(Timed, answer, took, cpu), expect=expect)


def kv_pool(shard_bytes: int, shards: int, layout: str) -> MHAHostPool:
    return MHAHostPool(
        size=PAGES * PAGE_SIZE,
        page_size=PAGE_SIZE,
        layer_num=shard_bytes // (2 * PAGE_SIZE * HEAD_DIM * 2),
        head_num=shards,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        layout=layout,
        pin_memory=False,
    )


def measure_shards(bench: Bench) -> list[list[str]]:
    rows = list[list[str]]()
    for size, shard_bytes in SIZES.items():
        for shards in SHARDS:
            subject = f"{shards} x {size}"
            lying, copied = (
                kv_pool(shard_bytes, shards, layout) for layout in ("page_head", "page_first")
            )
            bench.run(
                subject,
                [
                    bench.open("whole", lying),
                    bench.open("shards", lying, store_tp_size=shards),
                    bench.open("copied shards", copied, store_tp_size=shards),
                ],
            )
            for operation in OPERATIONS:
                samples = bench.results.samples[subject, operation]
                rate = samples.ratio("shards", "whole")
                cpu = bench.cpu.samples[subject, operation]
                rows.append(
                    [
                        size,
                        str(shards),
                        operation,
                        f"{samples.median('whole') * 1000:.2f} ms",
                        f"{rate:.2f}",
                        f"{samples.best_ratio('shards', 'whole'):.2f}",
                        f"{cpu.ratio('shards', 'whole'):.2f}",
                        f"{samples.ratio('copied shards', 'whole'):.2f}",
                        "yes" if rate >= GOALS[size] else "no",
                    ]
                )
                print(" | ".join(rows[-1]), flush=True)
    return rows


def measure_parts(bench: Bench) -> list[list[str]]:
    rows = list[list[str]]()
    for name, part in PARTS.items():
        subject = f"parts of {name}"
        bench.run(
            subject,
            [
                bench.open("copied", RowsPool(part), store_tp_size=2),
                bench.open("in parts", RowsPool(part, 0), RowsPool(part, 1)),
            ],
        )
        rows.append(
            [name]
            + [
                f"{bench.results.samples[subject, operation].ratio('in parts', 'copied'):.2f}"
                for operation in ("set", "get")
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--driver", default="file")
    parser.add_argument("-c", dest="config", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out/tp_shards"))
    arguments = parser.parse_args()
    config = dict(option.split("=", 1) for option in arguments.config)
    home = tempfile.mkdtemp(prefix="tp-shards-")
    if arguments.driver in ("file", "hf3fs"):
        config.setdefault("path", home)
    try:
        bench = Bench(arguments.driver, config, arguments.rounds)
        shards, parts = measure_shards(bench), measure_parts(bench)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    header = (
        "shard",
        "shards a rank",
        "operation",
        "whole pages",
        "rate of shards",
        "of the best runs",
        "by CPU seconds",
        "rate of copied shards",
        "at least the goal",
    )
    text = (
        table(header, shards)
        + "\n"
        + table(("part", "set in parts: rate of copies", "get in parts: rate of copies"), parts)
    )
    (arguments.out / "results.md").write_text(text)
    samples = {
        f"{subject}/{operation}": timed.seconds
        for (subject, operation), timed in bench.results.samples.items()
    }
    (arguments.out / "results.json").write_text(
        json.dumps(
            {
                "machine": machine(),
                "driver": arguments.driver,
                "goals": GOALS,
                "shards": [dict(zip(header, row, strict=True)) for row in shards],
                "parts": parts,
                "seconds": samples,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
