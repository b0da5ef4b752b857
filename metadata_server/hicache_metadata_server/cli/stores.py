"""`hicache metadata fsck` and `hicache metadata backup`."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hicache_metadata_server.cli.options import (
    FOUND_PROBLEMS,
    AdminClient,
    exit_on_error,
    fail,
    of_server,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.sqlite import SqliteStore

MAX_SHOWN: Final = 100


@of_server
def fsck(
    remote: AdminClient,
    scope: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCOPE", help="rank:namespace, as listed by `scopes`; default: all."
        ),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Check this store instead, a sqlite:///FILE or a Redis; a server may use it.",
        ),
    ] = "",
) -> None:
    """Check the invariants of scopes; nothing is changed.

    Exits with 1 if it finds a problem.
    """
    if store and scope:
        fail("a store is checked as a whole: leave the scopes out, or ask a server")
    slots, problems = _check_store(store) if store else _check_served(remote, scope or [])
    for problem in problems[:MAX_SHOWN]:
        typer.echo(problem)
    if len(problems) > MAX_SHOWN:
        typer.echo(f"and {len(problems) - MAX_SHOWN} more")
    # Standard output has the problems alone, one a line, for scripts.
    typer.echo(f"{slots:,} slots checked, {len(problems) or 'no'} problems", err=True)
    raise typer.Exit(FOUND_PROBLEMS if problems else 0)


def _check_store(store: str) -> tuple[int, list[str]]:
    """Check the service that a store recovers to; return the number of slots, and the problems."""
    from hicache_metadata_server.storage.store import is_shared

    if is_shared(store):
        # Needs a library of its own.
        from hicache_metadata_server.shared.scope_log import restored_service

        service = restored_service(store, time.time())
    else:
        # In a copy: a start takes the file that it has opened for the original of its backups.
        with _copied(store) as copy, opened_store(f"sqlite:///{copy}") as opened:
            service, _ = opened
    return sum(scope.geometry.slots for scope in service.scopes.values()), audited(service)


def _check_served(remote: AdminClient, scopes: list[str]) -> tuple[int, list[str]]:
    """Let servers check scopes, each at its owner, or all that there are.

    A server checks itself faster than a client could read its slots.
    """
    from hicache_metadata_server.protocol import Fsck, FsckReport, Scopes

    wanted = scopes or [one.scope for one in remote.call("/v2/scopes", None, Scopes).scopes]
    checked = [remote.call("/v2/fsck", Fsck(scopes=[name]), FsckReport) for name in wanted]
    return sum(one.slots for one in checked), [
        problem for one in checked for problem in one.problems
    ]


def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The new backup, readable by its owner only.")
    ],
    store: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="sqlite:///FILE on this machine; a server may use it meanwhile.",
            envvar="HICACHE_METADATA_STORE",
        ),
    ],
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace an existing file once the new one is complete."),
    ] = False,
) -> None:
    """Copy the store of a server that may be running into one file, and check it there.

    The file is a store: to restore it, copy it to the place of the lost one. Pages without a
    checksum are left out: a reader of an older copy could not tell that their slots hold others.
    Exits with 1 if the store contradicts itself; a start leaves out what does.
    """
    import sqlite3

    from hicache_metadata_server.storage.sqlite import INODE

    with exit_on_error():
        if file.exists() and not replace:
            raise FileExistsError(f"{file} exists already; --replace replaces it")
        # In the same directory: a rename to another file system would not be atomic.
        with _copied(store, file.absolute().parent) as copy:
            problems, pages = _checked(copy)
            with closing(sqlite3.connect(copy)) as target, target:
                # Whatever file has this content counts as a copy, also this one.
                target.execute("UPDATE counters SET ceiling = 0 WHERE name = ?", (INODE,))
            copy.rename(file)
    for problem in problems:
        typer.echo(f"a start leaves out: {problem}")
    typer.echo(f"{pages:,} pages: {file}, {file.stat().st_size:,} bytes")
    raise typer.Exit(FOUND_PROBLEMS if problems else 0)


@contextmanager
def _copied(store: str, place: Path | None = None) -> Generator[Path]:
    """Copy a SQLite store, which a server may use, to a directory that is removed afterwards.

    Args:
        place: above that directory; None for the system's place of temporary files.
    """
    import sqlite3

    from hicache_metadata_server.storage.sqlite import INODE
    from hicache_metadata_server.storage.store import sqlite_file

    source = sqlite_file(store)
    if not Path(source).is_file():
        # A mistyped path would be an empty store.
        raise FileNotFoundError(f"there is no store {source}")
    # Its mode keeps others out of keys, which reveal prompts that share a prefix.
    with tempfile.TemporaryDirectory(dir=place, prefix="hicache-metadata-") as directory:
        copy = Path(directory) / "copy.db"
        copy.touch(0o600)
        try:
            with (
                closing(sqlite3.connect(source)) as origin,
                closing(sqlite3.connect(copy)) as target,
            ):
                origin.backup(target)
                [(damage,), *_] = target.execute("PRAGMA quick_check").fetchall()
                if damage != "ok":
                    fail(f"{source} is damaged: {damage}")
                # It is checked as a store of its own, not as a copy that somebody serves. A
                # database of something else has no such table, and is refused then.
                with suppress(sqlite3.OperationalError):
                    target.execute("DELETE FROM counters WHERE name = ?", (INODE,))
                    target.commit()
            yield copy
        except sqlite3.Error as error:
            fail(f"{source} cannot be copied: {error}")


def _checked(copy: Path) -> tuple[list[str], int]:
    """Recover a copy as a server does, and delete its pages without a checksum.

    Returns:
        Its problems, and the number of its pages.
    """
    with opened_store(f"sqlite:///{copy}") as (service, store):
        problems, now = audited(service), time.time()
        for name, scope in service.scopes.items():
            keys = [key for key in scope.lru if not scope.table.checksums[scope.lru.slot(key)]]
            service.find(name).delete(keys, (), now)
        store.write(service.take_changes())
        return problems, service.totals().live


@contextmanager
def opened_store(url: str) -> Generator[tuple[MetadataService, SqliteStore]]:
    """Return the service that a SQLite store recovers to, and the store."""
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.sqlite import SqliteStore
    from hicache_metadata_server.storage.store import sqlite_file

    store, now = SqliteStore(sqlite_file(url)), time.time()
    try:
        service = MetadataService(durability=store.durability)
        service.restore(store.recover(now), store.rows, now)
        yield service, store
    finally:
        store.close()


def audited(service: MetadataService) -> list[str]:
    """Return the problems of a service that was recovered from a store."""
    from hicache_metadata_server.core.invariants import audit

    return [
        *service.recovery_problems,
        *(
            f"{name}: {problem}"
            for name, scope in service.scopes.items()
            for piece in audit(scope)
            for problem in piece
        ),
    ]
