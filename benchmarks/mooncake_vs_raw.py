"""The Mooncake driver, verification on, against the library itself on the same cluster, taking
turns.

    python benchmarks/mooncake_vs_raw.py [--sglang] [--clusters 10]
    python benchmarks/mooncake_vs_raw.py [--sglang] --profile

The raw library is called by `batch_put_from`, `batch_get_into` and `batch_is_exist`; `--sglang` adds
SGLang's MooncakeStore, in an environment that has it. `--profile` says where the time goes.

Starts a cluster on loopback. Raw objects are one contiguous page; ours are K, V and an envelope.
Over TCP our gets go through buffers, so that they end at their deadline; `hung_reads wait` reads
straight into the host pool, as over RDMA.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from interleaved import Results, awake_cores, fresh_keys, machine, table, turns, wait_for_quiet

from examples.mooncake_cluster import DevCluster, Process
from hicache_backends.mooncake import reader
from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.writer import PageWriter
from hicache_storage import PoolTransfer, StorageIdentity, create_storage
from hicache_storage.pools import MHAHostPool
from hicache_storage.pools.memory import host_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OURS, WAIT, RAW, PEER = (
    "hicache mooncake",
    "hicache mooncake, hung_reads wait",
    "raw library",
    "SGLang MooncakeStore",
)
PAGE_TOKENS = 64
# Layers and heads that make a page of so many bytes, with a head dimension of 128 in bfloat16.
SHAPES = {"64 KiB": (2, 1), "1 MiB": (16, 2)}
BATCH = {"64 KiB": 128, "1 MiB": 64}
EXISTS_CALLS = 10
GOALS = {
    ("1 MiB", "put", RAW): 0.85,
    ("1 MiB", "get", RAW): 0.85,
    ("1 MiB", "put", PEER): 1.0,
    ("1 MiB", "get", PEER): 0.85,
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

    def __init__(
        self, cluster: DevCluster, subject: str, name: str = OURS, **options: object
    ) -> None:
        self.name = name
        (layers, heads), pages = SHAPES[subject], BATCH[subject]
        self.pool = MHAHostPool(
            size=pages * PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            layer_num=layers,
            head_num=heads,
            head_dim=128,
            dtype=torch.bfloat16,
            pin_memory=False,
        )
        for buffer in (self.pool.k_buffer, self.pool.v_buffer):
            buffer.view(torch.uint8).random_(0, 256)
        identity = StorageIdentity(
            model="benchmark", kv_dtype="bfloat16", page_size=PAGE_TOKENS, layout="page_first"
        )
        self.storage = create_storage("mooncake", identity, {**cluster.options, **options})
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

    def __init__(self, cluster: DevCluster, subject: str) -> None:
        layers, heads = SHAPES[subject]
        self.page_bytes = 2 * layers * heads * 128 * 2 * PAGE_TOKENS
        # Beginning on a page, as pools of engines do: into memory that begins 64 bytes after one,
        # as torch's does, gets take longer.
        self.memory = host_tensor(
            (BATCH[subject] * self.page_bytes,), torch.uint8, pin_memory=False
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


def sglangs(cluster: DevCluster, subject: str) -> Candidate:
    """SGLang's driver on its own host pool, called as its cache controller calls it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
    from sglang_peer import storage_config

    (layers, heads), size = SHAPES[subject], BATCH[subject] * PAGE_TOKENS
    device = MHATokenToKVPool(
        size=size,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=128,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE_TOKENS,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=size,
        start_layer=0,
        end_layer=layers,
    )
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    extra = {
        "master_server_address": cluster.address,
        "local_hostname": "127.0.0.1",
        "global_segment_size": 0,
        "protocol": "tcp",
    }
    config = storage_config(**extra, metadata_server="P2PHANDSHAKE")
    storage = MooncakeStore(config, pool)
    storage.register_mem_pool_host(pool)
    indices = torch.arange(size)

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


def measure(
    results: Results, subject: str, candidates: Sequence[Candidate], rounds: int, patience: float
) -> None:
    """Put, look up and get a batch, each candidate in its turn; then remove it, so that nothing is
    evicted."""
    # Clients of an earlier cluster end here. Puts of ours, which make more garbage, were seen to
    # stand still for 0.2 to 1 s without this.
    gc.collect()
    for candidate in candidates:
        keys = fresh_keys(BATCH[subject])
        candidate.put(keys)
        candidate.get(keys)
        candidate.remove(keys)
    for candidate in turns(candidates, rounds):
        keys, who = fresh_keys(BATCH[subject]), candidate.name
        wait_for_quiet(patience)
        results.time(subject, "put", who, partial(candidate.put, keys))
        for _ in range(EXISTS_CALLS):
            results.time(subject, "exists", who, partial(candidate.exists, keys), expect=len(keys))
        results.time(subject, "get", who, partial(candidate.get, keys))
        candidate.remove(keys)


def report(results: Results) -> str:
    """Medians with minimum and maximum in milliseconds a batch, and ratios of medians and of the
    fastest."""
    rows = list[list[str]]()
    for (subject, operation), samples in results.samples.items():
        for who, seconds in samples.seconds.items():
            ratios = ["", "", ""]
            if who in (RAW, PEER):
                goal = GOALS.get((subject, operation, who))
                ratios = [
                    f"{samples.ratio(OURS, who):.2f}",
                    f"{samples.best_ratio(OURS, who):.2f}",
                    f"{goal:g}" if goal else "",
                ]
            times = (samples.median(who), min(seconds), max(seconds))
            rows.append(
                [subject, operation, who, *(f"{1000 * time:.2f}" for time in times), *ratios]
            )
    header = [
        "page",
        "operation",
        "who",
        "median ms",
        "min",
        "max",
        "ours is faster by",
        "fastest runs",
        "goal",
    ]
    return table(header, rows)


class Phases:
    """Time in calls of the library and in functions of ours, of all threads together."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self._lock = threading.Lock()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                taken = time.perf_counter() - began
                with self._lock:
                    self.seconds[name] += taken

        return call


class TimedStore:
    """A store of the library, each of whose methods is a phase."""

    def __init__(self, store: Any, phases: Phases) -> None:
        self._store, self._phases = store, phases

    def __getattr__(self, name: str) -> Any:
        return self._phases.timed(name, getattr(self._store, name))


def cpu_seconds(process: Process) -> float:
    """CPU time that a process of the cluster has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def profile(subject: str, arguments: argparse.Namespace) -> list[list[str]]:
    """Means of milliseconds a batch: wall time, CPU time of this process and of the store's, and
    the phases of ours."""
    phases, new_store = Phases(), library.new_store
    with (
        DevCluster(1, 512 << 20) as cluster,
        patch.object(library, "new_store", lambda: TimedStore(new_store(), phases)),
        patch.object(PageWriter, "_parts", phases.timed("checksum and copy", PageWriter._parts)),
        patch.object(reader, "_deliver", phases.timed("verify and copy", reader._deliver)),
    ):
        ours = Ours(cluster, subject)
        candidates: list[Candidate] = [ours, Raw(cluster, subject)]
        spent = defaultdict[tuple[str, str], list[dict[str, float]]](list)
        if arguments.sglang:
            candidates.append(sglangs(cluster, subject))
        for candidate in turns(candidates, arguments.rounds):
            keys = fresh_keys(BATCH[subject])
            for operation, action in (("put", candidate.put), ("get", candidate.get)):
                phases.seconds.clear()
                wall, cpu = time.perf_counter(), time.process_time()
                stores = cpu_seconds(cluster.stores[0])
                assert action(keys)
                taken = {
                    "wall": time.perf_counter() - wall,
                    "client": time.process_time() - cpu,
                    "store": cpu_seconds(cluster.stores[0]) - stores,
                }
                spent[operation, candidate.name].append(taken | phases.seconds)
            candidate.remove(keys)
        for candidate in candidates:
            candidate.close()
    rows = list[list[str]]()
    for (operation, who), samples in spent.items():
        means = {
            name: 1000 * statistics.fmean(each[name] for each in samples) for name in samples[0]
        }
        costs = [f"{means.pop(name):.1f}" for name in ("wall", "client", "store")]
        parts = sorted(means.items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} {each:.1f}" for name, each in parts if each >= 0.05)
        rows.append([subject, operation, who, *costs, named])
    return rows


def run(results: Results, arguments: argparse.Namespace) -> None:
    """Measure on a cluster of its own, with new clients: one differs from another that is set up
    alike, for as long as it lives."""
    with DevCluster(1, 512 << 20) as cluster:
        for subject in SHAPES:
            candidates: list[Candidate] = [
                Ours(cluster, subject),
                Raw(cluster, subject),
                Ours(cluster, subject, WAIT, hung_reads="wait"),
            ]
            if arguments.sglang:
                candidates.append(sglangs(cluster, subject))
            measure(results, subject, candidates, arguments.rounds, arguments.patience)
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
    parser.add_argument(
        "--patience",
        type=float,
        default=2.0,
        help="seconds to wait for a quiet machine before each measurement",
    )
    parser.add_argument("--sglang", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="write medians, fastest and slowest there as JSON")
    arguments = parser.parse_args()
    results = Results()
    with awake_cores():
        if arguments.profile:
            rows = [row for subject in SHAPES for row in profile(subject, arguments)]
            header = ["page", "operation", "who", "ms a batch", "CPU of the client", "of the store"]
            print(table([*header, "calls, ms of all threads"], rows))
            return
        for _ in range(arguments.clusters):
            run(results, arguments)
    print(report(results))
    if arguments.out:
        summary = {
            "/".join(key): {
                who: {
                    "median": round(statistics.median(seconds), 6),
                    "fastest": round(min(seconds), 6),
                    "slowest": round(max(seconds), 6),
                    "samples": len(seconds),
                }
                for who, seconds in samples.seconds.items()
            }
            for key, samples in results.samples.items()
        }
        document = {"machine": machine(), "seconds a batch": summary}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
