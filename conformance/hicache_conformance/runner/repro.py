"""`hicache conformance repro`: repeats one failure of a report, and shrinks it."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from hicache_conformance.report.terminal import BROKEN, ProgressBar
from hicache_storage.tools.options import parse_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.model.settings import Settings
    from hicache_conformance.runner.replay import Record, RecordedCase, Repetition

PASSES, FAILS = 0, 1
LOG_LIMIT: Final = 3000


def repro(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS", help="results.json of a report, or the directory of the report."
        ),
    ],
    rule: Annotated[str, typer.Argument(metavar="RULE", help="The rule that was broken.")],
    case: Annotated[
        str, typer.Option(metavar="TEXT", help="Only its failing cases whose name has this text.")
    ] = "",
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="KEY=VALUE",
            help="An option in the place of the recorded one; secrets are not recorded.",
        ),
    ] = None,
    start_server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="Start a server for the driver by this; may be repeated. None is started from the "
            "file.",
        ),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            help="Another name of the run, for a store that still holds the pages of the recorded "
            "one."
        ),
    ] = None,
    case_seconds: Annotated[
        float, typer.Option(help="A case that takes longer is taken for hanging.")
    ] = 300.0,
) -> None:
    """Run the failing cases of a rule again, and shrink what leads to the failure.

    With the same driver, options, seed, profile and salts.

    Exits with 1 if one of them fails again, 0 if all pass now, 2 if they could not be run.
    """
    from hicache_conformance.runner.replay import Record

    console = Console(stderr=True)
    try:
        record = Record.read(results)
        record.check_services(start_server)
        cases = record.failing(rule.upper(), case)
        options, settings = record.config(parse_pairs(config or [])), record.settings(run_id)
    except (OSError, ValueError) as error:
        console.print(Text(str(error), "red"), soft_wrap=True)
        raise typer.Exit(BROKEN) from error
    _announce(console, record, cases, settings)
    raise typer.Exit(_repeat(console, record, cases, options, settings, start_server, case_seconds))


def _announce(
    console: Console, record: Record, cases: Sequence[RecordedCase], settings: Settings
) -> None:
    from hicache_conformance.report.header import SUITE, installed_version

    what = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
    console.print(
        f"driver [bold]{record.driver.name}[/], seed {settings.seed}, profile {settings.profile}, "
        f"run {settings.run}: {what}",
        highlight=False,
    )
    if installed_version(SUITE) != record.suite_version:
        console.print(
            f"the results are of suite {record.suite_version}, this is {installed_version(SUITE)}: "
            f"it may draw other calls and faults",
            style="yellow",
        )
    if not record.is_throwaway and settings.run == record.how.run:
        console.print(
            "the store may still hold the pages of that run; --run-id gives these cases new ones",
            style="yellow",
        )


def _repeat(
    console: Console,
    record: Record,
    cases: Sequence[RecordedCase],
    options: dict[str, str],
    settings: Settings,
    services: list[str] | None,
    case_seconds: float,
) -> int:
    from hicache_conformance.runner.replay import repeat

    with ProgressBar(console) as bar:
        ran, repeated = repeat(
            record,
            cases,
            options,
            settings,
            services,
            case_seconds=case_seconds,
            progress=bar.update,
        )
    if ran.stream.broken or ran.stream.header is None:
        console.print(
            Text(ran.stream.broken or f"the suite could not begin:\n{ran.log[-LOG_LIMIT:]}", "red")
        )
        return BROKEN
    for one in repeated:
        _show(console, one)
    if any(one.fails for one in repeated):
        return FAILS
    return PASSES if all(one.passes for one in repeated) else BROKEN


def _show(console: Console, one: Repetition) -> None:
    style = "bold red" if one.fails else "green" if one.passes else "yellow"
    console.print(Text.assemble((one.then.name, "bold"), ": ", (str(one), style)), soft_wrap=True)
    if one.now is not None and one.fails:
        console.print(Text(one.now.detail or one.now.reason), soft_wrap=True)
        for title, lines in (("Last calls", one.now.calls), ("Last log lines", one.now.log)):
            if lines:
                console.print(Text.assemble((f"{title}:", "bold")))
                console.print(
                    Text("\n".join(f"  {line}" for line in lines.splitlines())), soft_wrap=True
                )
