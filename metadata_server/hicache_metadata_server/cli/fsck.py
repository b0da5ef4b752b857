"""`hicache metadata fsck`."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, closing, contextmanager
from itertools import groupby
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from hicache_metadata_server.cli.options import (
    FAILED,
    FOUND_PROBLEMS,
    LOCAL,
    Ca,
    Certificate,
    Token,
    Url,
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
    from hicache_metadata_server.protocol import Answer, Request, ScopeStatus
    from hicache_metadata_server.storage.sqlite import SqliteStore

A = TypeVar("A", bound="Answer")

MAX_SHOWN: Final = 100
KEYS_PER_REQUEST: Final = 1024
"""Keys of one request, within the default limits of a server."""
CHUNK_SLOTS: Final = 2048
"""Slots of one request, for which a server answers no one else."""


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
    store: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Check this store instead: a sqlite:///FILE that no server has open, or a Redis.",
        ),
    ] = "",
    files: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Directory of the driver's files: also compare each page with the bytes of its "
            "slot.",
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Compare only N pages of each scope, selected at random."
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Remove wrong entries from the metadata; data files are never written.",
        ),
    ] = False,
) -> None:
    """Check the invariants of scopes, and with --files the bytes of their pages.

    Exits with 1 if it finds a problem.
    """
    from hicache_metadata_server.storage.address import is_shared

    if repair and is_shared(store):
        fail(
            "the store in a Redis is not repaired: a server leaves out what contradicts itself, and "
            "--url with --files deletes defective pages"
        )
    if repair and not store and files is None:
        fail(
            "a running server cannot be repaired: name the data files by --files, or a store that "
            "no server has open by --store"
        )
    if store and scope:
        fail("a store is checked as a whole: leave the scopes out, or ask a server")
    with exit_on_error(), ExitStack() as stack:
        service, sqlite = stack.enter_context(_opened(store)) if store else (None, None)
        remote = (
            _OpenedService(service) if service else open_client(url, token_file, ca, certificate)
        )
        slots, problems = (
            (sum(one.geometry.slots for one in service.scopes.values()), audited(service))
            if service
            else _check_each(remote, scope)
        )
        found = None if files is None else _compare(remote, scope, files, sample)
        _print_report(problems, found)
        # Standard output has the problems alone, one a line, for scripts.
        typer.echo(f"{slots:,} slots checked, {len(problems) or 'no'} problems", err=True)
        defects = found.defects if found else []
        if repair and (sqlite is None or problems or defects):
            _delete(remote, defects)
        if repair and service and sqlite and (problems or defects):
            rewrite(service, sqlite)
    raise typer.Exit(_status(problems, found))


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
    scopes = {scope.number: scope for scope in service.scopes.values()}
    store.rewrite(scopes, time.time())


def _check_each(
    remote: AdminClient | _OpenedService, scopes: Sequence[str] | None
) -> tuple[int, list[str]]:
    """Let servers check scopes, each at its owner, or all that there are; return the number of
    slots, and the problems.

    A server checks itself faster than a client could read its slots.
    """
    from hicache_metadata_server.protocol import Fsck, FsckReport, Scopes

    wanted = scopes or [one.scope for one in remote.call("/v2/scopes", None, Scopes).scopes]
    checked = [remote.call("/v2/fsck", Fsck(scopes=[name]), FsckReport) for name in wanted]
    return sum(one.slots for one in checked), [
        problem for one in checked for problem in one.problems
    ]


def _compare(
    remote: AdminClient | _OpenedService,
    scopes: Sequence[str] | None,
    files: Path,
    sample: int | None,
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
