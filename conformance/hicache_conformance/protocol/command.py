"""`hicache conformance metadata`: judge a metadata server."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hicache_conformance.model.outcomes import OutcomeStream
from hicache_conformance.model.profiles import PROFILES
from hicache_conformance.model.rules import parse_levels
from hicache_conformance.model.settings import Settings
from hicache_conformance.protocol.rules import LEVELS, Part, parse_parts, protocol_rules
from hicache_conformance.report.terminal import BROKEN, ProgressBar, exit_status, show

if TYPE_CHECKING:
    from hicache_conformance.protocol.runner import RunRequest
    from hicache_conformance.protocol.server import RemoteServer


def metadata(
    url: Annotated[
        str, typer.Option(help="Address of a server that runs. Use one that nobody needs.")
    ] = "",
    start_server: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Start the server by this instead, with {port} and {tmp} filled in; it is killed "
            "and restarted.",
        ),
    ] = "",
    token: Annotated[
        str, typer.Option(help="Bearer token with all rights.", envvar="HICACHE_METADATA_TOKEN")
    ] = "",
    read_token: Annotated[str, typer.Option(help="Bearer token that may only read.")] = "",
    write_token: Annotated[str, typer.Option(help="Bearer token that may read and write.")] = "",
    part: Annotated[str, typer.Option(metavar="PARTS", help=f"{', '.join(Part)}, or all.")] = "all",
    level: Annotated[
        str, typer.Option(metavar="LEVELS", help=f"Of {', '.join(LEVELS)}; or all.")
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
    lease_seconds: Annotated[
        float | None,
        typer.Option(
            help="How long reservations last, of a server without /v2; else they are taken to last "
            "for ever."
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Longest wait for the server's own clock, in seconds.")
    ] = 15.0,
) -> None:
    """Run the metadata protocol's suite against a server (docs/metadata-protocol.md).

    Exits with 0 if it conforms, 1 if not or if rules stayed untested, 2 if the suite could not do
    its work.
    """
    from hicache_conformance.protocol.runner import RunRequest

    console = Console(stderr=True)
    try:
        server = _server(url, start_server)
        if profile not in PROFILES:
            raise ValueError(f"unknown profile {profile!r}; profiles are {', '.join(PROFILES)}")
        levels = tuple(found for found in parse_levels(level) if found in LEVELS)
        if not levels:
            raise ValueError(
                f"no rule of the protocol is of level {level}; levels are {', '.join(LEVELS)}"
            )
        request = RunRequest(
            server=server,
            settings=Settings.fresh(seed, profile, levels),
            parts=parse_parts(part),
            tokens={"admin": token, "read": read_token, "write": write_token},
            lease_seconds=lease_seconds,
            patience=patience,
            again=_again(url, start_server, lease_seconds, patience),
            cases=case or [],
        )
    except ValueError as error:
        console.print(Text(str(error), "red"))
        raise typer.Exit(BROKEN) from error
    console.print(
        f"server [bold]{server.url}[/], parts {', '.join(request.parts)}, levels "
        f"{', '.join(levels)}, seed {request.settings.seed}, "
        f"profile {profile}",
        highlight=False,
    )
    raise typer.Exit(_judge(console, request, report))


def list_protocol_rules() -> None:
    """Print every rule of the protocol, its part and levels, what it needs, and how many cases test
    it."""
    from hicache_conformance.protocol.suite import protocol_cases

    table = Table(
        "rule",
        "part",
        "levels",
        "needs",
        "cases",
        "text",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    cases_by_name = protocol_cases()
    for rule in protocol_rules().values():
        cases = sum(rule.id in case.rules for case in cases_by_name.values())
        table.add_row(rule.id, rule.part, ", ".join(rule.levels), rule.needs, str(cases), rule.text)
    Console().print(table)


def _judge(console: Console, request: RunRequest, report: Path | None) -> int:
    from hicache_conformance.protocol.runner import judge_run, run
    from hicache_conformance.protocol.server import CannotStartError
    from hicache_conformance.protocol.suite import protocol_cases
    from hicache_conformance.report import write_report

    try:
        with request.server, ProgressBar(console) as bar:
            stream = run(request, bar.update)
    except CannotStartError as error:
        stream = OutcomeStream(broken=str(error))
    if stream.broken or stream.header is None:
        console.print(Text(stream.broken, "red"))
        return BROKEN
    judgement = judge_run(request, stream)
    show(console, judgement, stream)
    if report is not None:
        write_report(report, stream.header, judgement, protocol_cases())
        console.print(f"report: {report / 'index.html'}", highlight=False, soft_wrap=True)
    return exit_status(judgement, stream)


def _server(url: str, start_server: str) -> RemoteServer:
    from hicache_conformance.protocol.http_client import HttpClient
    from hicache_conformance.protocol.server import RemoteServer, Served

    if bool(url) == bool(start_server):
        raise ValueError(
            "give either --url of a server that runs, or --start-server with a command that starts "
            "one"
        )
    if start_server:
        return Served(command=start_server.replace("{python}", sys.executable))
    HttpClient(url)
    return RemoteServer(url)


def _again(url: str, start_server: str, lease_seconds: float | None, patience: float) -> str:
    where = f"--url {shlex.quote(url)}" if url else f"--start-server {shlex.quote(start_server)}"
    hints = [] if lease_seconds is None else [f"--lease-seconds {lease_seconds:g}"]
    if patience != 15.0:
        hints.append(f"--patience {patience:g}")
    return " ".join(["hicache conformance metadata", where, *hints])
