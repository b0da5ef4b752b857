"""`hicache conformance`: judge a driver, explain a rule.

Progress, verdict and exit status of a run are shown here, too.
"""

from __future__ import annotations

import inspect
import shlex
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hicache_conformance.model.outcomes import (
    DID_NOT_RUN,
    STOPPED_AT,
    CaseOutcome,
    Judgement,
    Outcome,
    RuleResult,
    RunRecord,
    Verdict,
    judge,
)
from hicache_conformance.model.rules import Level, parse_levels, rules
from hicache_conformance.model.settings import PROFILES, Settings, parse_page_bytes, parse_profile
from hicache_conformance.report.results import SUITE, reproduction
from hicache_conformance.report.results import results as results_of
from hicache_storage.tools.options import parse_pairs, redacted

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable


CONFORMANT, NOT_CONFORMANT, BROKEN = 0, 1, 2
TRACEBACK_LINES: Final = 6
"""Lines of a traceback in the terminal: the three innermost frames of the driver."""
LOG_LIMIT: Final = 3000
STYLES: Final = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.NOT_DECLARED: "dim",
    Outcome.UNTESTED: "yellow",
    Outcome.ERROR: "magenta",
    Verdict.CONFORMANT: "bold green",
    Verdict.NON_CONFORMANT: "bold red",
    Verdict.INCOMPLETE: "bold yellow",
}
ENGINES: Final = {
    "sglang": ("sglang", "sglang-file"),
    "vllm": ("vllm-tier", "vllm-fs"),
    "lmcache": ("lmcache-l2", "lmcache-fs"),
}
"""Interface, and driver of its own on files, of each engine that `adopt` writes a test for."""

app = typer.Typer(help="Judge drivers by the contract.", no_args_is_help=True)

Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="KEY=VALUE",
        help="An option of the driver; may be repeated. {tmp} stands for an empty directory.",
    ),
]
StartServer = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COMMAND",
        help="Start a server for the driver by this, with {port:NAME} and {tmp} filled in, here and "
        "in -c; it is killed and restarted. In the place of the driver's own; may be repeated. "
        "Reports show it as it is.",
    ),
]
Interface = Annotated[
    str,
    typer.Option(
        help="Interface of a foreign driver, given as MODULE:CLASS or by a name: sglang, vllm-tier "
        "or lmcache-l2. -c fills the options that its engine hands to it."
    ),
]
CaseSeconds = Annotated[float, typer.Option(help="A case that takes longer is taken for hanging.")]


@app.command()
def run(
    driver: Annotated[
        str, typer.Argument(metavar="DRIVER", help="The driver, as `hicache drivers` lists it.")
    ],
    config: Config = None,
    level: Annotated[
        str, typer.Option(metavar="LEVELS", help="Levels to run, comma-separated, or all.")
    ] = "all",
    seed: Annotated[
        int | None, typer.Option(help="Of everything random; drawn and printed if not given.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write index.html, results.json, junit.xml and badge.json here."
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option(help=f"How much chance to spend: {', '.join(PROFILES)}.")
    ] = "default",
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Run only cases whose name has this text; may be repeated."
        ),
    ] = None,
    case_seconds: CaseSeconds = 300.0,
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
    start_server: StartServer = None,
    interface: Interface = "",
) -> None:
    """Run the suite against a driver.

    Exits with 0 if it conforms, 1 if not or if rules stayed untested, 2 if the suite could not do
    its work.
    """
    console = Console(stderr=True)
    # Here, where a mistake costs a line. In the worker it would be a driver that cannot be opened.
    with _mistakes(console):
        levels = parse_levels(level)
        parse_profile(profile)
        options, usual_page_bytes = _checked(interface, driver, config, start_server)
        unit = usual_page_bytes if page_bytes is None else parse_page_bytes(page_bytes)
    settings = Settings(
        **_given(seed=seed, run=run_id),
        profile=profile,
        levels=levels,
        page_bytes=unit,
        driver=driver,
        config=options,
        interface=interface,
        services=start_server or None,
        cases=case or [],
        case_seconds=case_seconds,
    )
    console.print(
        f"driver [bold]{driver}[/], levels {', '.join(levels)}, seed {settings.seed}, profile "
        f"{profile}",
        highlight=False,
    )
    record = _run(console, settings)
    raise typer.Exit(conclude(console, record, settings, report))


@app.command()
def verify(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS", help="results.json of a report, or the directory of the report."
        ),
    ],
    driver: Annotated[
        str, typer.Option(help="The driver, where it is not the installed one of the file's name.")
    ] = "",
    config: Config = None,
    start_server: StartServer = None,
    interface: Interface = "",
    case_seconds: CaseSeconds = 300.0,
) -> None:
    """Repeat the run of a results.json that somebody has published, and compare.

    Seed, levels, profile, page length and cases are those of the file. It is compared with what is
    found here: driver and files, verdict, and the outcome of each rule and case. Options and servers
    are those of this command line, as a file is not to be trusted.

    It proves that about this machine. It does not prove who made the file, nor anything of a
    driver's dependencies and servers, nor that no other seed finds a fault.

    Exits with 0 if all is the same, 1 if something differs, 2 if it could not be run.
    """
    from hicache_conformance.runner import verify as verification

    console = Console(stderr=True)

    with _mistakes(console):
        published = verification.read(results)
        options = parse_pairs(config or [])
        settings = verification.settings_of(published, driver, interface, options, start_server)
        _checked(interface, settings.driver, config, start_server)
    about = published.driver
    console.print(
        f"driver [bold]{escape(about.name)}[/] of {escape(about.distribution)} "
        f"{escape(about.version)}, levels {', '.join(settings.levels)}, seed {settings.seed}, "
        f"profile {settings.profile}, by {SUITE} {escape(published.suite_version)}: "
        f"{escape(published.verdict)}",
        highlight=False,
    )
    record = _run(console, replace(settings, case_seconds=case_seconds))
    if record.broken or record.header is None or record.signal:
        raise typer.Exit(conclude(console, record, settings, None))
    judgement = judge(record, settings.levels, record.catalogue)
    now = msgspec.convert(results_of(record.header, judgement), verification.Published)
    found = verification.compare(published, now)
    for line in found:
        console.print(Text(line, "red"), soft_wrap=True)
    if found:
        console.print(Text(f"different: {len(found)} differences", "red"))
        raise typer.Exit(NOT_CONFORMANT)
    rules_judged = sum(rule.selected for rule in judgement.rules)
    same = f"the same: {judgement.verdict} again, with the same outcome of each of"
    console.print(Text(f"{same} {rules_judged} rules", "green"), soft_wrap=True)


@app.command()
def adopt(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help=f"One of {', '.join(ENGINES)}.")],
    driver: Annotated[
        str,
        typer.Option(
            metavar="DRIVER", help="MODULE:CLASS, or a name; the engine's own if not given."
        ),
    ] = "",
    config: Config = None,
    start_server: StartServer = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Write the files here.")
    ] = Path(),
) -> None:
    """Write a test for the repository of an engine's driver, of a quick run that it makes.

    The rules that the driver breaks today are expected to fail there. Another finding turns the
    test red, and so does a finding that is gone.

    Exits with 0 if the files are written, 2 if the suite could not do its work.
    """
    from hicache_conformance.report.files import TEST, write_adopted

    console = Console(stderr=True)
    with _mistakes(console):
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}; engines are {', '.join(ENGINES)}")
        interface, usual = ENGINES[engine]
        driver = driver or usual
        options, unit = _checked(interface, driver, config, start_server)
        hidden = [name for name, text in redacted(options).items() if text != options[name]]
        if hidden:
            raise ValueError(f"-c {hidden[0]}: what looks like a secret is not written into a test")
    settings = Settings(
        seed=1,
        run="adopt",
        profile="smoke",
        levels=(Level.CORE, Level.POOLS, Level.IDENTITY, Level.FAULTS),
        page_bytes=unit,
        driver=driver,
        config=options,
        interface=interface,
        services=start_server or None,
    )
    record = _run(console, settings)
    judgement = judge(record, settings.levels, record.catalogue)
    if record.header is None or not record.finished or judgement.count(Outcome.ERROR):
        conclude(console, record, settings, None)
        raise typer.Exit(BROKEN)
    run = [
        ["conformance", "run", driver, f"--interface={interface}", "--profile=smoke"],
        [f"--level={','.join(settings.levels)}", "--seed=1", f"--run-id={settings.run}"],
        *([f"--config={name}={value}"] for name, value in options.items()),
        *([f"--start-server={command}"] for command in start_server or ()),
    ]
    broken = write_adopted(output, engine, driver, run, judgement, record.header.not_promised)
    expected = f"expected to fail: {', '.join(broken)}" if broken else "nothing is expected to fail"
    console.print(Text(f"{output / TEST}: {expected}"), soft_wrap=True)


def _run(console: Console, settings: Settings) -> RunRecord:
    from hicache_conformance.runner.run import run as run_suite

    # Silent where nobody watches.
    with console.status("starting") as status:
        return run_suite(settings, progress=lambda record: status.update(now_running(record)))


def _given(**values: object) -> dict[str, Any]:
    """Return what is not None: the others are drawn."""
    return {name: value for name, value in values.items() if value is not None}


@app.command()
def explain(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="A rule's id, such as GET-1.")],
) -> None:
    """Print what a rule asks, why it exists, which cases test it, and where they are."""
    from hicache_conformance.suite.driver_conformance import DriverConformance, catalogue

    console = Console(highlight=False)
    with _mistakes(Console(stderr=True)):
        known = rules().get(rule.upper())
        if known is None:
            raise ValueError(f"no rule {rule!r}; rules are {', '.join(rules())}")
    console.print(
        f"[bold]{known.id}[/]  level {', '.join(known.levels)}"
        + (f"; needs {known.needs}" if known.needs else "")
    )
    console.print(known.text, markup=False)
    console.print(f"\n[bold]Why[/]  {known.why}")
    console.print("\n[bold]Cases[/]")
    home = Path(__file__).parents[1]
    for case in catalogue().values():
        if known.id not in case.rules:
            continue
        needs = f"  (needs {', '.join(case.needs)})" if case.needs else ""
        code = inspect.unwrap(getattr(DriverConformance, case.name)).__code__
        console.print(
            f"  {case.name} [dim]{', '.join(case.levels)}[/]{needs}\n    {case.summary}\n"
            f"    [dim]{Path(code.co_filename).relative_to(home)}:{code.co_firstlineno}[/]",
            markup=True,
            soft_wrap=True,
        )


@contextmanager
def _mistakes(console: Console) -> Generator[None]:
    """Print what is wrong with the arguments of a command, and end it."""
    try:
        yield
    except (OSError, ValueError) as error:
        console.print(Text(str(error), "red"), soft_wrap=True)
        raise typer.Exit(BROKEN) from error


def _checked(
    interface: str, driver: str, config: list[str] | None, commands: list[str] | None
) -> tuple[dict[str, str], int]:
    """Check the options and servers of a run, and that a foreign driver is named as is required.

    Returns:
        The options, and the bytes that the driver's pages are multiples of; 0 for pages of any
        length.

    Raises:
        ValueError: an option or a command has another form, or there is no such interface or driver.
    """
    options = parse_pairs(config or [])
    for command in commands or ():
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"--start-server {command!r}: {error}") from error
        if not words:
            raise ValueError("--start-server needs a command")
    if not interface:
        return options, 0
    from hicache_conformance.interfaces.interface import foreign_driver

    return options, foreign_driver(interface, driver, options).setup.page_bytes


# The terminal's side of a run
# ------------------------------------------------------------------------------------------------


def exit_status(judgement: Judgement, record: RunRecord) -> int:
    """Return the exit status of a command that judged a run."""
    if record.signal:
        return 128 + record.signal
    # A run that did not come to its end has no verdict, whatever it had found until then.
    if not record.finished and not record.stopped:
        return BROKEN
    if judgement.verdict is Verdict.CONFORMANT:
        return CONFORMANT
    # A driver that broke a rule does not conform, also where the suite broke elsewhere.
    suite_broke = judgement.count(Outcome.ERROR) and not judgement.count(Outcome.FAIL)
    return BROKEN if suite_broke else NOT_CONFORMANT


def conclude(console: Console, record: RunRecord, settings: Settings, report: Path | None) -> int:
    """Judge a run, show and report the verdict, and return the command's exit status."""
    if record.broken or record.header is None:
        log = record.log[-LOG_LIMIT:]
        reason = record.broken or record.stopped or f"the suite could not begin:\n{log}"
        console.print(Text(reason, "red"))
        return 128 + record.signal if record.signal else BROKEN
    judgement = judge(record, settings.levels, record.catalogue)
    if report is not None:
        from hicache_conformance.report.files import write_report

        write_report(report, record.header, judgement, record.catalogue)
        (report / "pytest.log").write_text(record.log, encoding="utf-8")
    show(console, judgement, record)
    if not record.finished and not record.stopped:
        console.print(Text(record.log[-LOG_LIMIT:], "red"))
    if report is not None:
        console.print(f"report: {report / 'index.html'}", highlight=False, soft_wrap=True)
    return exit_status(judgement, record)


def show(console: Console, judgement: Judgement, record: RunRecord) -> None:
    """Print every rule that is not a pass: failures first, then what nobody found out.

    The verdict comes last, because that is where a terminal ends.
    """
    assert record.header is not None
    counted = [result for result in judgement.rules if result.selected]
    for shared in judgement.shared_causes():
        console.print(
            Text.assemble(
                ("fail ", STYLES[Outcome.FAIL]),
                f"{len(shared.rules)} rules by one cause: {shared.cause}",
            ),
            soft_wrap=True,
        )
        for line in shared.cause.traceback.splitlines()[:TRACEBACK_LINES]:
            console.print(Text(f"  {line}", "dim"), soft_wrap=True)
    # By outcome and not by rule: an error of the suite must not stand between two failures.
    for outcome in (Outcome.FAIL, Outcome.ERROR):
        for result in counted:
            if result.outcome is outcome:
                console.print(
                    Text.assemble((f"{outcome} ", STYLES[outcome]), _failure(result)),
                    soft_wrap=True,
                )
                # Below each failure, because that is where it is read; wrapped by the terminal and
                # not here, so that it can be copied.
                first = result.failing()[0]
                again = reproduction(record.header, first.case)
                console.print(Text(f"  again: {again}", "dim"), soft_wrap=True)
                # Cases that were named are run to be understood.
                if record.header.replay and record.header.replay.cases:
                    _explain(console, first)
    table = Table("rules", "outcome", "reason", box=None, header_style="bold", pad_edge=False)
    for outcome in (Outcome.UNTESTED, Outcome.NOT_DECLARED):
        for reason, ids in _by_reason(result for result in counted if result.outcome is outcome):
            table.add_row(", ".join(ids), Text(outcome, STYLES[outcome]), Text(reason))
    if table.row_count:
        console.print(table)
    counts = ", ".join(
        f"{judgement.count(outcome)} {outcome}" for outcome in Outcome if judgement.count(outcome)
    )
    seconds = sum(case.seconds for case in record.outcomes)
    console.print(
        f"{counts} (rules); {len(record.outcomes)} cases in {seconds:.1f} s", highlight=False
    )
    console.print(
        Text.assemble((str(judgement.verdict), STYLES[judgement.verdict]), f": {judgement.reason}"),
        soft_wrap=True,
    )


def _by_reason(results: Iterable[RuleResult]) -> list[tuple[str, list[str]]]:
    """Group rules by the reason of their outcome, whichever case gave it."""
    groups = dict[str, list[str]]()
    for result in results:
        case, stopped, rule = result.reason.partition(STOPPED_AT)
        reason = f"their cases{STOPPED_AT}{rule}" if case and stopped else result.reason
        # A run of few cases leaves nearly all rules out: a table of them would hide its finding.
        if not reason.endswith(DID_NOT_RUN):
            groups.setdefault(reason, []).append(result.rule.id)
    return list(groups.items())


def _explain(console: Console, case: CaseOutcome) -> None:
    """Print all there is to say about a failure."""
    console.print(Text(case.detail or case.reason), soft_wrap=True)
    if case.log:
        console.print(Text("Last log lines:", "bold"))
        shown = "\n".join(f"  {line}" for line in case.log.splitlines())
        console.print(Text(shown), soft_wrap=True)


def _failure(result: RuleResult) -> str:
    """A broken rule in one line: what its first failing case said, and how many there are."""
    first, *more = result.failing()
    others = f" and {len(more)} more" if more else ""
    message = first.reason if first.broken_rule else f"{result.rule.id}: {first.reason}"
    return f"{message} [{first.case}{others}]"


def now_running(record: RunRecord) -> str:
    """How far a run has come, in a line."""
    running = record.running
    now = f", {', '.join(running.levels)}: {running.function}" if running else ""
    return f"{len(record.outcomes)} of {record.cases or '?'} cases{now}"
