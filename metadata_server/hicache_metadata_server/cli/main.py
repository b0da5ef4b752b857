"""`hicache metadata`: run and administer metadata servers."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from hicache_metadata_server.cli import backup as backup_commands
from hicache_metadata_server.cli import fsck as fsck_commands
from hicache_metadata_server.cli import scopes as scope_commands
from hicache_metadata_server.cli.options import (
    FOUND_PROBLEMS,
    LOCAL,
    Ca,
    Certificate,
    Model,
    Token,
    Url,
    error_message,
    exit_on_error,
    fail,
    named_scopes,
    open_client,
    opened_store,
)
from hicache_metadata_server.cli.token import app as token_app

if TYPE_CHECKING:
    from hicache_metadata_server.cli.admin_client import AdminClient

app = typer.Typer(
    help="Run and administer the metadata server of the 3FS driver. Commands exit with 2 on "
    "errors.",
    no_args_is_help=True,
)
app.command()(backup_commands.backup)

POLL_SECONDS: Final = 0.1
OFFLINE: Final = "Check this store instead: a sqlite:///FILE that no server has open, or a Redis."

app.add_typer(token_app, name="token")
app.add_typer(scope_commands.app, name="scopes")


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(show_default="127.0.0.1", help="Address to listen on.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(show_default="18000", help="Port to listen on; 0 for a free one.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default="memory:",
            help="sqlite:///FILE, redis://HOST:PORT/DB, or memory:",
        ),
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(
            show_default="process",
            help="Failures that acknowledged changes survive: process (kill -9), machine (power "
            "loss); with a Redis also none.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of tokens, managed by `hicache metadata token`. Without it all clients have "
            "all rights."
        ),
    ] = None,
    lease_seconds: Annotated[
        float | None,
        typer.Option(
            show_default="30", help="Duration of a lease, unless a writer asks for another one."
        ),
    ] = None,
    quarantine_seconds: Annotated[
        float | None,
        typer.Option(
            show_default="5",
            help="Time that a freed slot stays in quarantine before it is leased again.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate; enables https.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of authorities; clients need a certificate of one of them."),
    ] = None,
    tenants_file: Annotated[
        Path | None, typer.Option(help="TOML file of the tenants' quotas.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(show_default="json", help="Format of the log: json or console.")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(show_default="info", help="Level of the log: debug, info, warning or error."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", hidden=True, help="Check settings, files and store, write nothing, and exit."
        ),
    ] = False,
) -> None:
    """Run a server until SIGTERM or SIGINT.

    All settings can also be set in the environment, such as
    HICACHE_METADATA_STORE; options take precedence. docs/metadata-server.md lists them.
    """
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "store": store,
        "durability": durability,
        "token_file": token_file,
        "lease_seconds": lease_seconds,
        "quarantine_seconds": quarantine_seconds,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "log_format": log_format,
        "log_level": log_level,
        "tls_client_ca": tls_client_ca,
        "tenants_file": tenants_file,
    }
    # The packages of the server are an extra, unlike those of the other commands: an operator may
    # administer a server from a machine that cannot run one.
    try:
        from hicache_metadata_server import server
        from hicache_metadata_server.settings import ServerSettings
    except ImportError as error:
        fail(f"the server needs more packages: pip install 'hicache-storage[server]' ({error})")
    from hicache_metadata_server.core.errors import StoreError

    try:
        settings = ServerSettings(
            # None is an option that is not given: the environment and the defaults apply.
            **{name: value for name, value in given.items() if value is not None}
        )
        # The settings themselves are validated in both cases, by the line above.
        if check:
            unknown = server.check(settings)
            for variable, nearest in unknown:
                meant = f": {nearest} is" if nearest else ""
                typer.echo(f"{variable} is no setting{meant}", err=True)
            typer.echo("a server would start with these settings")
            raise typer.Exit(FOUND_PROBLEMS if unknown else 0)
        server.serve(settings)
    except (StoreError, ValueError, OSError) as error:
        fail(_settings_error(error))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def config(context: typer.Context) -> None:
    """Check the settings, files and store of a server without starting it.

    Takes the options of `serve` and the environment. Writes nothing. Exits with 1 if a variable is
    misspelt, and with 2 if the server would not start.
    """
    assert context.parent is not None, "below `metadata`"
    group: Any = context.parent.command
    command = group.get_command(context, "serve")
    with command.make_context("config", [*context.args, "--check"], parent=context.parent) as made:
        command.invoke(made)


@app.command()
def status(
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Time to wait for a server that is starting."),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Show a server's identity, readiness, limits, and the other servers on its Redis.

    Exits with 1 if it is not ready.
    """
    from hicache_metadata_server.protocol import About, Scopes

    with exit_on_error():
        remote = open_client(url, token_file, ca, certificate)
        # A server that is starting refuses connections: without the wait that would be an error.
        _wait_until_ready(remote, time.monotonic() + wait)
        about = remote.call("/v2", None, About)
        listed = remote.call("/v2/scopes", None, Scopes)
        ready, reason = remote.is_ready()
    scopes = listed.scopes
    exit_status = 0 if ready else FOUND_PROBLEMS
    if as_json:
        typer.echo(_status_json(about, listed, reason))
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
    console.print("ready" if ready else Text(f"not ready: {reason}", "yellow"))
    # A status of its own, so that a probe can tell "not ready" from "not reached" (2).
    raise typer.Exit(exit_status)


@app.command()
def inspect(
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
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Show all fields of slots or keys, one JSON object a line."""
    import msgspec

    from hicache_metadata_server.protocol import Inspect, Inspected

    with exit_on_error():
        remote = open_client(url, token_file, ca, certificate)
        names = named_scopes(remote, [scope] if scope else [], model)
        requests = [Inspect(scope=name, keys=key or [], slots=slot or []) for name in names]
        found = [remote.call("/v2/inspect", request, Inspected).slots for request in requests]
    for name, slots in zip(names, found, strict=True):
        for entry in slots:
            # Scopes of a model have the same keys.
            line = entry if scope else {"scope": name, "found": entry}
            typer.echo(msgspec.json.encode(line).decode())


@app.command()
def fsck(
    scope: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCOPE", help="rank:namespace, as listed by `scopes`; default: all."
        ),
    ] = None,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
    store: Annotated[str, typer.Option(metavar="URL", help=OFFLINE)] = "",
    files: fsck_commands.Files = None,
    sample: fsck_commands.Sample = None,
    repair: fsck_commands.Repair = False,
) -> None:
    """Check the invariants of scopes, and with --files the bytes of their pages.

    Exits with 1 if it finds a problem.
    """
    # Without files and repair a server checks itself, faster than a client could read its slots.
    if store or files is not None or repair:
        raise typer.Exit(
            fsck_commands.fsck_with_files(
                scope or [], url, (token_file, ca, certificate), store, files, sample, repair=repair
            )
        )
    with exit_on_error():
        checked = fsck_commands.fsck_each(
            open_client(url, token_file, ca, certificate), scope or []
        )
    for problem in checked.problems:
        typer.echo(problem)
    # Standard output has the problems alone, one a line, for scripts.
    typer.echo(
        f"{checked.slots:,} slots checked, {len(checked.problems) or 'no'} problems", err=True
    )
    raise typer.Exit(FOUND_PROBLEMS if checked.problems else 0)


@app.command("import")
def import_file(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Persistence file of SGLang's metadata server."),
    ],
    store: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="sqlite:///FILE that no server has open, created if missing.",
        ),
    ],
    tenant: Annotated[str, typer.Option(help="Tenant of the scopes; none by default.")] = "",
) -> None:
    """Import the persistence file of SGLang's metadata server.

    Entries that contradict each other are dropped and counted.
    """
    from hicache_metadata_server.core.sglang_import import read_persistence_file

    with exit_on_error():
        # Parsed before the store is opened: a file that is not valid must not create a store.
        found = read_persistence_file(file.read_bytes())
        _import(store, found, tenant)
    for scope in found:
        reasons = "".join(
            f"; {count:,} dropped: {reason}" for reason, count in sorted(scope.dropped.items())
        )
        lost = f"; {scope.lost:,} lost slots are free again" if scope.lost else ""
        typer.echo(
            f"{scope.name}: {len(scope.pages):,} pages in {scope.slots:,} slots{reasons}{lost}"
        )


@app.command()
def drain(
    off: Annotated[
        bool, typer.Option("--off", help="Stop draining: give new leases again.")
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time to wait for the leases to end.")
    ] = 0.0,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Drain a server before a stop: it gives no new leases. Exits with 1 if leases are left."""
    from hicache_metadata_server.protocol import Drain, Draining

    deadline = time.monotonic() + wait
    with exit_on_error():
        remote = open_client(url, token_file, ca, certificate)
        answer = remote.call("/v2/drain", Drain(enabled=not off), Draining)
        while not off and answer.leases and time.monotonic() < deadline:
            time.sleep(min(0.2, wait))
            answer = remote.call("/v2/drain", Drain(enabled=True), Draining)
    typer.echo("gives leases" if off else f"draining; {answer.leases:,} leases left")
    raise typer.Exit(FOUND_PROBLEMS if answer.leases and not off else 0)


def _status_json(about: Any, listed: Any, problem: str) -> str:
    import msgspec

    states = ("slots", "live", "leased", "quarantined", "free")
    counts = {name: sum(getattr(scope, name) for scope in listed.scopes) for name in states}
    found = {
        **msgspec.to_builtins(about),
        "ready": not problem,
        "problem": problem,
        "scopes": len(listed.scopes),
        **counts,
        "servers": msgspec.to_builtins(listed.servers),
    }
    return msgspec.json.encode(found).decode()


def _wait_until_ready(remote: AdminClient, until: float) -> None:
    """Poll until the server is ready, or until a time; leave errors to the next call."""
    from hicache_metadata_server.cli.admin_client import RemoteError

    # Errors are expected until the server listens.
    while time.monotonic() < until:
        with suppress(RemoteError):
            if remote.is_ready()[0]:
                return
        time.sleep(POLL_SECONDS)


def _import(store: str, scopes: Any, tenant: str) -> None:
    from hicache_metadata_server.core.sglang_import import import_scopes

    with opened_store(store, create=True) as (service, opened):
        import_scopes(service, scopes, time.time(), tenant)
        opened.write(service.take_changes())


def _settings_error(error: Exception) -> str:
    # An error of pydantic names all wrong settings at once.
    errors = getattr(error, "errors", None)
    if errors is None:
        return error_message(error)
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'settings'}: {one['msg']}" for one in errors()
    )
