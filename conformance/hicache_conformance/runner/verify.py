"""`hicache conformance verify`: checks a published `results.json`, and repeats its run."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from hicache_conformance.report.terminal import BROKEN, ProgressBar
from hicache_storage.spec import HiCacheError
from hicache_storage.tools.options import parse_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_conformance.model.settings import RunFile
    from hicache_conformance.model.verdict import Judgement

SAME, DIFFERENT = 0, 1
LOG_LIMIT: Final = 3000


def verify(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS", help="results.json of a report, or the directory of the report."
        ),
    ],
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            "-c",
            metavar="KEY=VALUE",
            help="An option in the place of the recorded one; secrets are not recorded, and places "
            "that the file names are not used.",
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
    run: Annotated[
        bool,
        typer.Option("--run/--no-run", help="Repeat the run; else check what needs no run."),
    ] = True,
    case_seconds: Annotated[
        float, typer.Option(help="A case that takes longer is taken for hanging.")
    ] = 300.0,
) -> None:
    """Check a results.json that somebody has published, and repeat its run.

    Whether it, and the badge.json beside it, agree with themselves; whether driver and files are
    those that are installed here; whether another run with its seed, levels, profile and options
    comes to the same verdict and the same outcome of each rule.

    It proves that about this machine. It does not prove who made the file, nor anything of a
    driver's dependencies and servers, nor that no other seed finds a fault.

    Exits with 0 if all is the same, 1 if something differs, 2 if it could not be checked or run.
    """
    from hicache_conformance.runner import verification

    console = Console(stderr=True)
    try:
        published, record = verification.read(results)
        given = parse_pairs(config or [])
        badge = (results if results.is_dir() else results.parent) / "badge.json"
        wrong = verification.check_itself(published, badge if badge.exists() else None)
        compared = verification.compare_installed(published, record)
    except (OSError, ValueError, HiCacheError) as error:
        console.print(Text(str(error), "red"), soft_wrap=True)
        raise typer.Exit(BROKEN) from error
    driver = published.driver
    console.print(
        f"driver [bold]{driver.name}[/] of {driver.distribution} {driver.version}, levels "
        f"{', '.join(published.levels)}, seed {published.seed}, profile {published.profile}: "
        f"{published.verdict}",
        highlight=False,
    )
    _list(console, compared.notes, "yellow")
    # What is known before the run is said before it, because a run may take long.
    found = [*wrong, *compared.differences]
    _list(console, found, "red")
    if run:
        try:
            request = verification.run_file(published, record, given, start_server)
        except ValueError as error:
            console.print(Text(str(error), "red"), soft_wrap=True)
            raise typer.Exit(BROKEN) from error
        judgement = _repeat(console, request, case_seconds)
        again = verification.compare_run(published, judgement)
        _list(console, again, "red")
        found += again
    if found:
        number = "1 difference" if len(found) == 1 else f"{len(found)} differences"
        console.print(Text.assemble(("different", "bold red"), f": {number}"))
        raise typer.Exit(DIFFERENT)
    rules = sum(rule.selected for rule in published.rules)
    what = (
        f"{published.verdict} again, with the same outcome of each of {rules} rules"
        if run
        else "the file agrees with itself and with what is installed; nothing was run"
    )
    console.print(Text.assemble(("the same", "bold green"), f": {what}"), soft_wrap=True)
    raise typer.Exit(SAME)


def _list(console: Console, lines: Iterable[str], style: str) -> None:
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def _repeat(console: Console, request: RunFile, case_seconds: float) -> Judgement:
    """Run the suite, and judge the run.

    Raises:
        typer.Exit: it could not be run.
    """
    from hicache_conformance.model.verdict import judge
    from hicache_conformance.runner.child_process import run

    with ProgressBar(console) as bar:
        ran = run(request, case_seconds=case_seconds, progress=bar.update)
    stream = ran.stream
    if stream.broken or stream.header is None:
        reason = stream.broken or f"the suite could not begin:\n{ran.log[-LOG_LIMIT:]}"
        console.print(Text(reason, "red"), soft_wrap=True)
        raise typer.Exit(BROKEN)
    return judge(stream, request.settings.levels, stream.catalogue)
