"""The 3FS driver against SGLang's `HiCacheHF3FS`: same directory, same SGLang host pool, a metadata
server each, taking turns.

    python benchmarks/hf3fs_vs_sglang.py
    python benchmarks/hf3fs_vs_sglang.py --before CHECKOUT    # the driver and server of another
    checkout take part

Neither has 3FS: ours uses its posix engine, SGLang's its mock client, and both read and write a
file of slots. Ours verifies checksums, and its server has each change on disk before it answers;
SGLang's driver verifies nothing, and its server keeps nothing. Each file holds four calls of 128
pages and is written once before anything is measured, so that nobody pays for new blocks.

Needs an environment with SGLang 0.5.23 (scripts/make_sglang_env.sh). Writes results.md and
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

from checkouts import HERE, OfCheckout, environment
from file_vs_sglang import BEFORE, SIZES, microseconds, speed
from hf3fs_candidates import (
    OURS,
    PEER,
    QUARANTINE_SECONDS,
    STAGED,
    ZERO_COPY,
    Candidate,
    Ours,
    Peer,
)
from interleaved import (
    Costs,
    Samples,
    awake_cores,
    fresh_keys,
    machine,
    table,
    turns,
    wait_for_quiet,
)
from metadata import OUR_COMMAND, PEER_COMMAND, started
from sglang_peer import host_pool

from hicache_backends.posix.directories import mount_of

WAYS = {ZERO_COPY: "zero copy", STAGED: "staged"}
"""How SGLang's driver moves the pages of a host pool of that layout."""
HEADER = [
    *(
        "operation",
        "page",
        "pages a call",
        "SGLang's way",
        "SGLang `HiCacheHF3FS`",
        "3FS driver",
        "ratio",
        "of the fastest",
        "goal",
    ),
    *("CPU us a page, SGLang", "ours"),
]
GOALS = {
    ("read", ZERO_COPY, "64 KiB"): 2.5,
    ("read", ZERO_COPY, "1 MiB"): 1.7,
    ("read", STAGED, "1 MiB"): 3.0,
    ("write", ZERO_COPY, "64 KiB"): 2.0,
    ("write", ZERO_COPY, "1 MiB"): 1.2,
}
ROUNDS = {"64 KiB": 4, "256 KiB": 3, "1 MiB": 2, "4 MiB": 1}


@dataclass(frozen=True)
class Workload:
    """A workload: page size, pages a call, layout of the pool."""

    size: str
    pages: int
    layout: str

    def __str__(self) -> str:
        return f"{self.size}, {self.pages} pages, {self.layout}"


def measure(
    results: Costs,
    workloads: list[Workload],
    candidates: list[Candidate | OfCheckout],
    rounds: int,
    patience: float,
) -> None:
    """Subjects differ in the number of pages only."""
    for candidate in candidates:
        candidate.prepare()
    for workload in workloads:
        for candidate in turns(candidates, rounds):
            keys, spent = (
                fresh_keys(workload.pages),
                partial(results.time, str(workload), candidate.name),
            )
            gc.collect()
            wait_for_quiet(patience)
            spent("write", partial(candidate.write, keys))
            candidate.read(keys)
            spent("read", partial(candidate.read, keys))
            spent("exists", partial(candidate.exists, keys), expect=workload.pages)
            candidate.remove()
    for candidate in candidates:
        candidate.close()


def report(results: Costs, workloads: list[Workload], *, before: bool = False) -> str:
    names = (PEER, BEFORE, OURS) if before else (PEER, OURS)
    rows = [
        row(
            operation,
            workload,
            names,
            *(found.samples[str(workload), operation] for found in (results.seconds, results.cpu)),
        )
        for operation in ("read", "write", "exists")
        for workload in workloads
    ]
    if not before:
        return table(HEADER, rows)
    return table(
        [
            *HEADER[:5],
            "3FS driver, before",
            *HEADER[5:10],
            "before",
            *HEADER[10:],
            "of before",
            "of the fastest",
        ],
        rows,
    )


def row(
    operation: str, workload: Workload, names: tuple[str, ...], samples: Samples, cpu: Samples
) -> list[str]:
    if operation == "exists":
        shown = [f"{microseconds(samples, who)} us" for who in names]
    else:
        shown = [
            f"{speed(samples, who, SIZES[workload.size] * workload.pages)} GB/s" for who in names
        ]
    goal = GOALS.get((operation, workload.layout, workload.size))
    ratios = [
        f"{samples.ratio(OURS, PEER):.1f}x",
        f"{samples.best_ratio(OURS, PEER):.1f}x",
        f"{goal:g}x" if goal else "",
    ]
    cost = [f"{cpu.median(who) / workload.pages * 1e6:.1f}" for who in names]
    of_before = (
        [f"{samples.ratio(OURS, BEFORE):.2f}x", f"{samples.best_ratio(OURS, BEFORE):.2f}x"]
        if BEFORE in names
        else []
    )
    return [
        operation,
        workload.size,
        str(workload.pages),
        WAYS[workload.layout],
        *shown,
        *ratios,
        *cost,
        *of_before,
    ]


def metadata_servers(stack: ExitStack, work: Path, before: Path | None) -> dict[str, str | None]:
    """One for each, running until the end: SGLang's keeps nothing, ours has it on disk before it
    answers."""

    def ours(name: str) -> list[str]:
        options = (
            "--store",
            f"sqlite:///{work}/{name}.db",
            "--quarantine-seconds",
            str(QUARANTINE_SECONDS),
        )
        return [sys.executable, *OUR_COMMAND, "PORT", *options]

    commands = {PEER: [sys.executable, *PEER_COMMAND, "PORT"], OURS: ours("ours")}
    places = {OURS: HERE}
    if before is not None:
        commands[BEFORE], places[BEFORE] = ours("before"), before
    servers = [
        stack.enter_context(
            started(
                name,
                command,
                work / f"{name}.log",
                environment(places[name]) if name in places else None,
            )
        )
        for name, command in commands.items()
    ]
    return {server.name: f"http://127.0.0.1:{server.port}" for server in servers}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--path",
        type=Path,
        default=Path(),
        help="where to make the stores' directory; the file system to measure",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/benchmarks/hf3fs"),
        help="where results.md and results.json go",
    )
    parser.add_argument(
        "--sizes", default="64 KiB,1 MiB", help="page sizes; also 256 KiB and 4 MiB"
    )
    parser.add_argument("--pages", default="32,128", help="pages a call")
    parser.add_argument(
        "--layouts",
        default=f"{ZERO_COPY},{STAGED}",
        help="of the host pool; SGLang's driver stages layer_first",
    )
    parser.add_argument(
        "--metadata",
        choices=["server", "local"],
        default="server",
        help="a process of its own, or maps in this one; for both",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=16,
        help="of SGLang's driver: its threads and clients, 16 by default",
    )
    parser.add_argument(
        "--entries",
        type=int,
        default=8,
        help="of SGLang's driver: pages a thread takes at a time, 8 by default",
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="turns of each at 4 MiB; small pages take more"
    )
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
    work = Path(tempfile.mkdtemp(prefix="hf3fs-vs-sglang-", dir=options.path)).resolve()
    facts = {**machine(), "file system": mount_of(str(work)).kind, "metadata": options.metadata}
    facts |= {
        name: importlib.metadata.version(name) for name in ("torch", "sglang", "hicache-storage")
    }
    results, workloads = Costs(), list[Workload]()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        stack.enter_context(awake_cores())
        served = options.metadata == "server"
        urls = (
            metadata_servers(stack, work, options.before)
            if served
            else dict.fromkeys((PEER, OURS, BEFORE))
        )
        for layout, size in itertools.product(options.layouts.split(","), options.sizes.split(",")):
            print(f"{size}, {layout} ...", file=sys.stderr, flush=True)
            pool, directory = (
                host_pool(SIZES[size], layout),
                work / f"{size.replace(' ', '')}-{layout}",
            )
            peer = Peer(
                pool, directory, SIZES[size], urls[PEER], jobs=options.jobs, entries=options.entries
            )
            candidates: list[Candidate | OfCheckout] = [peer]
            if options.before is None:
                candidates.append(Ours(pool, directory, SIZES[size], urls[OURS]))
            for name, checkout in (
                ((OURS, HERE), (BEFORE, options.before)) if options.before else ()
            ):
                place, page_bytes = directory / name.replace(" ", ""), SIZES[size]
                place.mkdir(parents=True)
                candidates.append(
                    OfCheckout(
                        checkout,
                        name,
                        "hf3fs_candidates",
                        page_bytes,
                        layout,
                        place,
                        page_bytes,
                        urls[name],
                    )
                )
            these = [Workload(size, int(pages), layout) for pages in options.pages.split(",")]
            rounds = options.rounds * ROUNDS[size]
            # Engines call from threads of their own.
            with ThreadPoolExecutor(1) as caller:
                caller.submit(
                    measure, results, these, candidates, rounds, options.patience
                ).result()
            shutil.rmtree(directory)
            workloads += these
    text = report(results, workloads, before=options.before is not None)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.md").write_text(text)
    raw = [
        {
            "workload": workload,
            "operation": operation,
            "seconds": samples.seconds,
            "cpu": results.cpu.samples[workload, operation].seconds,
        }
        for (workload, operation), samples in results.seconds.samples.items()
    ]
    (options.out / "results.json").write_text(
        json.dumps({"machine": facts, "rounds": options.rounds, "measured": raw}, indent=1)
    )
    print(json.dumps(facts, indent=1), text, sep="\n")


if __name__ == "__main__":
    main()
