"""`hicache conformance`: judge a driver, list the rules, explain one."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hicache_conformance.model.profiles import PROFILES
from hicache_conformance.model.rules import parse_levels, rules
from hicache_conformance.model.settings import RunFile, Settings, parse_page_bytes
from hicache_conformance.report.terminal import BROKEN, ProgressBar, conclude
from hicache_conformance.runner.repro import repro
from hicache_conformance.runner.verify import verify
from hicache_storage.tools.options import parse_pairs

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

app = typer.Typer(
    help="Judge drivers by the contract.",
    no_args_is_help=True,
)
SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)

Seed = Annotated[
    int | None, typer.Option(help="Of everything random; drawn and printed if not given.")
]
ReportDirectory = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write index.html, results.json, junit.xml and badge.json here."
    ),
]
ProfileName = Annotated[str, typer.Option(help=f"How much chance to spend: {', '.join(PROFILES)}.")]
Cases = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Run only cases whose name has this text; may be repeated."),
]


@app.command()
def run(
    driver: Annotated[
        str, typer.Argument(metavar="DRIVER", help="The driver, as `hicache drivers` lists it.")
    ],
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="KEY=VALUE",
            help="An option of the driver; may be repeated. {tmp} stands for an empty directory.",
        ),
    ] = None,
    level: Annotated[
        str, typer.Option(metavar="LEVELS", help="Levels to run, comma-separated, or all.")
    ] = "all",
    seed: Seed = None,
    report: ReportDirectory = None,
    profile: ProfileName = "default",
    case: Cases = None,
    case_seconds: Annotated[
        float, typer.Option(help="A case that takes longer is taken for hanging.")
    ] = 300.0,
    run_id: Annotated[
        str | None,
        typer.Option(help="Name of this run within the identities' salts; drawn if not given."),
    ] = None,
    page_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Make every page a multiple of so many bytes long, such as 4KiB, for a driver that "
            "stores no others; 0 for pages of any length, which is the default for most drivers.",
        ),
    ] = None,
    start_server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="Start a server for the driver by this, with {port:NAME} and {tmp} filled in, "
            "here and in -c; it is killed and "
            "restarted. In the place of the driver's own; may be repeated. Reports show it as it "
            "is.",
        ),
    ] = None,
    interface: Annotated[
        str,
        typer.Option(
            help="Interface of a foreign driver, given as MODULE:CLASS or by a name: sglang, "
            "vllm-tier or lmcache-l2. -c fills the options that its engine hands to it."
        ),
    ] = "",
) -> None:
    """Run the suite against a driver.

    Exits with 0 if it conforms, 1 if not or if rules stayed untested, 2 if the suite could not do
    its work.
    """
    from hicache_conformance.runner.child_process import RunInterrupted
    from hicache_conformance.runner.child_process import run as run_suite

    console = Console(stderr=True)
    try:
        # All that can be checked without the driver is checked before the child process starts.
        levels = parse_levels(level)
        options = parse_pairs(config or [])
        _check_profile(profile)
        # Checked here, where a mistake costs a line. In the child it would be a driver that cannot
        # be opened.
        usual_page_bytes = _check_interface(interface, driver, options)
        _check_commands(start_server or [])
        unit = usual_page_bytes if page_bytes is None else parse_page_bytes(page_bytes)
    except ValueError as error:
        console.print(Text(str(error), "red"))
        raise typer.Exit(BROKEN) from error
    request = RunFile(
        driver=driver,
        config=options,
        settings=Settings.fresh(seed, profile, levels, run_id, unit),
        cases=case or [],
        services=start_server or None,
        interface=interface,
    )
    console.print(
        f"driver [bold]{driver}[/], levels {', '.join(levels)}, seed {request.settings.seed}, "
        f"profile {profile}",
        highlight=False,
    )
    try:
        with ProgressBar(console) as bar:
            ran = run_suite(request, case_seconds=case_seconds, progress=bar.update)
    except RunInterrupted as interrupted:
        ran = interrupted.result
    raise typer.Exit(conclude(console, ran, request.settings, report))


app.command()(repro)
app.command()(verify)


@app.callback()
def conformance(context: typer.Context) -> None:
    """Check whether a driver keeps the HiCacheStorage v2 contract."""
    # For all commands: each starts processes, servers or mounts that must not outlive it.
    context.with_resource(_exit_on_signals())


@app.command("rules")
def list_rules(
    level: Annotated[str, typer.Option(metavar="LEVELS", help="Only of these levels.")] = "all",
) -> None:
    """List every rule, its levels, the capability it needs, and how many cases test it."""
    from hicache_conformance.suite.driver_conformance import catalogue

    try:
        levels = parse_levels(level)
    except ValueError as error:
        Console(stderr=True).print(Text(str(error), "red"))
        raise typer.Exit(BROKEN) from error
    table = Table(
        "rule", "levels", "needs", "cases", "text", box=None, header_style="bold", pad_edge=False
    )
    for rule in rules().values():
        if set(rule.levels) & set(levels):
            cases = sum(rule.id in case.rules for case in catalogue().values())
            table.add_row(rule.id, ", ".join(rule.levels), rule.needs, str(cases), rule.text)
    Console().print(table)


@app.command()
def explain(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="A rule's id, such as GET-1.")],
) -> None:
    """Print what a rule asks, why it exists, which cases test it, and where they are."""
    from hicache_conformance.suite.driver_conformance import DriverConformance, catalogue

    console = Console(highlight=False)
    known = rules().get(rule.upper())
    if known is None:
        Console(stderr=True).print(
            Text(f"no rule {rule!r}; `hicache conformance rules` lists them", "red")
        )
        raise typer.Exit(BROKEN)
    console.print(
        f"[bold]{known.id}[/]  level {', '.join(known.levels)}"
        + (f"; needs {known.needs}" if known.needs else "")
    )
    console.print(known.text, markup=False)
    console.print(f"\n[bold]Why[/]  {known.why}")
    console.print("\n[bold]Cases[/]")
    cases = [case for case in catalogue().values() if known.id in case.rules]
    for case in cases:
        needs = f"  (needs {', '.join(case.needs)})" if case.needs else ""
        code = inspect.unwrap(getattr(DriverConformance, case.name)).__code__
        console.print(
            f"  {case.name} [dim]{', '.join(case.levels)}[/]{needs}\n    {case.summary}\n"
            f"    [dim]{_in_package(code.co_filename)}:{code.co_firstlineno}[/]",
            markup=True,
            soft_wrap=True,
        )
    if not cases:
        console.print("  none yet: the rule is reported as untested")


@app.command("matrix")
def write_matrix(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS", help="results.json of each driver, or the directory of its report."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here, and not to the terminal.")
    ] = None,
) -> None:
    """Put drivers beside each other, in Markdown.

    Each rule's outcome, and each failure with the command that shows it again.
    """
    from hicache_conformance.report.matrix import matrix, read_run

    try:
        text = matrix([read_run(path) for path in results])
        if output is not None:
            output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        Console(stderr=True).print(Text(str(error), "red"))
        raise typer.Exit(BROKEN) from error
    if output is None:
        # Not by rich, which would wrap the lines of the table.
        sys.stdout.write(text)


def _check_interface(interface: str, driver: str, options: dict[str, str]) -> int:
    """Check that a foreign driver is named as its interface requires.

    Returns:
        The bytes that its pages are multiples of; 0 for pages of any length.

    Raises:
        ValueError: there is no such interface, or no such driver of it.
    """
    from hicache_conformance.interfaces.profile import foreign_driver

    return foreign_driver(interface, driver, options).setup.page_bytes if interface else 0


def _check_commands(commands: list[str]) -> None:
    for command in commands:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"--start-server {command!r}: {error}") from error
        if not words:
            raise ValueError("--start-server needs a command")


def _in_package(path: str) -> str:
    return str(Path(path).relative_to(Path(__file__).parents[1]))


@contextlib.contextmanager
def _exit_on_signals() -> Generator[None]:
    """Raise SIGTERM and SIGHUP as `SystemExit(128 + number)`, as SIGINT is `KeyboardInterrupt`.

    For the main thread only.
    """
    # Child processes and mounts are ended by `finally` blocks, which the default action of these
    # signals skips.
    before = {number: signal.signal(number, _exit) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    # The first is enough: another must not interrupt what it has begun to end.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _check_profile(profile: str) -> None:
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; profiles are {', '.join(PROFILES)}")
