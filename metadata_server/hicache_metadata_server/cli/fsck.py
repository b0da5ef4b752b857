"""`hicache metadata fsck` with `--files` and `--repair`."""

from __future__ import annotations

import random
import time
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

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
    from hicache_metadata_server.protocol import Answer, FsckReport, Request, ScopeStatus
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
A = TypeVar("A", bound="Answer")
AccessFiles = tuple[Path | None, Path | None, Path | None]
"""Files with a token, certificate authorities and a client certificate."""

MAX_SHOWN: Final = 100
KEYS_PER_REQUEST: Final = 1024
"""Keys of one request, within the default limits of a server."""
CHUNK_SLOTS: Final = 2048
"""Slots of one request, for which a server answers no one else."""


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
        problems, opened = audited(service), _OpenedService(service)
        found = None if files is None else _compare(opened, (), files, sample)
        _print_report(problems, found)
        slots = sum(scope.geometry.slots for scope in service.scopes.values())
        # Standard output has the problems alone, one a line, for scripts.
        typer.echo(f"{slots:,} slots checked, {len(problems) or 'no'} problems", err=True)
        if repair and sqlite is not None and (problems or (found and found.defects)):
            _delete(opened, found.defects if found else [])
            rewrite(service, sqlite)
    return _status(problems, found)


class _OpenedService:
    """A service without a server, which is asked as a server is."""

    def __init__(self, service: MetadataService) -> None:
        from hicache_metadata_server.http.routes import native_endpoints

        self._endpoints = native_endpoints(service)

    def call(self, path: str, request: Request | None, kind: type[A]) -> A:
        from hicache_metadata_server.core.tenants import ANYBODY

        endpoint = self._endpoints[path]
        caller = (ANYBODY,) if endpoint.takes_caller else ()
        response: A = endpoint.do(request, time.time(), *caller)
        return response


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
    with exit_on_error():
        remote = open_client(url, *access)
        problems = fsck_each(remote, scopes).problems
        found = _compare(remote, scopes, files, sample)
        _print_report(problems, found)
        if repair:
            _delete(remote, found.defects)
    return _status(problems, found)


def _compare(
    remote: AdminClient | _OpenedService, scopes: Sequence[str], files: Path, sample: int | None
) -> PageCheckReport:
    """Compare the live pages of scopes, or of all that there are, with the data files."""
    from hicache_metadata_server.cli.page_checks import check_all_pages, open_page_checker, sampled
    from hicache_metadata_server.protocol import Scopes

    known = remote.call("/v2/scopes", None, Scopes).scopes
    pages = _live_pages(remote, [one for one in known if not scopes or one.scope in scopes])
    with closing(open_page_checker(files)) as checker:
        found = check_all_pages(
            pages if sample is None else sampled(pages, sample, random.Random()), checker
        )
        # A slot may have been reused between the server's answer and the read of its bytes: only
        # what is wrong a second time is reported.
        found.defects = [
            defect for defect in found.defects if _is_still_wrong(remote, defect, checker)
        ]
    return found


def _live_pages(
    remote: AdminClient | _OpenedService, scopes: Iterable[ScopeStatus]
) -> Iterator[ScopePages]:
    """Yield the live pages of a server, each chunk as of its own request."""
    from hicache_metadata_server.protocol import Inspect, Inspected, ScopeGeometry, SlotState

    for scope in scopes:
        geometry = ScopeGeometry(
            scope=scope.scope,
            slots=scope.slots,
            slot_bytes=scope.slot_bytes,
            geometry=scope.geometry,
            identity=scope.identity,
        )
        for first in range(0, scope.slots, CHUNK_SLOTS):
            slots = list(range(first, min(first + CHUNK_SLOTS, scope.slots)))
            found = remote.call("/v2/inspect", Inspect(scope=scope.scope, slots=slots), Inspected)
            used = [slot for slot in found.slots if slot is not None and slot.generation]
            yield geometry, [slot for slot in used if slot.state is SlotState.LIVE]
            # Slots are used from the first on.
            if len(used) < len(slots):
                break


def _is_still_wrong(
    remote: AdminClient | _OpenedService, defect: PageDefect, checker: PageChecker
) -> bool:
    """Return True if a page is still live in its slot, and its bytes are still wrong.

    The question comes after the read: a page that is live now was live when its bytes were read.
    """
    from hicache_metadata_server.cli.page_checks import verdicts_of
    from hicache_metadata_server.protocol import Inspect, Inspected, SlotState

    page = defect.page
    request = Inspect(scope=defect.scope, slots=[page.slot])
    [now] = remote.call("/v2/inspect", request, Inspected).slots
    if (
        now is None
        or now.state is not SlotState.LIVE
        or (now.key, now.generation) != (page.key, page.generation)
    ):
        return False
    # An unreadable page counts as intact: a mount that is away for a moment must not cost pages.
    return verdicts_of(checker, defect.scope, [now])[0].is_defect


def _delete(remote: AdminClient | _OpenedService, defects: Sequence[PageDefect]) -> None:
    """Delete defective pages."""
    # With their generations: a page that was written again since the check stays.
    from hicache_metadata_server.protocol import Delete, DeleteScope, Marked

    gone = 0
    # Sorted by scope already: the check goes through one scope after the other.
    for scope, of_scope in groupby(defects, key=lambda defect: defect.scope):
        left = [defect.page for defect in of_scope]
        for start in range(0, len(left), KEYS_PER_REQUEST):
            some = left[start : start + KEYS_PER_REQUEST]
            part = DeleteScope(
                scope=scope,
                keys=[page.key for page in some],
                generations=[page.generation for page in some],
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
