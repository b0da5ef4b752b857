"""`hicache metadata`: run a metadata server, and look after one."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hicache_metadata_server.cli import backup as backup_commands
from hicache_metadata_server.cli import fsck as fsck_commands
from hicache_metadata_server.cli import scopes as scope_commands
from hicache_metadata_server.cli import simulate as simulate_commands
from hicache_metadata_server.cli.options import (
    FOUND_PROBLEMS,
    LOCAL,
    Ca,
    Certificate,
    Token,
    Url,
    connect_remote,
    error_message,
    exit_on_error,
    fail,
)
from hicache_metadata_server.cli.token import app as token_app

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_metadata_server.cli.remote_server import RemoteServer
    from hicache_metadata_server.core.service import MetadataService

app = typer.Typer(
    help="The metadata server of the 3FS driver: run one, and look after it. A command that could "
    "not do its work exits with 2.",
    no_args_is_help=True,
)
for _command in (
    scope_commands.clear,
    scope_commands.drop,
    backup_commands.copy,
    backup_commands.backup,
    backup_commands.restore,
    simulate_commands.simulate,
):
    app.command()(_command)

POLL_SECONDS: Final = 0.1
OFFLINE: Final = "Read this store instead: a sqlite:///FILE that no server has open, or a Redis."

app.add_typer(token_app, name="token")


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(show_default="127.0.0.1", help="Address to listen at.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(show_default="18000", help="Port to listen at; a free one if 0.")
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
            help="What acknowledged changes survive: process (kill -9), machine (loss of power); "
            "of a Redis, also none.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of tokens, made by `hicache metadata token`. Without, everybody may do "
            "everything."
        ),
    ] = None,
    lease_seconds: Annotated[
        float | None,
        typer.Option(
            show_default="30", help="How long a writer has a slot, if it asks for nothing else."
        ),
    ] = None,
    quarantine_seconds: Annotated[
        float | None,
        typer.Option(
            show_default="5",
            help="How long a freed slot stays in quarantine before it is given out again.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file; the server speaks https then.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file; clients have to show a certificate of these authorities."),
    ] = None,
    tenants_file: Annotated[
        Path | None, typer.Option(help="TOML file of the tenants' quotas.")
    ] = None,
    audit_file: Annotated[
        Path | None, typer.Option(show_default="the log", help="File for audit lines, appended to.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(show_default="json", help="json or console.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(show_default="info", help="debug, info, warning or error.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check settings, files and store, start nothing, and write nothing."
        ),
    ] = False,
) -> None:
    """Run a server until SIGTERM or SIGINT.

    All these, and more limits, can be set in the environment, as in HICACHE_METADATA_STORE; options
    count first. docs/metadata-server.md lists them.
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
        "audit_file": audit_file,
    }
    try:
        from hicache_metadata_server import server
        from hicache_metadata_server.settings import ServerSettings
    except ImportError as error:
        fail(f"the server needs more packages: pip install 'hicache-storage[server]' ({error})")
    from hicache_metadata_server.storage.store import StoreError

    try:
        settings = ServerSettings(
            **{name: value for name, value in given.items() if value is not None}
        )
        if check:
            server.check(settings)
            typer.echo("a server would start with these settings")
        else:
            server.serve(settings)
    except (StoreError, ValueError, OSError) as error:
        fail(_settings_error(error))


@app.command()
def status(
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Wait so long for a server that has just been started."
        ),
    ] = 0.0,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Tell who answers, whether it is ready, and its limits. Exits with 1 if it is not ready."""
    from hicache_metadata_server.protocol import About, Scopes

    with exit_on_error():
        remote = connect_remote(url, token_file, ca, certificate)
        _wait_until_ready(remote, time.monotonic() + wait)
        about, scopes = (
            remote.call("/v2", None, About),
            remote.call("/v2/scopes", None, Scopes).scopes,
        )
        ready, why = remote.is_ready()
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
    console.print("ready" if ready else Text(f"not ready: {why}", "yellow"))
    raise typer.Exit(0 if ready else FOUND_PROBLEMS)


@app.command()
def scopes(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="All that is known, identity, tenant, hits and misses too: one JSON object a line.",
        ),
    ] = False,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """List every scope with its slots by state."""
    import msgspec

    from hicache_metadata_server.protocol import Scopes

    with exit_on_error():
        found = (
            connect_remote(url, token_file, ca, certificate).call("/v2/scopes", None, Scopes).scopes
        )
    if as_json:
        for one in found:
            typer.echo(msgspec.json.encode(one).decode())
        return
    # A name is of use as a whole, for `clear` and `inspect`.
    name = Column("scope", overflow="fold")
    table = Table(
        name,
        "slots",
        "live",
        "leased",
        "quarantined",
        "free",
        "slot bytes",
        Column("model", overflow="fold"),
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for one in found:
        numbers = (one.slots, one.live, one.leased, one.quarantined, one.free, one.slot_bytes)
        # A client's text is no markup.
        table.add_row(one.scope, *(f"{number:,}" for number in numbers), Text(one.model))
    Console(highlight=False).print(table)


@app.command()
def inspect(
    scope: Annotated[
        str, typer.Argument(metavar="SCOPE", help="rank:namespace, as `scopes` lists it.")
    ],
    key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A key; may be repeated.")
    ] = None,
    slot: Annotated[
        list[int] | None, typer.Option(metavar="NUMBER", min=0, help="A slot; may be repeated.")
    ] = None,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Tell all that is known about some slots or keys, as JSON, one a line."""
    import msgspec

    from hicache_metadata_server.protocol import Inspect, Inspected

    with exit_on_error():
        request = Inspect(scope=scope, keys=key or [], slots=slot or [])
        found = (
            connect_remote(url, token_file, ca, certificate)
            .call("/v2/inspect", request, Inspected)
            .slots
        )
    for entry in found:
        typer.echo(msgspec.json.encode(entry).decode())


@app.command()
def fsck(
    scope: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCOPE", help="rank:namespace, as `scopes` lists it; all if none is given."
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
    """Check every invariant of some scopes or all, and with --files the bytes of their pages. Exits
    with 1 if something is wrong."""
    from hicache_metadata_server.protocol import Checked, Fsck

    if files is not None or repair:
        raise typer.Exit(
            fsck_commands.fsck_with_files(
                scope or [], url, (token_file, ca, certificate), store, files, sample, repair=repair
            )
        )
    with exit_on_error():
        request = Fsck(scopes=scope or [])
        checked = (
            _fsck_store(store, request)
            if store
            else connect_remote(url, token_file, ca, certificate).call("/v2/fsck", request, Checked)
        )
    for problem in checked.problems:
        typer.echo(problem)
    typer.echo(
        f"{checked.slots:,} slots checked, {len(checked.problems) or 'no'} problems", err=True
    )
    raise typer.Exit(FOUND_PROBLEMS if checked.problems else 0)


@app.command("import")
def import_file(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The persistence file of SGLang's metadata server."),
    ],
    store: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="sqlite:///FILE of a server that does not run, made if it is not there; or a "
            "Redis.",
        ),
    ],
    tenant: Annotated[str, typer.Option(help="Whose the scopes are to be; none by default.")] = "",
) -> None:
    """Take over what SGLang's metadata server has kept; what contradicts itself is dropped and
    counted."""
    from hicache_metadata_server.core.sglang_import import read_persistence_file

    with exit_on_error():
        found = read_persistence_file(file.read_bytes())
        _import(store, found, tenant)
    for scope in found:
        why = "".join(
            f"; {count:,} dropped: {reason}" for reason, count in sorted(scope.dropped.items())
        )
        lost = f"; {scope.lost:,} lost slots are free again" if scope.lost else ""
        typer.echo(f"{scope.name}: {len(scope.pages):,} pages in {scope.slots:,} slots{why}{lost}")


@app.command()
def drain(
    off: Annotated[bool, typer.Option("--off", help="Give leases again.")] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Wait so long for the leases that are out.")
    ] = 0.0,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Let a server give no new leases, before it is stopped. Exits with 1 if leases are still
    out."""
    from hicache_metadata_server.protocol import Drain, Draining

    deadline = time.monotonic() + wait
    with exit_on_error():
        remote = connect_remote(url, token_file, ca, certificate)
        answer = remote.call("/v2/drain", Drain(enabled=not off), Draining)
        while not off and answer.leases and time.monotonic() < deadline:
            time.sleep(min(0.2, wait))
            answer = remote.call("/v2/drain", Drain(enabled=True), Draining)
    typer.echo("gives leases" if off else f"drains; {answer.leases:,} leases are out")
    raise typer.Exit(FOUND_PROBLEMS if answer.leases and not off else 0)


def _wait_until_ready(remote: RemoteServer, until: float) -> None:
    """Ask until it is ready, or the time is over; the next call says what is wrong."""
    from hicache_metadata_server.cli.remote_server import RemoteError

    while time.monotonic() < until:
        with suppress(RemoteError):
            if remote.is_ready()[0]:
                return
        time.sleep(POLL_SECONDS)


def _import(store: str, scopes: Any, tenant: str) -> None:
    from hicache_metadata_server.core.sglang_import import import_scopes
    from hicache_metadata_server.shared.address import is_shared

    if is_shared(store):
        from hicache_metadata_server.shared.offline import import_into_store

        import_into_store(store, scopes, tenant)
        return
    with _opened(store) as (service, write):
        import_scopes(service, scopes, time.time(), tenant)
        write()


def _fsck_store(store: str, request: Any) -> Any:
    from hicache_metadata_server.protocol import Checked
    from hicache_metadata_server.shared.address import is_shared

    if is_shared(store):
        from hicache_metadata_server.shared.offline import fsck_store

        return fsck_store(store, request)
    with _opened(store) as (service, _):
        checked = Checked(slots=0, problems=[])
        for piece in service.fsck(request):
            checked = piece or checked
        return Checked(
            slots=checked.slots, problems=[*service.recovery_problems, *checked.problems]
        )


@contextmanager
def _opened(store: str) -> Generator[tuple[MetadataService, Any]]:
    """A service as a store has kept it, and what writes its changes there."""
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.store import MEMORY, StoreError, open_store

    if store == MEMORY:
        raise StoreError(
            "nothing is kept in memory: name a sqlite:///FILE or a redis://HOST:PORT/DB"
        )
    opened, now = open_store(store), time.time()
    try:
        service = MetadataService(durability=opened.durability)
        service.restore(opened.recover(now), opened.rows, now)
        yield service, lambda: opened.write(service.take_changes())
    finally:
        opened.close()


def _settings_error(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return error_message(error)
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'settings'}: {one['msg']}" for one in errors()
    )
