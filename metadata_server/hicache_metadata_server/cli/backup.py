"""`hicache metadata backup`."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from hicache_metadata_server.cli.options import (
    FOUND_PROBLEMS,
    audited,
    exit_on_error,
    fail,
    opened_store,
)


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
    Exits with 1 if the store contradicts itself; what does is left out.
    """
    import sqlite3

    from hicache_metadata_server.storage.sqlite import INODE
    from hicache_metadata_server.storage.store import sqlite_file

    with exit_on_error():
        if file.exists() and not replace:
            raise FileExistsError(f"{file} exists already; --replace replaces it")
        source = sqlite_file(store)
        if not Path(source).is_file():
            raise FileNotFoundError(f"there is no store {source}")
        # In the same directory: a rename to another file system would not be atomic. Its mode keeps
        # others out of keys, which reveal prompts that share a prefix.
        with tempfile.TemporaryDirectory(dir=file.absolute().parent, prefix=file.name) as directory:
            copy = Path(directory) / file.name
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
                problems, pages = _checked(copy)
                with closing(sqlite3.connect(copy)) as target, target:
                    # Whatever file has this content counts as a copy, also this one.
                    target.execute("UPDATE counters SET ceiling = 0 WHERE name = ?", (INODE,))
            except sqlite3.Error as error:
                fail(f"{source} cannot be copied to {file}: {error}")
            copy.rename(file)
    for problem in problems:
        typer.echo(f"left out: {problem}")
    typer.echo(f"{pages:,} pages: {file}, {file.stat().st_size:,} bytes")
    raise typer.Exit(FOUND_PROBLEMS if problems else 0)


def _checked(copy: Path) -> tuple[list[str], int]:
    """Recover a copy as a server does, and write it without what contradicts itself.

    Returns:
        Its problems, and the number of its pages.
    """
    with opened_store(f"sqlite:///{copy}") as (service, store):
        problems, now = audited(service), time.time()
        for name, scope in service.scopes.items():
            keys = [key for key in scope.lru if not scope.table.checksums[scope.lru.slot(key)]]
            service.find(name).delete(keys, (), now)
        store.write(service.take_changes())
        store.rewrite({scope.number: scope for scope in service.scopes.values()}, now)
        return problems, service.totals().live
