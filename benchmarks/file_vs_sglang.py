"""The file driver against SGLang's `HiCacheFile`: same directory, same SGLang host pool,
verification on, taking turns.

    python benchmarks/file_vs_sglang.py                        # local disk
    python benchmarks/file_vs_sglang.py --mount-delay-us 200   # a file system that takes its time
    for each request python benchmarks/file_vs_sglang.py --before CHECKOUT      # the driver of
    another checkout takes part

Needs an environment with SGLang 0.5.23 (scripts/make_sglang_env.sh). Writes results.md and
results.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import sys
import tempfile
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

from checkouts import HERE, OfCheckout
from interleaved import (
    Results,
    Samples,
    awake_cores,
    drop_from_page_cache,
    fresh_keys,
    machine,
    table,
    turns,
    wait_for_quiet,
)
from sglang_peer import BATCH_PAGES, Candidate, Ours, Peer, host_pool

from hicache_backends.posix.directories import mount_of
from tests.fuse.counting_fs import CountingMount

PEER, OURS, BEFORE = "HiCacheFile", "hicache file", "before"
SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
GOALS = {
    "read, cached": dict(zip(SIZES, (2.4, 1.8, 2.2, 2.2), strict=True)),
    "write": dict(zip(SIZES, (3.0, 1.5, 1.4, 1.2), strict=True)),
    "read, cold": dict(zip(SIZES, (3.0, 1.8, 1.6, 1.5), strict=True)),
    "exists": dict.fromkeys(SIZES, 10.0),
}
MOUNT_GOALS = {"write": {"64 KiB": 15.0, "1 MiB": 3.0}, "read": {"64 KiB": 10.0, "1 MiB": 4.0}}
EXISTS_CALLS = 20
# Small pages are moved in no time and disturbed by everything: they take more rounds.
ROUNDS = {"64 KiB": 4, "256 KiB": 3, "1 MiB": 2, "4 MiB": 1}


def all_candidates(subject: str, directory: Path, before: Path | None) -> list[Candidate]:
    """SGLang's and ours; with an earlier checkout each of our drivers has a process of its own, so
    that nothing else differs."""
    pool, page_bytes = host_pool(SIZES[subject]), SIZES[subject]
    peer = Peer(pool, directory / "peer")
    if before is None:
        return [peer, Ours(pool, directory / "ours", OURS)]
    return [
        peer,
        OfCheckout(HERE, OURS, "sglang_peer", page_bytes, "page_first", directory / "ours"),
        OfCheckout(before, BEFORE, "sglang_peer", page_bytes, "page_first", directory / "before"),
    ]


def measure_disk(
    results: Results, subject: str, candidates: list[Candidate], rounds: int, patience: float
) -> None:
    """Write, look up, read from the page cache, read from the disk; then remove, so that nothing is
    left to be flushed."""
    for candidate in candidates:
        candidate.write(fresh_keys(BATCH_PAGES))
        candidate.remove()
    for candidate in turns(candidates, rounds):
        keys, who = fresh_keys(BATCH_PAGES), candidate.name
        wait_for_quiet(patience)
        results.time(subject, "write", who, partial(candidate.write, keys))
        candidate.exists(keys)
        for _ in range(EXISTS_CALLS):
            results.time(
                subject, "exists", who, partial(candidate.exists, keys), expect=BATCH_PAGES
            )
        candidate.read(keys)
        results.time(subject, "read, cached", who, partial(candidate.read, keys))
        drop_from_page_cache(candidate.files())
        wait_for_quiet(patience)
        results.time(subject, "read, cold", who, partial(candidate.read, keys))
        candidate.remove()
    for candidate in candidates:
        candidate.close()


def measure_mount(
    results: Results,
    subject: str,
    candidates: list[Candidate],
    mount: CountingMount,
    rounds: int,
    patience: float,
) -> dict[str, float]:
    """Write and read each batch once; requests a page, by operation and candidate."""
    requests = dict[str, float]()
    for candidate in candidates:
        candidate.write(fresh_keys(BATCH_PAGES))
        candidate.remove()
    for candidate in turns(candidates, rounds):
        keys, who = fresh_keys(BATCH_PAGES), candidate.name
        for operation, action in (("write", candidate.write), ("read", candidate.read)):
            wait_for_quiet(patience)
            before = mount.counts()
            results.time(subject, operation, who, partial(action, keys))
            requests[f"{operation} {who}"] = sum(mount.since(before).values()) / BATCH_PAGES
        candidate.remove()
    for candidate in candidates:
        candidate.close()
    return requests


def speed(samples: Samples, who: str, batch_bytes: int) -> str:
    """Median, and the range, in GB/s."""
    slowest, fastest = max(samples.seconds[who]), min(samples.seconds[who])
    return f"{batch_bytes / samples.median(who) / 1e9:.2f} ({batch_bytes / slowest / 1e9:.2f} - {batch_bytes / fastest / 1e9:.2f})"


def microseconds(samples: Samples, who: str) -> str:
    return f"{samples.median(who) * 1e6:.0f} ({min(samples.seconds[who]) * 1e6:.0f} - {max(samples.seconds[who]) * 1e6:.0f})"


def report(
    results: Results,
    goals: dict[str, dict[str, float]],
    requests: dict[str, dict[str, float]],
    *,
    before: bool = False,
) -> str:
    rows, names = [], (PEER, BEFORE, OURS) if before else (PEER, OURS)
    for operation, by_size in goals.items():
        for subject, goal in by_size.items():
            samples = results.samples.get((subject, operation))
            if samples is None:
                continue
            if operation == "exists":
                shown = [f"{microseconds(samples, who)} us" for who in names]
            else:
                shown = [
                    f"{speed(samples, who, SIZES[subject] * BATCH_PAGES)} GB/s" for who in names
                ]
            row = [
                operation,
                subject,
                *shown,
                f"{samples.ratio(OURS, PEER):.1f}x",
                f"{samples.best_ratio(OURS, PEER):.1f}x",
                f"{goal:g}x",
            ]
            if before:
                row += [
                    f"{samples.ratio(OURS, BEFORE):.2f}x",
                    f"{samples.best_ratio(OURS, BEFORE):.2f}x",
                ]
            if requests:
                row += [f"{requests[subject][f'{operation} {who}']:.2f}" for who in names]
            rows.append(row)
    extra = ["of before", "of the fastest before"] * before
    extra += [f"requests a page, {name}" for name in names] * bool(requests)
    drivers = ["SGLang `HiCacheFile`", *["file driver, before"] * before, "file driver"]
    return table(["operation", "page", *drivers, "ratio", "of the fastest", "goal", *extra], rows)


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
        default=Path("out/benchmarks/file"),
        help="where results.md and results.json go",
    )
    parser.add_argument(
        "--sizes", default="", help="page sizes, such as '64 KiB,1 MiB'; all by default"
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
        "--mount-delay-us",
        type=int,
        help="measure on a FUSE mount where each request takes so long",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout of this project, to be measured too",
    )
    options = parser.parse_args()
    on_mount = options.mount_delay_us is not None
    sizes = (
        options.sizes.split(",")
        if options.sizes
        else list(MOUNT_GOALS["write"] if on_mount else SIZES)
    )
    results, requests = Results(), dict[str, dict[str, float]]()
    work = Path(tempfile.mkdtemp(prefix="file-vs-sglang-", dir=options.path))
    facts = {**machine(), "file system": mount_of(str(work)).kind}
    facts |= {
        name: importlib.metadata.version(name) for name in ("torch", "sglang", "hicache-storage")
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        stack.enter_context(awake_cores())
        if on_mount:
            facts["file system"] = f"FUSE, {options.mount_delay_us} us a request"
            # A second is how long FUSE file systems usually let the kernel believe names and
            # attributes.
            mount = CountingMount(
                work / "backing", work / "mount", delay_us=options.mount_delay_us, cache_seconds=1.0
            )
            stack.enter_context(mount)
        for subject in sizes:
            print(f"{subject} ...", file=sys.stderr, flush=True)
            rounds = options.rounds * ROUNDS[subject]
            directory = (mount.point if on_mount else work.resolve()) / subject.replace(" ", "")
            candidates = all_candidates(subject, directory, options.before)
            if on_mount:
                requests[subject] = measure_mount(
                    results, subject, candidates, mount, rounds, options.patience
                )
            else:
                measure_disk(results, subject, candidates, rounds, options.patience)
    text = report(
        results, MOUNT_GOALS if on_mount else GOALS, requests, before=options.before is not None
    )
    options.out.mkdir(parents=True, exist_ok=True)
    name = "mount" if on_mount else "results"
    (options.out / f"{name}.md").write_text(text)
    raw = [
        {"page": page, "operation": operation, **samples.seconds}
        for (page, operation), samples in results.samples.items()
    ]
    (options.out / f"{name}.json").write_text(
        json.dumps(
            {"machine": facts, "rounds": options.rounds, "seconds": raw, "requests": requests},
            indent=1,
        )
    )
    print(json.dumps(facts, indent=1), text, sep="\n")


if __name__ == "__main__":
    main()
