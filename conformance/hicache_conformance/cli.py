"""`hicache conformance`: run the suite, list the rules, explain one."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hicache_conformance.ending import ended_in_order
from hicache_conformance.manifest import Level, parse_levels, rules
from hicache_conformance.metadata.command import list_protocol_rules, metadata
from hicache_conformance.outcomes import Outcome, Stream
from hicache_conformance.profiles import PROFILES
from hicache_conformance.report.results import reproduction, shrinking
from hicache_conformance.repro import repro
from hicache_conformance.settings import Settings
from hicache_conformance.verdict import Verdict, judge
from hicache_storage.tools.options import parse_pairs

if TYPE_CHECKING:
    from hicache_conformance.verdict import Judgement, RuleResult

app = typer.Typer(help="Judge drivers by the contract, and metadata servers by their protocol.", no_args_is_help=True)

CONFORMANT, NOT_CONFORMANT, BROKEN = 0, 1, 2
STYLES: Final = {
    Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.NOT_DECLARED: "dim", Outcome.UNTESTED: "yellow", Outcome.ERROR: "magenta",
    Verdict.CONFORMANT: "bold green", Verdict.NON_CONFORMANT: "bold red", Verdict.INCOMPLETE: "bold yellow",
}  # fmt: skip


@app.command()
def run(
    driver: Annotated[str, typer.Argument(metavar="DRIVER", help="The driver, as `hicache drivers` lists it.")],
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="KEY=VALUE",
            help="An option of the driver; may be repeated. {tmp} stands for an empty directory.",
        ),
    ] = None,
    level: Annotated[str, typer.Option(metavar="LEVELS", help="Levels to run, comma-separated, or all.")] = "all",
    seed: Annotated[int | None, typer.Option(help="Of everything random; drawn and printed if not given.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write index.html, results.json, junit.xml and badge.json here.")
    ] = None,
    profile: Annotated[str, typer.Option(help=f"How much chance to spend: {', '.join(PROFILES)}.")] = "default",
    case: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Run only cases whose name has this text; may be repeated.")
    ] = None,
    case_seconds: Annotated[float, typer.Option(help="A case that takes longer is taken for hanging.")] = 300.0,
    run_id: Annotated[str | None, typer.Option(help="Name of this run within the identities' salts; drawn if not given.")] = None,
    serve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="Start a server for the driver by this, with {port:NAME} and {tmp} filled in, here and in -c; it is killed and "
            "restarted. In the place of the driver's own; may be repeated. Reports show it as it is.",
        ),
    ] = None,
    interface: Annotated[
        str,
        typer.Option(
            help="Interface of a foreign driver, given as MODULE:CLASS or by a name: sglang. -c fills its extra_config."
        ),
    ] = "",
) -> None:
    """Run the suite against a driver.

    Exits with 0 if it conforms, 1 if not or if rules stayed untested, 2 if the suite could not do its work.
    """
    console = Console(stderr=True)
    try:
        levels = parse_levels(level)
        options = parse_pairs(config or [])
        if profile not in PROFILES:
            raise ValueError(f"unknown profile {profile!r}; profiles are {', '.join(PROFILES)}")
        _check_interface(interface, driver, options)
        _check_commands(serve or [])
    except ValueError as error:
        console.print(Text(str(error), "red"))
        raise typer.Exit(BROKEN) from error
    settings = Settings.fresh(seed, profile, levels, run_id)
    console.print(
        f"driver [bold]{driver}[/], levels {', '.join(levels)}, seed {settings.seed}, profile {profile}", highlight=False
    )
    raise typer.Exit(_run(console, driver, options, settings, case or [], case_seconds, report, serve or None, interface))


app.command()(repro)
app.command()(metadata)


@app.callback()
def conformance(context: typer.Context) -> None:
    """Whether a driver keeps the HiCacheStorage v2 contract."""
    context.with_resource(ended_in_order())


@app.command("rules")
def list_rules(
    level: Annotated[str, typer.Option(metavar="LEVELS", help="Only of these levels.")] = "all",
    of_metadata: Annotated[bool, typer.Option("--metadata", help="Those of the metadata protocol instead.")] = False,
) -> None:
    """List every rule of the contract, its levels, the capability it needs, and how many cases test it."""
    from hicache_conformance.catalogue import catalogue

    if of_metadata:
        list_protocol_rules()
        return
    try:
        levels = parse_levels(level)
    except ValueError as error:
        Console(stderr=True).print(Text(str(error), "red"))
        raise typer.Exit(BROKEN) from error
    table = Table("rule", "levels", "needs", "cases", "text", box=None, header_style="bold", pad_edge=False)
    for rule in rules().values():
        if set(rule.levels) & set(levels):
            cases = sum(rule.id in case.rules for case in catalogue().values())
            table.add_row(rule.id, ", ".join(rule.levels), rule.needs, str(cases), rule.text)
    Console().print(table)


@app.command()
def explain(rule: Annotated[str, typer.Argument(metavar="RULE", help="A rule's id, such as GET-1.")]) -> None:
    """Say what a rule asks, why it exists, and which cases test it."""
    from hicache_conformance.catalogue import catalogue
    from hicache_conformance.metadata.book import protocol_cases, protocol_rules

    console = Console(highlight=False)
    is_protocol = rule.upper() in protocol_rules()
    known = (protocol_rules() if is_protocol else rules()).get(rule.upper())
    if known is None:
        Console(stderr=True).print(Text(f"no rule {rule!r}; `hicache conformance rules` lists them", "red"))
        raise typer.Exit(BROKEN)
    console.print(f"[bold]{known.id}[/]  level {', '.join(known.levels)}" + (f"; needs {known.needs}" if known.needs else ""))
    console.print(known.text, markup=False)
    console.print(f"\n[bold]Why[/]  {known.why}")
    console.print("\n[bold]Cases[/]")
    cases = [case for case in (protocol_cases() if is_protocol else catalogue()).values() if known.id in case.rules]
    for case in cases:
        needs = f"  (needs {', '.join(case.needs)})" if case.needs else ""
        console.print(f"  {case.name} [dim]{', '.join(case.levels)}[/]{needs}\n    {case.summary}", markup=True)
    if not cases:
        console.print("  none yet: the rule is reported as untested")


@app.command("matrix")
def write_matrix(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS", help="results.json of each driver, or the directory of its report.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it here, and not to the terminal.")] = None,
) -> None:
    """Put drivers beside each other: each rule's outcome, each failure with the command that shows it again, in Markdown."""
    from hicache_conformance.report.matrix import matrix, read_run

    try:
        text = matrix([read_run(path) for path in results])
        if output is not None:
            output.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        Console(stderr=True).print(Text(str(error), "red"))
        raise typer.Exit(BROKEN) from error
    if output is None:
        sys.stdout.write(text)


def _run(
    console: Console,
    driver: str,
    options: dict[str, str],
    settings: Settings,
    cases: list[str],
    case_seconds: float,
    report: Path | None,
    services: list[str] | None,
    interface: str,
) -> int:
    from hicache_conformance.catalogue import catalogue
    from hicache_conformance.runner import run as run_suite

    with Bar(console) as bar:
        ran = run_suite(
            driver, options, settings, cases=cases, case_seconds=case_seconds, services=services, interface=interface,
            progress=bar.update,
        )  # fmt: skip
    stream = ran.stream
    if stream.broken or stream.header is None:
        console.print(Text(stream.broken or f"the suite could not begin:\n{ran.log[-3000:]}", "red"))
        return BROKEN
    judgement = judge(stream, settings.levels, catalogue())
    if report is not None:
        from hicache_conformance.report import write_report

        write_report(report, stream.header, judgement)
        (report / "pytest.log").write_text(ran.log, encoding="utf-8")
    show(console, judgement, stream, report and report / "results.json")
    if not stream.finished:
        console.print(Text(f"the run hung for {case_seconds:.0f} s and was ended" if ran.hung else ran.log[-1500:], "red"))
    if report is not None:
        console.print(f"report: {report / 'index.html'}", highlight=False, soft_wrap=True)
    return exit_status(judgement, stream)


def exit_status(judgement: Judgement, stream: Stream) -> int:
    """What a command that judged exits with."""
    if not stream.finished:
        return BROKEN
    if judgement.verdict is Verdict.CONFORMANT:
        return CONFORMANT
    suite_broke = judgement.count(Outcome.ERROR) and not judgement.count(Outcome.FAIL)
    return BROKEN if suite_broke else NOT_CONFORMANT


def show(console: Console, judgement: Judgement, stream: Stream, results: Path | None = None) -> None:
    """Every rule that is not a pass, and the verdict last, because that is where a terminal ends.

    Args:
        console: where to.
        judgement: of the run.
        stream: the run.
        results: its `results.json`, if it has been written.
    """
    table = Table("rule", "outcome", "reason", box=None, header_style="bold", pad_edge=False)
    counted = [result for result in judgement.rules if result.selected]
    for result in counted:
        if result.outcome not in (Outcome.PASS, Outcome.FAIL):
            table.add_row(result.rule.id, Text(result.outcome, STYLES[result.outcome]), Text(result.reason))
    if table.row_count:
        console.print(table)
    for result in counted:
        if result.outcome is Outcome.FAIL:
            console.print(Text.assemble(("fail ", STYLES[Outcome.FAIL]), _failure(result)), soft_wrap=True)
        if result.outcome in (Outcome.FAIL, Outcome.ERROR):
            console.print(Text(f"  again: {_again(stream, result, results)}", "dim"), soft_wrap=True)
    counts = ", ".join(f"{judgement.count(outcome)} {outcome}" for outcome in Outcome if judgement.count(outcome))
    seconds = sum(case.seconds for case in stream.outcomes)
    console.print(f"{counts} (rules); {len(stream.outcomes)} cases in {seconds:.1f} s", highlight=False)
    console.print(Text.assemble((str(judgement.verdict), STYLES[judgement.verdict]), f": {judgement.reason}"), soft_wrap=True)


def _again(stream: Stream, result: RuleResult, results: Path | None) -> str:
    """The command that repeats a failure: from the results, where they have been written, or of the first failing case."""
    assert stream.header is not None
    command = shrinking(stream.header, result.rule.id, str(results)) if results is not None else ""
    return command or reproduction(stream.header, result.failing()[0].case)


def _failure(result: RuleResult) -> str:
    """A broken rule in one line: what its first failing case said, and how many there are."""
    first, *more = result.failing()
    others = f" and {len(more)} more" if more else ""
    message = first.reason if first.broken_rule else f"{result.rule.id}: {first.reason}"
    return f"{message} [{first.case}{others}]"


def _check_interface(interface: str, driver: str, options: dict[str, str]) -> None:
    """See to it that a foreign driver is named as its interface wants it.

    Raises:
        ValueError: there is no such interface, or no such driver of it.
    """
    from hicache_conformance.foreign.setup import INTERFACES, setup_of

    if interface and interface not in INTERFACES:
        raise ValueError(f"unknown interface {interface!r}; interfaces are {', '.join(INTERFACES)}")
    if interface:
        setup_of(driver, options)


def _check_commands(commands: list[str]) -> None:
    for command in commands:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"--serve {command!r}: {error}") from error
        if not words:
            raise ValueError("--serve needs a command")


class Bar:
    """A progress bar where somebody watches; silent in a log."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, stream: Stream) -> None:
        """Show how far a run has come."""
        now = ", ".join(stream.running.rules) if stream.running else ""
        self._progress.update(self._task, total=stream.cases or None, completed=len(stream.outcomes), description=now)


__all__ = ["Level", "app"]
