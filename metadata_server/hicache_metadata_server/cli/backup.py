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
    exit_on_error,
    open_client,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from hicache_metadata_server.backup.page_checks import PageChecker
    from hicache_metadata_server.backup.remote import ExportServer, RemoteSource
    from hicache_metadata_server.cli.admin_client import AdminClient
    from hicache_metadata_server.core.snapshot_parts import SnapshotPart, Tally

HTTP: Final = ("http://", "https://")
POLL_SECONDS: Final = 0.2
NOTICE_SECONDS: Final = 3.0
"""Time in which servers that share a store have seen that others of them drain."""
DRAINING: Final = (
    "{who} no new leases: stop {it}, start one on the copy, and point the clients there."
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="STORE_OR_URL",
        help="sqlite:///FILE that no server has open, redis://HOST:PORT/DB that none uses, or a "
        "server's http(s)://HOST:PORT; for a copy from servers that share a store, those of all, "
        "separated by commas",
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
    bool,
    typer.Option("--replace", help="Replace the existing content once the new one is complete."),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="SCOPE",
        help="Scope to leave out, such as one that no engine uses any more. May be repeated.",
    ),
]
MaxLease = Annotated[
    float,
    typer.Option(
        help="Longest lease of a store that no server has open, in seconds: its leased slots are "
        "quarantined for that long.",
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
            metavar="SECONDS", min=0, help="Time to wait for the leases of a running server."
        ),
    ] = 60.0,
    max_lease_seconds: MaxLease = 600.0,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Copy all scopes into another store, and verify them there.

    A running server serves during most of the copy. Then it drains, and the changes are copied. It
    stays draining, or gives leases again if the copy fails. Of servers that share a store all have
    to drain.
    """
    from hicache_metadata_server.backup.filters import without_scopes
    from hicache_metadata_server.backup.target import fill, open_target

    names, dropped = set(without or ()), Counter[str]()
    with (
        exit_on_error(),
        closing(open_target(store, replace=replace)) as target,
        ExitStack() as stack,
    ):
        begin = time.monotonic()
        if source.startswith(HTTP):
            remotes = [open_client(url, token_file, ca, certificate) for url in source.split(",")]
            # Spooled before it drains, so that clients can write during the long first pass.
            snapshot = stack.enter_context(_spooled(remotes[0]))
            stack.enter_context(_draining(remotes, wait))
            tally = fill(target, without_scopes(snapshot.parts(drained=True), names, dropped))
            # Leases that outlast the wait can still be committed, and pages deleted.
            _check_unchanged(snapshot)
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
        several = "," in source
        who, it = ("The servers give", "them") if several else ("The server gives", "it")
        typer.echo(DRAINING.format(who=who, it=it), err=True)


def backup(
    source: Source,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The new backup, readable by its owner only.")
    ],
    replace: Replace = False,
    max_lease_seconds: MaxLease = 600.0,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Write all scopes into one file.

    A server goes on serving: pages that are committed, removed or moved meanwhile are left out.
    """
    from hicache_metadata_server.backup.backup_file import write_backup
    from hicache_metadata_server.backup.frames import BackupHeader

    with exit_on_error(), ExitStack() as stack:
        if file.exists() and not replace:
            raise FileExistsError(f"{file} exists already; --replace replaces it")
        begin, online = time.monotonic(), source.startswith(HTTP)
        parts: Iterable[SnapshotPart]
        if online:
            remote = open_client(source, token_file, ca, certificate)
            # The spool is as large as the backup: where that fits, a spool most likely fits too,
            # unlike in a small /tmp.
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `backup` has written.")],
    store: Target,
    replace: Replace = False,
    files: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Directory of the driver's files: keep only pages whose bytes are intact.",
        ),
    ] = None,
    without: Without = None,
    max_lease_seconds: MaxLease = 600.0,
) -> None:
    """Fill a store from a backup.

    Pages that no reader can verify are left out: their slots may hold other pages by now.
    """
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
        # Verified as a whole before the store is opened, and so before anything is removed.
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


def _checker(files: Path) -> PageChecker:
    from hicache_metadata_server.backup.page_checks import open_page_checker

    return open_page_checker(files)


@contextmanager
def _stored(url: str, max_lease_seconds: float) -> Generator[Iterable[SnapshotPart]]:
    from hicache_metadata_server.backup.offline import opened_store, snapshot_of
    from hicache_metadata_server.core.errors import SnapshotError

    with opened_store(url, max_lease_seconds) as service:
        problems = service.recovery_problems
        if problems:
            raise SnapshotError(
                f"{url} contradicts itself ({problems[0]}); `hicache metadata fsck --store {url} "
                f"--repair` repairs it"
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
def _draining(remotes: Sequence[AdminClient], wait: float) -> Generator[None]:
    """Drain servers and wait for their leases; if the block fails, let them give leases again.

    Raises:
        SnapshotError: another server of their store gives leases.
    """
    from hicache_metadata_server.cli.admin_client import RemoteError
    from hicache_metadata_server.core.errors import SnapshotError
    from hicache_metadata_server.protocol import Drain, Draining

    drained_before, begin = [remote.is_draining() for remote in remotes], time.monotonic()
    try:
        while True:
            # Each answer counts the leases anew; to drain a draining server changes nothing.
            answers = [
                remote.call("/v2/drain", Drain(enabled=True), Draining) for remote in remotes
            ]
            leases, others = sum(one.leases for one in answers), set[str]()
            others.update(*(one.others for one in answers))
            waited = time.monotonic() - begin
            if (not leases or waited >= wait) and (not others or waited >= NOTICE_SECONDS):
                break
            time.sleep(POLL_SECONDS)
        if others:
            raise SnapshotError(
                f"{', '.join(sorted(others))}: shares the store and gives leases; name the "
                f"addresses of all servers, separated by commas"
            )
        typer.echo(f"draining; {leases:,} leases left", err=True)
        yield
    except BaseException:
        # Also on Ctrl-C: a server that stays draining stores nothing any more. One that drained
        # before does so for another reason, which still holds.
        for remote, before in zip(remotes, drained_before, strict=True):
            if not before:
                with suppress(RemoteError):
                    remote.call("/v2/drain", Drain(enabled=False), Draining)
        raise


def _check_unchanged(source: RemoteSource) -> None:
    from hicache_metadata_server.core.errors import SnapshotError

    changed = source.changed()
    if changed:
        raise SnapshotError(
            f"{', '.join(changed)} has changed after it was copied: pages were committed, deleted "
            f"or cleared. Copy again"
        )


def _print(tally: Tally, summary: str) -> None:
    table = Table(
        "scope", "slots", "pages", "other used slots", box=None, header_style="bold", pad_edge=False
    )
    for name, count in sorted(tally.scopes.items()):
        table.add_row(name, f"{count.slots:,}", f"{count.pages:,}", f"{count.empty:,}")
    Console(highlight=False).print(table)
    typer.echo(f"{tally.pages:,} pages in {len(tally.scopes):,} scopes: {summary}")


def _print_dropped(dropped: Counter[str]) -> None:
    for reason, count in sorted(dropped.items()):
        if count:
            typer.echo(f"{count:,} pages left out: {reason}", err=True)


def _without_credentials(address: str) -> str:
    """Return an address without user and password, which a backup file must not contain."""
    from hicache_metadata_server.storage.address import is_shared, redacted

    if is_shared(address):
        return redacted(address).replace("***@", "", 1)
    user, at, rest = urlsplit(address).netloc.rpartition("@")
    return address.replace(f"{user}{at}{rest}", rest, 1) if at else address
