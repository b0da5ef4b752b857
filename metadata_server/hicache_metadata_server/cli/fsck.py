"""`hicache metadata fsck` with `--files` and `--repair`."""

from __future__ import annotations

import random
import time
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hicache_metadata_server.cli.options import (
    FAILED,
    FOUND_PROBLEMS,
    exit_on_error,
    fail,
    open_client,
    opened_store,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from hicache_metadata_server.cli.admin_client import AdminClient
    from hicache_metadata_server.cli.page_checks import (
        PageChecker,
        PageCheckReport,
        PageDefect,
        ScopePages,
    )
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.protocol import FsckReport, ScopeStatus
    from hicache_metadata_server.storage.sqlite import SqliteStore

Files = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Directory of the driver's files: also compare each page with the bytes of its slot.",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Compare only N pages of each scope, selected at random."
    ),
]
Repair = Annotated[
    bool,
    typer.Option(
        "--repair", help="Remove wrong entries from the metadata; data files are never written."
    ),
]
AccessFiles = tuple[Path | None, Path | None, Path | None]
"""Files with a token, certificate authorities and a client certificate."""

MAX_SHOWN: Final = 100
KEYS_PER_REQUEST: Final = 1024
"""Keys of one request, within the default limits of a server."""


def fsck_with_files(
    scopes: Sequence[str],
    url: str,
    access: AccessFiles,
    store: str,
    files: Path | None,
    sample: int | None,
    *,
    repair: bool,
) -> int:
    """Check a store that no server has open, or the server at `url`; return the exit status."""
    from hicache_metadata_server.storage.address import is_shared

    if repair and is_shared(store):
        fail(
            "the store in a Redis is not repaired: a server leaves out what contradicts itself, and "
            "--url with --files deletes defective pages"
        )
    if store and scopes:
        fail("a store is checked as a whole: leave the scopes out, or ask a server")
    if store:
        return fsck_store(store, files, sample, repair=repair)
    if files is None:
        fail(
            "a running server cannot be repaired: name the data files by --files, or a store that "
            "no server has open by --store"
        )
    return fsck_server(url, access, scopes, files, sample, repair=repair)


def fsck_each(remote: AdminClient, scopes: Sequence[str]) -> FsckReport:
    """Let servers check scopes, each at its owner, or all that there are."""
    from hicache_metadata_server.protocol import Fsck, FsckReport, Scopes

    wanted = scopes or [scope.scope for scope in remote.call("/v2/scopes", None, Scopes).scopes]
    slots, problems = 0, list[str]()
    for name in wanted:
        checked = remote.call("/v2/fsck", Fsck(scopes=[name]), FsckReport)
        slots += checked.slots
        problems += checked.problems
    return FsckReport(slots=slots, problems=problems)


def fsck_store(store: str, files: Path | None, sample: int | None, *, repair: bool) -> int:
    """Check a store that no server has open, and repair it; return the exit status."""
    with exit_on_error(), _opened(store) as (service, sqlite):
        problems = audited(service)
        found = None
        if files is not None:
            from hicache_metadata_server.cli.page_checks import check_all_pages, open_page_checker

            with closing(open_page_checker(files)) as checker:
                found = check_all_pages(_some(_pages_of(service), sample), checker)
        _print_report(problems, found)
        slots = sum(scope.geometry.slots for scope in service.scopes.values())
        # Standard output has the problems alone, one a line, for scripts.
        typer.echo(f"{slots:,} slots checked, {len(problems) or 'no'} problems", err=True)
        if repair and sqlite is not None and (problems or (found and found.defects)):
            _repair(service, sqlite, found.defects if found else [])
    return _status(problems, found)


@contextmanager
def _opened(store: str) -> Generator[tuple[MetadataService, SqliteStore | None]]:
    """Return the service that a store recovers to, and the store if it is a SQLite file."""
    from hicache_metadata_server.storage.address import is_shared

    if not is_shared(store):
        with opened_store(store) as opened:
            yield opened
        return
    # Needs a library of its own.
    from hicache_metadata_server.shared.offline import restored_service

    yield restored_service(store, time.time()), None


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


def _pages_of(service: MetadataService) -> Iterator[ScopePages]:
    from hicache_metadata_server.core.export import CHUNK_SLOTS, export_slots

    for scope in service.scopes.values():
        for first in range(0, len(scope.table), CHUNK_SLOTS):
            pages, _ = export_slots(scope, first, first + CHUNK_SLOTS, 0.0, 0.0)
            yield scope.geometry, pages


def _repair(service: MetadataService, store: SqliteStore, defects: Iterable[PageDefect]) -> None:
    from hicache_metadata_server.protocol import Delete, DeleteScope

    for scope, of_scope in groupby(defects, key=lambda defect: defect.scope):
        part = DeleteScope(scope=scope, keys=[defect.key for defect in of_scope])
        service.do_delete(Delete(scopes=[part]), time.time())
    rewrite(service, store)
    typer.echo(f"repaired: {service.totals().live:,} pages left", err=True)


def rewrite(service: MetadataService, store: SqliteStore) -> None:
    """Write a store as its service has it, which has left out what contradicts itself."""
    store.write(service.take_changes())
    store.rewrite({service.number_of(name): scope for name, scope in service.scopes.items()})


def fsck_server(
    url: str,
    access: AccessFiles,
    scopes: Sequence[str],
    files: Path,
    sample: int | None,
    *,
    repair: bool,
) -> int:
    """Compare the pages of a running server with the data files, delete defective ones; return the
    exit status."""
    from hicache_metadata_server.cli.page_checks import check_all_pages, open_page_checker
    from hicache_metadata_server.protocol import Scopes

    with exit_on_error():
        remote = open_client(url, *access)
        problems = fsck_each(remote, scopes).problems
        known = remote.call("/v2/scopes", None, Scopes).scopes
        wanted = [scope for scope in known if not scopes or scope.scope in scopes]
        with closing(open_page_checker(files)) as checker:
            found = check_all_pages(_some(_served(remote, wanted), sample), checker)
            # A slot may have been reused between the server's answer and the read of its bytes:
            # only what is wrong a second time is reported.
            found.defects = [
                defect for defect in found.defects if _is_still_wrong(remote, defect, checker)
            ]
        _print_report(problems, found)
        if repair:
            _delete(remote, found.defects)
    return _status(problems, found)


def _some(pages: Iterable[ScopePages], sample: int | None) -> Iterable[ScopePages]:
    if sample is None:
        return pages
    from hicache_metadata_server.cli.page_checks import sampled

    return sampled(pages, sample, random.Random())


def _served(remote: AdminClient, scopes: Iterable[ScopeStatus]) -> Iterator[ScopePages]:
    """Yield the live pages of a server, each chunk as of its own request."""
    from hicache_metadata_server.core.errors import StoreError
    from hicache_metadata_server.core.export import CHUNK_SLOTS, parts_of
    from hicache_metadata_server.protocol import Export, Exported, ScopeGeometry

    for scope in scopes:
        geometry = ScopeGeometry(
            scope=scope.scope,
            slots=scope.slots,
            slot_bytes=scope.slot_bytes,
            geometry=scope.geometry,
            identity=scope.identity,
        )
        first, used = 0, 1
        while first < used:
            chunk = Export(scope=scope.scope, first=first, count=CHUNK_SLOTS, rows=True)
            answer = remote.call("/v2/export", chunk, Exported)
            try:
                pages, _ = parts_of(answer, time.time())
            except ValueError as error:
                raise StoreError(f"the server's answer contradicts itself: {error}") from error
            yield geometry, pages
            first, used = first + CHUNK_SLOTS, answer.used


def _is_still_wrong(remote: AdminClient, defect: PageDefect, checker: PageChecker) -> bool:
    """Return True if a page is still live in its slot, and its bytes are still wrong.

    The question comes after the read: a page that is live now was live when its bytes were read.
    """
    from hicache_metadata_server.cli.page_checks import defects_of
    from hicache_metadata_server.core.export import Pages
    from hicache_metadata_server.protocol import Inspect, Inspected, SlotState

    [now] = remote.call(
        "/v2/inspect", Inspect(scope=defect.scope, slots=[defect.slot]), Inspected
    ).slots
    if (
        now is None
        or now.state is not SlotState.LIVE
        or (now.key, now.generation) != (defect.key, defect.generation)
    ):
        return False
    page = Pages(
        [now.slot], [now.generation], [1], [now.length], [now.checksum], [now.key], [now.prefix]
    )
    return bool(defects_of(checker, defect.scope, page)[0])


def _delete(remote: AdminClient, defects: Sequence[PageDefect]) -> None:
    """Delete defective pages."""
    # With their generations: a page that was written again since the check stays.
    from hicache_metadata_server.protocol import Delete, DeleteScope, Marked

    gone = 0
    # Sorted by scope already: the check goes through one scope after the other.
    for scope, of_scope in groupby(defects, key=lambda defect: defect.scope):
        left = list(of_scope)
        for some in (
            left[start : start + KEYS_PER_REQUEST]
            for start in range(0, len(left), KEYS_PER_REQUEST)
        ):
            part = DeleteScope(
                scope=scope, keys=[m.key for m in some], generations=[m.generation for m in some]
            )
            gone += sum(remote.call("/v2/delete", Delete(scopes=[part]), Marked).scopes[0].done)
    typer.echo(f"{gone:,} pages deleted", err=True)


def _print_report(problems: Sequence[str], found: PageCheckReport | None) -> None:
    lines = [*problems, *(map(str, found.defects) if found else ())]
    for line in lines[:MAX_SHOWN]:
        typer.echo(line)
    if len(lines) > MAX_SHOWN:
        typer.echo(f"and {len(lines) - MAX_SHOWN} more")
    for verdict, count in sorted(found.verdicts.items()) if found else ():
        typer.echo(f"{count:,} pages: {verdict}", err=True)


def _status(problems: Sequence[str], found: PageCheckReport | None) -> int:
    # Unreadable pages are no result: the mount or its permissions have to be fixed first.
    if found is not None and found.unreadable:
        return FAILED
    return FOUND_PROBLEMS if problems or (found is not None and found.defects) else 0
