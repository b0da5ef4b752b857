"""`hicache metadata fsck`."""

from __future__ import annotations

import importlib
import random
import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final, Protocol, TypeVar, cast

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
    from collections.abc import Generator, Iterator, Sequence

    from hicache_metadata_server.cli.admin_client import AdminClient
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.protocol import (
        Answer,
        Request,
        ScopeGeometry,
        ScopeStatus,
        SlotStatus,
    )
    from hicache_metadata_server.storage.sqlite import SqliteStore

A = TypeVar("A", bound="Answer")

MAX_SHOWN: Final = 100
KEYS_PER_REQUEST: Final = 1024
"""Keys of one request, within the default limits of a server."""
CHUNK_SLOTS: Final = 2048
"""Slots of one request, for which a server answers no one else."""
PROVIDER: Final = "hicache_backends.hf3fs.fsck"
"""Module of the driver whose `SlotFilePageChecker(path)` is a `PageChecker`."""
OTHER_DIRECTORY: Final = "in scopes of other directories"


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


class PageVerdict(Protocol):
    """Result of one comparison; its text completes a sentence about the slot."""

    @property
    def is_defect(self) -> bool:
        """True if a reader would not take the slot for a hit."""
        ...

    @property
    def is_unreadable(self) -> bool:
        """True if the file system did not return the bytes, so that nothing is known of them."""
        ...


class PageChecker(Protocol):
    """Access of a driver to its own data files, read-only: only it knows their layout."""

    def open_scope(self, geometry: ScopeGeometry) -> bool:
        """Prepare for the pages of a scope; return False for a scope of another directory."""
        ...

    def check_pages(self, pages: Sequence[SlotStatus]) -> Sequence[PageVerdict]:
        """Return one verdict for each page of the scope that was opened last."""
        ...

    def close(self) -> None:
        """Release threads and files."""
        ...


@dataclass(frozen=True, slots=True)
class PageDefect:
    """A live page whose slot does not hold its bytes."""

    scope: str
    page: SlotStatus
    verdict: PageVerdict

    def __str__(self) -> str:
        return f"{self.scope}: slot {self.page.slot} {self.verdict}: {self.page.key!r}"


@dataclass(slots=True)
class PageCheckReport:
    """Counts and defects of one check."""

    verdicts: Counter[str] = field(default_factory=Counter[str])
    """Pages by the text of their verdict, or `OTHER_DIRECTORY`."""
    defects: list[PageDefect] = field(default_factory=list[PageDefect])
    unreadable: int = 0
    """Pages that the file system did not return."""


def _open_page_checker(path: Path) -> PageChecker:
    """Return the driver's checker for the data files in a directory.

    Raises:
        StoreError: the driver is not installed.
        OSError: the path is no directory of the driver.
    """
    from hicache_metadata_server.core.errors import StoreError

    # By its name: a server without any driver is complete.
    try:
        provider = importlib.import_module(PROVIDER)
    except ImportError as error:
        raise StoreError(
            f"data files are read by the 3FS driver, which is not installed: "
            f"pip install hicache-storage ({error})"
        ) from error
    return cast("PageChecker", provider.SlotFilePageChecker(path))


def _compare(
    remote: AdminClient | _OpenedService,
    scopes: Sequence[str] | None,
    files: Path,
    sample: int | None,
) -> PageCheckReport:
    """Compare the live pages of scopes, or of all that there are, with the data files."""
    from hicache_metadata_server.protocol import ScopeGeometry, Scopes

    found = PageCheckReport()
    with closing(_open_page_checker(files)) as checker:
        for status in remote.call("/v2/scopes", None, Scopes).scopes:
            if scopes and status.scope not in scopes:
                continue
            fields = {name: getattr(status, name) for name in ScopeGeometry.__struct_fields__}
            is_here = checker.open_scope(ScopeGeometry(**fields))
            for pages in _live_pages(remote, status, sample):
                if not is_here:
                    found.verdicts[OTHER_DIRECTORY] += len(pages)
                    continue
                verdicts = checker.check_pages(pages)
                found.verdicts.update(map(str, verdicts))
                found.unreadable += sum(verdict.is_unreadable for verdict in verdicts)
                # A slot may have been reused between the server's answer and the read of its bytes:
                # only what is wrong a second time is reported.
                found.defects += [
                    PageDefect(status.scope, page, verdict)
                    for page, verdict in zip(pages, verdicts, strict=True)
                    if verdict.is_defect and _is_still_wrong(remote, status.scope, page, checker)
                ]
    return found


def _live_pages(
    remote: AdminClient | _OpenedService, scope: ScopeStatus, sample: int | None
) -> Iterator[list[SlotStatus]]:
    """Yield the live pages of a scope, or a sample of them, each chunk as of its own request."""
    from hicache_metadata_server.protocol import Inspect, Inspected, SlotState

    live, number = range(scope.live), 0
    chosen = None if sample is None else set(random.sample(live, min(sample, len(live))))
    for first in range(0, scope.slots, CHUNK_SLOTS):
        slots = list(range(first, min(first + CHUNK_SLOTS, scope.slots)))
        found = remote.call("/v2/inspect", Inspect(scope=scope.scope, slots=slots), Inspected)
        used = [slot for slot in found.slots if slot is not None and slot.generation]
        pages = [slot for slot in used if slot.state is SlotState.LIVE]
        # Pages that were stored since the scope was listed are no part of a sample.
        yield [page for at, page in enumerate(pages, number) if chosen is None or at in chosen]
        number += len(pages)
        # Slots are used from the first on.
        if len(used) < len(slots):
            break


def _is_still_wrong(
    remote: AdminClient | _OpenedService, scope: str, page: SlotStatus, checker: PageChecker
) -> bool:
    """Return True if a page is still live in its slot, and its bytes are still wrong.

    The question comes after the read: a page that is live now was live when its bytes were read.
    """
    from hicache_metadata_server.protocol import Inspect, Inspected, SlotState

    [now] = remote.call("/v2/inspect", Inspect(scope=scope, slots=[page.slot]), Inspected).slots
    if (
        now is None
        or now.state is not SlotState.LIVE
        or (now.key, now.generation) != (page.key, page.generation)
    ):
        return False
    # An unreadable page counts as intact: a mount that is away for a moment must not cost pages.
    return checker.check_pages([now])[0].is_defect


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
