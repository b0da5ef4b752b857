"""`hicache metadata copy`, `backup` and `restore`."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from hicache_metadata_server.cli.options import (
    Ca,
    Certificate,
    Token,
    connect_remote,
    exit_on_error,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from hicache_metadata_server.backup.page_checks import PageChecker
    from hicache_metadata_server.backup.parts import SnapshotPart, Tally
    from hicache_metadata_server.backup.redis import SharedStoreClient
    from hicache_metadata_server.backup.remote import ExportServer, RemoteSource
    from hicache_metadata_server.cli.remote_server import RemoteServer

HTTP: Final = ("http://", "https://")
POLL_SECONDS: Final = 0.2
DRAINS: Final = (
    "It gives no new leases: stop it, start one on the copy, and point the clients there."
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="STORE_OR_URL",
        help="sqlite:///FILE that no server has open, redis://HOST:PORT/DB, or a server's "
        "http(s)://HOST:PORT",
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="sqlite:///FILE that no server has open, or redis://HOST:PORT/DB that no server uses",
    ),
]
Replace = Annotated[
    bool, typer.Option("--replace", help="What is there makes room, once the new is complete.")
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="SCOPE",
        help="A scope that is left out, since nobody uses it any more. May be repeated.",
    ),
]
MaxLease = Annotated[
    float,
    typer.Option(
        help="How long a lease may last in a store that no server has open: so long its slot stays "
        "in quarantine.",
        envvar="HICACHE_METADATA_MAX_LEASE_SECONDS",
        min=0.001,
    ),
]


def copy(
    source: Source,
    store: Target,
    replace: Replace = False,
    without: Without = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="For leases that are out, of a server that runs."
        ),
    ] = 60.0,
    max_lease_seconds: MaxLease = 600.0,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Copy all scopes into another store, and verify them there.

    Of a store that no server has open all is copied. A server goes on serving while most of it is
    copied; then it drains, and what has changed is copied. It is left draining, or set free again
    if the copy fails.
    """
    from hicache_metadata_server.backup.filters import without_scopes
    from hicache_metadata_server.backup.target import fill, open_target
    from hicache_metadata_server.shared.address import is_shared

    names, dropped = set(without or ()), Counter[str]()
    with (
        exit_on_error(),
        closing(open_target(store, replace=replace)) as target,
        ExitStack() as stack,
    ):
        begin = time.monotonic()
        if is_shared(source):
            taken = stack.enter_context(_spooled(stack.enter_context(_shared(source))))
            tally = fill(target, without_scopes(taken.parts(drained=True), names, dropped))
            _check_unchanged(taken)
        elif source.startswith(HTTP):
            remote = connect_remote(source, token_file, ca, certificate)
            taken = stack.enter_context(_spooled(remote))
            stack.enter_context(_draining(remote, wait))
            tally = fill(target, without_scopes(taken.parts(drained=True), names, dropped))
            _check_unchanged(taken)
        else:
            tally = fill(
                target,
                without_scopes(
                    stack.enter_context(_stored(source, max_lease_seconds)), names, dropped
                ),
            )
        target.commit()
    _print(tally, f"copied and verified in {time.monotonic() - begin:.1f} s")
    _print_dropped(dropped)
    if source.startswith(HTTP):
        typer.echo(DRAINS, err=True)


def backup(
    source: Source,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The backup; readable by nobody else.")
    ],
    replace: Replace = False,
    max_lease_seconds: MaxLease = 600.0,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Write all scopes into one file. A server may go on serving: pages that come, go or move
    meanwhile are left out."""
    from hicache_metadata_server.backup.backup_file import write_backup
    from hicache_metadata_server.backup.frames import BackupHeader
    from hicache_metadata_server.shared.address import is_shared

    with exit_on_error(), ExitStack() as stack:
        if file.exists() and not replace:
            raise FileExistsError(f"{file} is there already; with --replace it makes room")
        begin, online = time.monotonic(), source.startswith(HTTP) or is_shared(source)
        parts: Iterable[SnapshotPart]
        if online:
            remote = (
                stack.enter_context(_shared(source))
                if is_shared(source)
                else connect_remote(source, token_file, ca, certificate)
            )
            parts = stack.enter_context(_spooled(remote, file.absolute().parent)).parts(
                drained=False
            )
        else:
            parts = stack.enter_context(_stored(source, max_lease_seconds))
        tally = write_backup(
            file, BackupHeader(_without_credentials(source), time.time(), online), parts
        )
    _print(tally, f"{file}: {file.stat().st_size:,} bytes in {time.monotonic() - begin:.1f} s")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `backup` has written.")],
    store: Target,
    replace: Replace = False,
    files: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The directory of the driver's files: keep only pages whose bytes are right.",
        ),
    ] = None,
    without: Without = None,
    max_lease_seconds: MaxLease = 600.0,
) -> None:
    """Fill a store from a backup. Pages that no reader can verify are left out: their slots may
    hold other pages by now."""
    from hicache_metadata_server.backup.backup_file import BackupFile
    from hicache_metadata_server.backup.filters import (
        only_intact,
        restored,
        verifiable,
        without_scopes,
    )
    from hicache_metadata_server.backup.target import fill, open_target

    dropped = Counter[str]()
    with exit_on_error(), ExitStack() as stack:
        found = BackupFile(file)
        checker = stack.enter_context(closing(_checker(files))) if files is not None else None
        with closing(open_target(store, replace=replace)) as target:
            parts = verifiable(without_scopes(found.parts(), set(without or ()), dropped), dropped)
            if checker is not None:
                parts = only_intact(parts, checker, dropped)
            tally = fill(target, restored(parts, time.time() + max_lease_seconds))
            target.commit()
    hours = (time.time() - found.origin.created) / 3600
    _print(tally, f"restored from {found.origin.source} as it was {hours:.1f} hours ago")
    _print_dropped(dropped)


def _shared(url: str) -> SharedStoreClient:
    from hicache_metadata_server.backup.redis import SharedStoreClient

    return SharedStoreClient(url)


def _checker(files: Path) -> PageChecker:
    from hicache_metadata_server.backup.page_checks import open_page_checker

    return open_page_checker(files)


@contextmanager
def _stored(url: str, max_lease_seconds: float) -> Generator[Iterable[SnapshotPart]]:
    from hicache_metadata_server.backup.capture import snapshot_of
    from hicache_metadata_server.backup.offline import opened_store
    from hicache_metadata_server.backup.parts import SnapshotError

    with opened_store(url, max_lease_seconds) as service:
        problems = service.recovery_problems
        if problems:
            raise SnapshotError(
                f"{url} contradicts itself ({problems[0]}); `hicache metadata fsck --store {url} "
                f"--repair` mends it"
            )
        yield snapshot_of(service, time.time())


@contextmanager
def _spooled(remote: ExportServer, directory: Path | None = None) -> Generator[RemoteSource]:
    import tempfile

    from hicache_metadata_server.backup.remote import RemoteSource

    with RemoteSource(remote, directory or Path(tempfile.gettempdir())) as source:
        pages = source.spool()
        typer.echo(f"{pages:,} pages read", err=True)
        yield source


@contextmanager
def _draining(remote: RemoteServer, wait: float) -> Generator[None]:
    """Drains a server and waits for its leases; sets it free again where the block fails."""
    from hicache_metadata_server.cli.remote_server import RemoteError
    from hicache_metadata_server.protocol import Drain, Draining

    drained_before, until = remote.is_draining(), time.monotonic() + wait
    answer = remote.call("/v2/drain", Drain(enabled=True), Draining)
    try:
        while answer.leases and time.monotonic() < until:
            time.sleep(min(POLL_SECONDS, wait))
            answer = remote.call("/v2/drain", Drain(enabled=True), Draining)
        typer.echo(f"drains; {answer.leases:,} leases are out", err=True)
        yield
    except BaseException:
        if not drained_before:
            with suppress(RemoteError):
                remote.call("/v2/drain", Drain(enabled=False), Draining)
        raise


def _check_unchanged(source: RemoteSource) -> None:
    from hicache_metadata_server.backup.parts import SnapshotError

    changed = source.changed()
    if changed:
        raise SnapshotError(
            f"{', '.join(changed)} has changed after it was copied: pages were committed, deleted "
            f"or cleared. Copy again"
        )


def _print(tally: Tally, what: str) -> None:
    table = Table(
        "scope", "slots", "pages", "other used slots", box=None, header_style="bold", pad_edge=False
    )
    for name, count in sorted(tally.scopes.items()):
        table.add_row(name, f"{count.slots:,}", f"{count.pages:,}", f"{count.empty:,}")
    Console(highlight=False).print(table)
    typer.echo(f"{tally.pages:,} pages in {len(tally.scopes):,} scopes: {what}")


def _print_dropped(dropped: Counter[str]) -> None:
    for why, count in sorted(dropped.items()):
        if count:
            typer.echo(f"{count:,} pages left out: {why}", err=True)


def _without_credentials(address: str) -> str:
    """An address without user and password."""
    from hicache_metadata_server.shared.address import is_shared, redacted

    if is_shared(address):
        return redacted(address).replace("***@", "", 1)
    user, at, rest = urlsplit(address).netloc.rpartition("@")
    return address.replace(f"{user}{at}{rest}", rest, 1) if at else address
