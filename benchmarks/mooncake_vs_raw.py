"""The Mooncake driver, verification on, against the library itself on the same cluster, taking
turns.

    python benchmarks/mooncake_vs_raw.py [--sglang] [--clusters 10]

The raw library is called by `batch_put_from`, `batch_get_into` and `batch_is_exist`; `--sglang` adds
SGLang's MooncakeStore, in an environment that has it.

Starts a cluster on loopback. Raw objects are one contiguous page; ours are K, V and an envelope.
"""

from __future__ import annotations

import argparse
import gc
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from interleaved import (
    Run,
    awake_cores,
    fresh_keys,
    ratio,
    size_of,
    table,
    turns,
    wait_for_quiet,
)

from examples.mooncake_cluster import DevCluster
from hicache_backends.mooncake.client import library
from hicache_storage import PoolTransfer, StorageIdentity, create_storage
from hicache_storage.pools import AttentionGeometry, PagedHostPool
from hicache_storage.pools.memory import host_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

OURS, RAW, PEER = "hicache mooncake", "raw library", "SGLang MooncakeStore"
PAGE_TOKENS = 64
BATCH = {64 << 10: 128, 1 << 20: 64}
"""Pages of a call, by their length."""
EXISTS_CALLS = 10
PATIENCE_SECONDS = 2.0
"""Limit of the wait for a quiet machine before each measurement."""
GOALS = {
    (1 << 20, "put", RAW): 0.85,
    (1 << 20, "get", RAW): 0.85,
    (1 << 20, "put", PEER): 1.0,
    (1 << 20, "get", PEER): 0.85,
}


class Candidate(Protocol):
    """One of those who are compared."""

    name: str

    def put(self, keys: list[str]) -> bool: ...
    def get(self, keys: list[str]) -> bool: ...
    def exists(self, keys: list[str]) -> int: ...
    def remove(self, keys: list[str]) -> None: ...
    def close(self) -> None: ...


class Ours:
    """The driver through the whole stack: metrics, deadline, circuit breaker, v2 calls."""

    name = OURS

    def __init__(self, cluster: DevCluster, page_bytes: int) -> None:
        pages = BATCH[page_bytes]
        self.pool = PagedHostPool(
            AttentionGeometry(
                layers=range(page_bytes // (2 * PAGE_TOKENS * 128 * 2)),
                head_num=1,
                head_dim=128,
                dtype=torch.bfloat16,
            ),
            size=pages * PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            pin_memory=False,
        )
        for buffer in self.pool.parts:
            buffer.view(torch.uint8).random_(0, 256)
        identity = StorageIdentity(
            model="benchmark", kv_dtype="bfloat16", page_size=PAGE_TOKENS, layout="page_first"
        )
        self.storage = create_storage("mooncake", identity, cluster.options)
        self.storage.register_mem_host_pool_v2(self.pool, "kv")
        self.storage.open()
        self.slots = torch.arange(pages * PAGE_TOKENS)

    def put(self, keys: list[str]) -> bool:
        return all(self.storage.batch_set_v2([PoolTransfer("kv", self.slots, keys=keys)])["kv"])

    def get(self, keys: list[str]) -> bool:
        return all(self.storage.batch_get_v2([PoolTransfer("kv", self.slots, keys=keys)])["kv"])

    def exists(self, keys: list[str]) -> int:
        return self.storage.batch_exists_v2(keys).kv_hit_pages

    def remove(self, keys: list[str]) -> None:
        self.storage.clear()

    def close(self) -> None:
        self.storage.close()


class Raw:
    """The library, called as its documentation says: contiguous pages in registered memory, one
    object each."""

    name = RAW

    def __init__(self, cluster: DevCluster, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        # Beginning on a page, as pools of engines do: into memory that begins 64 bytes after one,
        # as torch's does, gets take longer.
        self.memory = host_tensor(
            (BATCH[page_bytes] * page_bytes,), torch.uint8, pin_memory=False
        ).random_(0, 256)
        self.store = library.new_store()
        assert not self.store.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", cluster.address, tenant_id="default"
        )
        assert not self.store.register_buffer(self.memory.data_ptr(), self.memory.numel())
        # Calls that the driver does not make are not in its description of the library.
        self.calls: Any = self.store

    def _places(self, keys: Sequence[str]) -> tuple[list[int], list[int]]:
        start = self.memory.data_ptr()
        return [start + page * self.page_bytes for page in range(len(keys))], [
            self.page_bytes
        ] * len(keys)

    def put(self, keys: list[str]) -> bool:
        return not any(self.calls.batch_put_from(keys, *self._places(keys)))

    def get(self, keys: list[str]) -> bool:
        return self.calls.batch_get_into(keys, *self._places(keys)) == [self.page_bytes] * len(keys)

    def exists(self, keys: list[str]) -> int:
        return sum(self.calls.batch_is_exist(keys))

    def remove(self, keys: list[str]) -> None:
        self.calls.batch_remove(keys, True)

    def close(self) -> None:
        self.store.close()


def sglangs(cluster: DevCluster, page_bytes: int) -> Candidate:
    """SGLang's driver on its own host pool, called as its cache controller calls it."""
    from field_sglang import host_pool, storage_config
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    pool = host_pool(page_bytes, pages=BATCH[page_bytes])
    extra = {
        "master_server_address": cluster.address,
        "local_hostname": "127.0.0.1",
        "global_segment_size": 0,
        "protocol": "tcp",
    }
    config = storage_config(**extra, metadata_server="P2PHANDSHAKE")
    storage = MooncakeStore(config, pool)
    storage.register_mem_pool_host(pool)
    indices = torch.arange(BATCH[page_bytes] * PAGE_TOKENS)

    class Peer:
        name = PEER

        def put(self, keys: list[str]) -> bool:
            return all(storage.batch_set_v1(keys, indices))

        def get(self, keys: list[str]) -> bool:
            return all(storage.batch_get_v1(keys, indices))

        def exists(self, keys: list[str]) -> int:
            return storage.batch_exists(keys)

        def remove(self, keys: list[str]) -> None:
            storage.store.remove_by_regex("^benchmark.*", True)

        def close(self) -> None:
            """Its end is left to the end of the process, as the engine does."""

    return Peer()


def measure(run: Run, page_bytes: int, candidates: Sequence[Candidate], rounds: int) -> None:
    """Put, look up and get a batch, each candidate in its turn; then remove it, so that nothing is
    evicted."""
    # Clients of an earlier cluster end here. Puts of ours, which make more garbage, were seen to
    # stand still for 0.2 to 1 s without this.
    gc.collect()
    pages = BATCH[page_bytes]
    for candidate in candidates:
        keys = fresh_keys(pages)
        candidate.put(keys)
        candidate.get(keys)
        candidate.remove(keys)
    for candidate in turns(candidates, rounds):
        keys = fresh_keys(pages)
        spent = partial(run.time, candidate.name)
        wait_for_quiet(PATIENCE_SECONDS)
        spent((page_bytes, 1, pages, "put"), partial(candidate.put, keys))
        lookup = (page_bytes, 1, pages, "exists")
        for _ in range(EXISTS_CALLS):
            spent(lookup, partial(candidate.exists, keys), expect=pages)
        spent((page_bytes, 1, pages, "get"), partial(candidate.get, keys))
        candidate.remove(keys)


def report(run: Run) -> str:
    """Medians with minimum and maximum in milliseconds a batch, and ratios of medians and of the
    fastest."""
    rows = list[list[str]]()
    for one in run.report.measurements:
        ratios, ours = ["", "", ""], run.find(OURS, one.workload)
        if one.label in (RAW, PEER):
            goal = GOALS.get((one.page_bytes, one.operation, one.label))
            ratios = [ratio(ours, one), ratio(ours, one, best=True), f"{goal:g}x" if goal else ""]
        rates = (one.pages_per_second, max(one.rounds), min(one.rounds))
        times = [f"{1000 * one.batch_pages / rate:.2f}" for rate in rates]
        rows.append([size_of(one.page_bytes), one.operation, one.label, *times, *ratios])
    header = ["page", "operation", "who", "median ms", "min", "max", "ours is faster by"]
    return table([*header, "fastest runs", "goal"], rows)


def measure_cluster(run: Run, arguments: argparse.Namespace) -> None:
    """Measure on a cluster of its own, with new clients: one differs from another that is set up
    alike, for as long as it lives."""
    with DevCluster(1, 512 << 20) as cluster:
        for page_bytes in BATCH:
            candidates: list[Candidate] = [
                Ours(cluster, page_bytes),
                Raw(cluster, page_bytes),
            ]
            if arguments.sglang:
                candidates.append(sglangs(cluster, page_bytes))
            measure(run, page_bytes, candidates, arguments.rounds)
            for candidate in candidates:
                candidate.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="on each cluster")
    parser.add_argument(
        "--clusters",
        type=int,
        default=1,
        help="that are started one after the other, each with clients of its own",
    )
    parser.add_argument("--sglang", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/mooncake"))
    arguments = parser.parse_args()
    run = Run()
    with awake_cores():
        for _ in range(arguments.clusters):
            measure_cluster(run, arguments)
            run.save(arguments.out, report(run))
    run.show(report(run))


if __name__ == "__main__":
    main()
