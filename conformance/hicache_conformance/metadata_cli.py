"""`hicache conformance metadata`: judge a metadata server."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hicache_conformance.model.profiles import PROFILES
from hicache_conformance.model.rules import parse_levels
from hicache_conformance.model.settings import RunFile, ServerOptions, Settings
from hicache_conformance.protocol.rules import LEVELS, Part, parse_parts, protocol_rules, rules_of
from hicache_conformance.report.terminal import BROKEN, ProgressBar, conclude


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
    from hicache_conformance.protocol.suite import cases_of_parts
    from hicache_conformance.runner.child_process import run

    console = Console(stderr=True)
    try:
        _check_server(url, start_server)
        if profile not in PROFILES:
            raise ValueError(f"unknown profile {profile!r}; profiles are {', '.join(PROFILES)}")
        levels = tuple(found for found in parse_levels(level) if found in LEVELS)
        if not levels:
            raise ValueError(
                f"no rule of the protocol is of level {level}; levels are {', '.join(LEVELS)}"
            )
        parts = parse_parts(part)
    except ValueError as error:
        console.print(Text(str(error), "red"))
        raise typer.Exit(BROKEN) from error
    settings = Settings.fresh(seed, profile, levels)
    server = ServerOptions(
        url=url,
        start_server=start_server.replace("{python}", sys.executable),
        parts=parts,
        tokens={"admin": token, "read": read_token, "write": write_token},
        lease_seconds=lease_seconds,
        patience=patience,
        again=_again(url, start_server, lease_seconds, patience),
    )
    console.print(
        f"server [bold]{escape(url or start_server)}[/], parts {', '.join(parts)}, levels "
        f"{', '.join(levels)}, seed {settings.seed}, profile {profile}",
        highlight=False,
    )
    with ProgressBar(console) as bar:
        ran = run(
            RunFile(settings=settings, server=server, cases=case or []),
            # A case may wait several times for leases and quarantines to end.
            case_seconds=max(300.0, 20 * patience),
            progress=bar.update,
        )
    raise typer.Exit(
        conclude(console, ran, settings, cases_of_parts(parts), report, rules_of(parts))
    )


def list_protocol_rules() -> None:
    """Print every rule of the protocol, its part, levels and needs, and its number of cases."""
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


def _check_server(url: str, start_server: str) -> None:
    """Check that one server is named, as it must be.

    Raises:
        ValueError: it is not.
    """
    from hicache_conformance.protocol.http_client import HttpClient
    from hicache_conformance.protocol.server import Served

    if bool(url) == bool(start_server):
        raise ValueError(
            "give either --url of a server that runs, or --start-server with a command that starts "
            "one"
        )
    if start_server:
        Served(command=start_server)
    else:
        HttpClient(url)


def _again(url: str, start_server: str, lease_seconds: float | None, patience: float) -> str:
    where = f"--url {shlex.quote(url)}" if url else f"--start-server {shlex.quote(start_server)}"
    hints = [] if lease_seconds is None else [f"--lease-seconds {lease_seconds:g}"]
    if patience != 15.0:
        hints.append(f"--patience {patience:g}")
    return " ".join(["hicache conformance metadata", where, *hints])
