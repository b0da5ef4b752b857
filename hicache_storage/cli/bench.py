"""`hicache bench`: throughput and latency of a driver, every answer checked."""

from __future__ import annotations

import tempfile
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hicache_storage.cli.doctor import DriverOptions  # noqa: TC001 - typer reads the annotation
from hicache_storage.plugins import registry
from hicache_storage.spec import HiCacheError, parse_bytes
from hicache_storage.tools.bench.client import (
    BATCH_PAGES,
    MIN_PAGE_BYTES,
    BenchWorkload,
    Candidate,
    WrongAnswerError,
    run_sweep,
)
from hicache_storage.tools.options import parse_pairs, size_text, trial_options

if TYPE_CHECKING:
    from hicache_storage.tools.bench.results import Rate, Report

WRONG_ANSWER, USAGE_ERROR = 1, 2
MIN_WIDTH: Final = 110
DEFAULT_PAGES: Final = "64KiB,256KiB,1MiB"


def bench(
    driver: Annotated[
        str, typer.Argument(metavar="DRIVER", help="The driver, as `hicache drivers` lists it.")
    ],
    config: DriverOptions = None,
    pages: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Page sizes, comma-separated; by default 64KiB,256KiB,1MiB, with --trace 4KiB.",
        ),
    ] = None,
    clients: Annotated[
        str,
        typer.Option(
            "--concurrency", metavar="NUMBERS", help="Threads that call at a time, comma-separated."
        ),
    ] = "1,4",
    batch: Annotated[int, typer.Option(min=1, help="Pages in a call.")] = BATCH_PAGES,
    seconds: Annotated[
        float,
        typer.Option(min=0.05, help="Time for each page size and number of clients."),
    ] = 3.0,
    max_stored: Annotated[
        str, typer.Option(metavar="SIZE", help="Limit of the bytes that are stored at a time.")
    ] = "2GiB",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay a trace of requests (Mooncake, Bailian, Dynamo; .gz too) instead.",
        ),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="With --trace: capacities of the store, comma-separated; by default 1, 3, 10 and "
            "30 % of the trace's distinct pages.",
        ),
    ] = None,
    sample: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="With --trace: replay one of N pages, with one Nth of each capacity. 256 for "
            "millions of requests.",
        ),
    ] = 1,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.svg", help="With --trace: draw the hit rates by capacity."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results here.")
    ] = None,
) -> None:
    """Measure how fast a driver writes, looks up and reads pages, in batches as engines send them.

    Every answer is checked, the last batch of each round byte for byte; a wrong one ends the run.
    Without -c a throwaway store is used. Pages are removed. With --trace each request of a file
    looks its pages up, reads those that are found and stores the others, as an engine does. Exits
    with 0, 1 after a wrong answer, 2 for bad arguments or if the store has no room.
    """
    # At least this wide: a terminal wraps long lines better than rich wraps figures in tables.
    console = Console(highlight=False, width=max(MIN_WIDTH, Console().width))
    try:
        if trace is not None:
            _replay(console, driver, config, trace, pages, capacity, sample, plot_file, json_file)
            return
        if capacity or plot_file or sample > 1:
            raise ValueError("--capacity, --sample and --plot need a --trace")
        workloads = [
            BenchWorkload(size, count, batch)
            for size in _sizes(pages or DEFAULT_PAGES)
            for count in _counts(clients)
        ]
        doing = f"{driver}: {len(workloads)} combinations of page size and clients"
        with (
            Console(stderr=True).status(doing),
            tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory,
        ):
            report = run_sweep(
                _candidate(driver, config, directory),
                workloads,
                seconds=seconds,
                max_stored_bytes=parse_bytes(max_stored),
            )
    except WrongAnswerError as error:
        message = f"wrong answer: {error}; `hicache conformance run` finds out why"
        raise typer.Exit(_complain(message, WRONG_ANSWER)) from error
    except (ValueError, OSError, HiCacheError) as error:
        raise typer.Exit(_complain(str(error), USAGE_ERROR)) from error
    _show(console, report)
    if json_file is not None:
        report.write(json_file)


def _replay(
    console: Console,
    driver: str,
    config: list[str] | None,
    path: Path,
    pages: str | None,
    capacity: str | None,
    sample: int,
    plot_file: Path | None,
    json_file: Path | None,
) -> None:
    # NumPy and torch, which other commands do not wait for.
    from hicache_storage.tools.bench.trace import (
        ReplayResult,
        Trace,
        capacities_of,
        check_disk,
        plot,
        reference,
        replay,
    )

    sizes = _sizes(pages or "4KiB")
    if len(sizes) > 1:
        raise ValueError("--pages: with --trace one size")
    requests = Trace.read(path)
    capacities = capacities_of(requests, driver, sizes[0], capacity)
    if plot_file is not None and capacities == [None]:
        raise ValueError(
            f"driver {driver!r} has no capacity to plot hit rates by; leave --plot out"
        )
    part = requests.sampled(sample)
    if not len(part.keys):
        raise ValueError(f"--sample: of {len(requests.keys)} pages none is left; give a smaller N")
    results = list[ReplayResult]()
    for limit in capacities:
        room = None if limit is None else limit // sample
        if room is not None and room < sizes[0]:
            raise ValueError(
                f"--sample: of a capacity of {size_text(limit)} no page is left; give a smaller N"
            )
        doing = f"{driver}, {size_text(limit)}: {part.requests:,} requests"
        with (
            Console(stderr=True).status(doing),
            tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory,
        ):
            candidate = _candidate(driver, config, directory)
            check_disk(part, candidate, sizes[0], room)
            result = replay(part, candidate, sizes[0], room)
            results.append(result.scaled(sample, len(requests.keys), sizes[0], limit))
    results += [reference(requests, sizes[0], limit) for limit in {*capacities, None}]
    results.sort(key=lambda one: (one.capacity_bytes is None, one.capacity_bytes or 0))
    table = _table("capacity", "store", "hit rate", "read", "written", "seconds", "requests/s")
    for one in results:
        seconds = [f"{one.seconds:.1f}"] if one.seconds else []
        if seconds and sample == 1:
            seconds.append(f"{one.requests / one.seconds:,.0f}")
        table.add_row(
            size_text(one.capacity_bytes),
            one.label,
            f"{one.hit_rate:.1%}",
            size_text(one.read_bytes),
            size_text(one.written_bytes),
            *seconds,
        )
    console.print(
        f"{path.name}: {requests.requests:,} requests, {len(requests.keys):,} pages of "
        f"{size_text(sizes[0])}{f'; one of {sample} replayed' if sample > 1 else ''}",
        soft_wrap=True,
    )
    console.print(table)
    if plot_file is not None:
        plot_file.write_text(plot(results))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


def _candidate(driver: str, config: list[str] | None, directory: str) -> Candidate:
    spec = registry().get(driver)
    options = parse_pairs(config or []) or trial_options(spec, directory)
    if options is None:
        needed = " ".join(f"-c {name}=..." for name in spec.trial_config)
        raise ValueError(
            f"a throwaway store of driver {driver!r} needs a server; start one and give {needed}"
        )
    return Candidate(driver, options)


def _show(console: Console, report: Report) -> None:
    candidate = report.candidates[0]
    options = " ".join(f"{name}={value}" for name, value in candidate.options.items())
    checked = "checksums verified"
    if not candidate.verifies_checksums:
        checked = "[yellow]checksums not verified[/]"
    console.print(f"[bold]{candidate.label}[/]  {options}  {checked}", soft_wrap=True)
    console.print(
        f"{report.machine['cpu']}, {report.machine['memory']}; "
        f"{report.measurements[0].batch_pages} pages a call; "
        "median (minimum - maximum) of the rounds",
        soft_wrap=True,
    )
    table = _table(
        "page", "clients", "operation", "rate", "", "p50 ms", "p95 ms", "p99 ms", "calls"
    )
    for measure in report.measurements:
        table.add_row(
            size_text(measure.page_bytes),
            str(measure.clients),
            measure.operation,
            _spread(measure.rates()),
            measure.unit,
            *(f"{us / 1000:.3g}" for us in (measure.p50_us, measure.p95_us, measure.p99_us)),
            str(measure.calls),
        )
    console.print(table)


def _table(*headers: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        # A wrapped figure could not be compared with the one above it.
        table.add_column(header, no_wrap=True)
    return table


def _spread(rate: Rate) -> str:
    median, minimum, maximum = rate
    return f"{median:.2f} ({minimum:.2f} - {maximum:.2f})"


def _sizes(text: str) -> list[int]:
    # Without repetitions: equal workloads would overwrite each other's measurements.
    sizes = sorted({parse_bytes(part) for part in text.split(",")})
    if sizes[0] < MIN_PAGE_BYTES or any(size % MIN_PAGE_BYTES for size in sizes):
        raise ValueError(f"--pages {text}: give multiples of {MIN_PAGE_BYTES} bytes")
    return sizes


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ValueError(f"--concurrency {text!r} is no list of numbers") from error
    # Sorted: the first is the smallest.
    if counts[0] < 1:
        raise ValueError("--concurrency begins at 1")
    return counts


def _complain(message: str, status: int) -> int:
    Console(stderr=True, soft_wrap=True).print(Text(message, "red"))
    return status
