"""`hicache metadata`: run and administer metadata servers."""

from __future__ import annotations

import argparse
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from hicache_metadata_server.cli import scopes as scope_commands
from hicache_metadata_server.cli import stores as store_commands
from hicache_metadata_server.cli.options import (
    FOUND_PROBLEMS,
    AdminClient,
    Model,
    error_message,
    fail,
    named_scopes,
    of_server,
)
from hicache_metadata_server.cli.token import app as token_app

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_metadata_server.settings import ServerSettings

app = typer.Typer(
    help="Run and administer the metadata server of the 3FS driver. Commands exit with 2 on "
    "errors.",
    no_args_is_help=True,
)
app.command()(store_commands.backup)
app.command()(store_commands.fsck)

POLL_SECONDS: Final = 0.1

app.add_typer(token_app, name="token")
app.add_typer(scope_commands.app, name="scopes")


PASSED_ON: Final = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": list[str](),
}
"""Context of a command whose options are the settings of a server, which has its own parser."""


@app.command(context_settings=PASSED_ON)
def serve(context: typer.Context) -> None:
    """Run a server until SIGTERM or SIGINT. `serve --help` lists its settings.

    All settings can also be set in the environment, such as
    HICACHE_METADATA_STORE; options take precedence. docs/metadata-server.md lists them.
    """
    with _settings(context) as (server, settings):
        server.serve(settings)


@app.command(context_settings=PASSED_ON)
def config(context: typer.Context) -> None:
    """Check the settings, files and store of a server without starting it.

    Takes the options of `serve` and the environment. Writes nothing. Exits with 1 if a variable is
    misspelt, and with 2 if the server would not start.
    """
    with _settings(context) as (server, settings):
        unknown = server.check(settings)
        for variable, nearest in unknown:
            meant = f": {nearest} is" if nearest else ""
            typer.echo(f"{variable} is no setting{meant}", err=True)
        typer.echo("a server would start with these settings")
        raise typer.Exit(FOUND_PROBLEMS if unknown else 0)


@app.command()
@of_server
def status(
    remote: AdminClient,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Time to wait for a server that is starting."),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a server's identity, readiness, limits, and the other servers on its Redis.

    Exits with 1 if it is not ready.
    """
    import msgspec

    from hicache_metadata_server.protocol import About, Scopes

    # A server that is starting refuses connections: without the wait that would be an error.
    until = time.monotonic() + wait
    while time.monotonic() < until and remote.problem():
        time.sleep(POLL_SECONDS)
    about = remote.call("/v2", None, About)
    listed = remote.call("/v2/scopes", None, Scopes)
    reason = remote.problem()
    scopes = listed.scopes
    exit_status = FOUND_PROBLEMS if reason else 0
    if as_json:
        states = ("slots", "live", "leased", "quarantined", "free")
        found = {
            **msgspec.to_builtins(about),
            "ready": not reason,
            "problem": reason,
            "scopes": len(scopes),
            "closed_seconds": max((one.closed_seconds for one in scopes), default=0.0),
            **{name: sum(getattr(one, name) for one in scopes) for name in states},
            "servers": msgspec.to_builtins(listed.servers),
        }
        typer.echo(msgspec.json.encode(found).decode())
        raise typer.Exit(exit_status)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{about.server}, protocol {about.protocol}, instance {about.instance}, durability "
        f"{about.durability}"
    )
    console.print(
        f"{len(scopes)} scopes, {sum(s.live for s in scopes):,} live pages of "
        f"{sum(s.slots for s in scopes):,} slots"
    )
    limits = about.limits
    console.print(
        f"leases last {limits.lease_seconds:g} s, freed slots are quarantined for "
        f"{limits.quarantine_seconds:g} s; {limits.keys:,} keys in a request"
    )
    for server in listed.servers:
        # An address is text of another server's settings: as `Text` it cannot inject markup.
        console.print(
            Text(
                f"{server.url}  {server.state}, {server.scopes:,} scopes, logs of "
                f"{server.log_bytes:,} bytes"
            )
        )
    if closed := [one.closed_seconds for one in scopes if one.closed_seconds]:
        console.print(
            f"{len(closed)} scopes give no slot for {max(closed):.0f} s, in which earlier leases "
            f"may be held: sets are refused, lookups are served",
            style="yellow",
        )
    console.print(Text(f"not ready: {reason}", "yellow") if reason else "ready")
    # A status of its own, so that a probe can tell "not ready" from "not reached" (2).
    raise typer.Exit(exit_status)


@app.command()
@of_server
def inspect(
    remote: AdminClient,
    scope: Annotated[
        str, typer.Argument(metavar="SCOPE", help="rank:namespace, as listed by `scopes`.")
    ] = "",
    model: Model = "",
    key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Key to look up; may be repeated.")
    ] = None,
    slot: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", min=0, help="Slot to look up; may be repeated."),
    ] = None,
) -> None:
    """Show all fields of slots or keys, one JSON object a line."""
    import msgspec

    from hicache_metadata_server.protocol import Inspect, Inspected

    names = named_scopes(remote, [scope] if scope else [], model)
    requests = [Inspect(scope=name, keys=key or [], slots=slot or []) for name in names]
    found = [remote.call("/v2/inspect", request, Inspected).slots for request in requests]
    for name, slots in zip(names, found, strict=True):
        for entry in slots:
            # Scopes of a model have the same keys.
            line = entry if scope else {"scope": name, "found": entry}
            typer.echo(msgspec.json.encode(line).decode())


@app.command()
@of_server
def drain(
    remote: AdminClient,
    off: Annotated[
        bool, typer.Option("--off", help="Stop draining: give new leases again.")
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time to wait for the leases to end.")
    ] = 0.0,
) -> None:
    """Drain a server before a stop: it gives no new leases. Exits with 1 if leases are left."""
    from hicache_metadata_server.protocol import Drain, Draining

    deadline = time.monotonic() + wait
    answer = remote.call("/v2/drain", Drain(enabled=not off), Draining)
    while not off and answer.leases and time.monotonic() < deadline:
        time.sleep(min(0.2, wait))
        answer = remote.call("/v2/drain", Drain(enabled=True), Draining)
    typer.echo("gives leases" if off else f"draining; {answer.leases:,} leases left")
    raise typer.Exit(FOUND_PROBLEMS if answer.leases and not off else 0)


@contextmanager
def _settings(context: typer.Context) -> Generator[tuple[Any, ServerSettings]]:
    """Return the server, and its settings from options and environment; end with their errors."""
    # The packages of the server are an extra, unlike those of the other commands: an operator may
    # administer a server from a machine that cannot run one.
    try:
        from hicache_metadata_server import server
        from hicache_metadata_server.settings import ServerSettings
    except ImportError as error:
        fail(f"the server needs more packages: pip install 'hicache-storage[server]' ({error})")
    from hicache_metadata_server.core.errors import StoreError

    parser = argparse.ArgumentParser(
        prog=context.command_path, description=context.command.help, allow_abbrev=False
    )
    for name, setting in ServerSettings.model_fields.items():
        # Every user of the machine can see a command line.
        if name != "admin_token":
            default = "" if setting.default in (None, "") else f" [{setting.default}]"
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                metavar="VALUE",
                default=argparse.SUPPRESS,
                help=f"{setting.description}{default}",
            )
    try:
        # What is not given is left to the environment and the defaults.
        yield server, ServerSettings(**vars(parser.parse_args(context.args)))
    except (StoreError, ValueError, OSError) as error:
        # An error of pydantic names all wrong settings at once.
        errors = getattr(error, "errors", None)
        if errors is None:
            fail(error_message(error))
        wrong = (
            f"{'.'.join(map(str, one['loc'])) or 'settings'}: {one['msg']}" for one in errors()
        )
        fail("; ".join(wrong))
