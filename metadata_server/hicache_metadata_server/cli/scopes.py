"""`hicache metadata scopes`, with `scopes clear` and `scopes delete`."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hicache_metadata_server.cli.options import AdminClient, Model, fail, named_scopes, of_server

app = typer.Typer()
ScopeNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCOPE", help="rank:namespace, as listed by `scopes`."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask; needed where there is no terminal.")]
POLL_SECONDS: Final = 0.2
FORCED_WAIT_SECONDS: Final = 60.0
MAX_WIDTH: Final = 4096


@app.callback(invoke_without_command=True)
@of_server
def scopes(
    remote: AdminClient,
    context: typer.Context,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print all fields, also identity, tenant, owner, hits, misses: one JSON object a "
            "line.",
        ),
    ] = False,
) -> None:
    """List every scope with its slots by state; `scopes clear` empties and `scopes delete` removes some."""
    import msgspec

    from hicache_metadata_server.protocol import Scopes

    if context.invoked_subcommand is not None:
        if any(
            getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
            for name in context.params
        ):
            # They would not reach it, and it would ask another server.
            fail(f"options belong behind `{context.invoked_subcommand}`")
        return
    found = remote.call("/v2/scopes", None, Scopes).scopes
    if as_json:
        for one in found:
            typer.echo(msgspec.json.encode(one).decode())
        return
    table = Table(
        Column("scope", no_wrap=True),
        "slots",
        "live",
        "leased",
        "quarantined",
        "free",
        "slot bytes",
        Column("model", no_wrap=True),
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for one in found:
        numbers = (one.slots, one.live, one.leased, one.quarantined, one.free, one.slot_bytes)
        # A client chooses this text: as `Text` it cannot inject markup.
        table.add_row(one.scope, *(f"{number:,}" for number in numbers), Text(one.model))
    # As wide as it has to be: the other commands need whole names, and a script whole lines.
    Console(highlight=False, soft_wrap=True, width=MAX_WIDTH).print(table)


@app.command()
@of_server
def clear(
    remote: AdminClient,
    scope: ScopeNames = None,
    model: Model = "",
    yes: Yes = False,
) -> None:
    """Remove all pages and leases of scopes. The scopes stay, and data files are never written."""
    from hicache_metadata_server.protocol import Clear, Cleared

    names = named_scopes(remote, scope or [], model)
    _confirm(f"Remove all pages of {', '.join(names)}?", yes=yes)
    # One by one: scopes that are named together get one owner, where servers share a Redis.
    for name in names:
        (pages,) = remote.call("/v2/clear", Clear(scopes=[name]), Cleared).pages
        typer.echo(f"{name}: {pages:,} pages removed")


@app.command()
@of_server
def delete(
    remote: AdminClient,
    scope: ScopeNames = None,
    model: Model = "",
    yes: Yes = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also scopes with pages and leases, which are forgotten."),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            show_default="0, with --force 60",
            help="Time to wait until leased and quarantined slots are free.",
        ),
    ] = None,
) -> None:
    """Remove scopes, one after another: those that are empty, or with --force any.

    Data files stay. An engine that still uses a scope creates it again.
    """
    from hicache_metadata_server.client.errors import InUseError
    from hicache_metadata_server.protocol import Clear, Cleared, Drop, Dropped

    names = named_scopes(remote, scope or [], model)
    # Without --force only empty scopes go, and nothing is lost.
    if force:
        _confirm(f"Remove {', '.join(names)} with all pages?", yes=yes)
    until = time.monotonic() + ((FORCED_WAIT_SECONDS if force else 0.0) if wait is None else wait)
    for name in names:
        if force:
            remote.call("/v2/clear", Clear(scopes=[name]), Cleared)
        while True:
            try:
                remote.call("/v2/drop", Drop(scopes=[name]), Dropped)
                break
            except InUseError:
                # Leases and quarantines end by themselves.
                if time.monotonic() >= until:
                    raise
            time.sleep(POLL_SECONDS)
        typer.echo(f"{name}: deleted")


def _confirm(question: str, *, yes: bool) -> None:
    """Ask, unless the answer is given; ValueError for a script, which has to give it."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ValueError(f"{question} Say so with --yes")
    typer.confirm(question, abort=True)
