"""`hicache metadata fsck` with `--files` and `--repair`."""

from __future__ import annotations

import random
import time
from contextlib import closing
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
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_metadata_server.backup.page_checks import PageChecker, PageCheckReport, PageDefect
    from hicache_metadata_server.cli.admin_client import AdminClient
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.core.snapshot_parts import SnapshotPart
    from hicache_metadata_server.protocol import FsckReport

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
            "a Redis is not repaired in place: copy it to a sqlite:///FILE, repair that, copy back"
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
    """Check a store that no server has open, rewrite it if it has problems; return the exit
    status."""
    from hicache_metadata_server.backup.offline import opened_store, snapshot_of
    from hicache_metadata_server.backup.sqlite import StoreStamp
    from hicache_metadata_server.core.invariants import audit

    with exit_on_error():
        with opened_store(store) as service:
            problems = list(service.recovery_problems)
            for name, scope in service.scopes.items():
                problems += [f"{name}: {problem}" for piece in audit(scope) for problem in piece]
            found = _checked(snapshot_of(service, time.time()), files, sample)
        # The store is closed by now, and its lock released: a server may open it before the repair
        # locks it again. The stamp shows that.
        stamp = StoreStamp.of(store) if repair else None
        _print_report(problems, found)
        # A rewrite ends leases and pins, so that a store without problems stays untouched.
        if repair and (problems or (found and found.defects)):
            _rewrite(store, service, found.defects if found else [], stamp)
    return _status(problems, found)


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
    from hicache_metadata_server.backup.page_checks import check_snapshot, open_page_checker
    from hicache_metadata_server.backup.remote import served
    from hicache_metadata_server.protocol import Scopes

    with exit_on_error():
        remote = open_client(url, *access)
        problems = fsck_each(remote, scopes).problems
        wanted = scopes or [scope.scope for scope in remote.call("/v2/scopes", None, Scopes).scopes]
        with closing(open_page_checker(files)) as checker:
            found = check_snapshot(_some(served(remote, wanted), sample), checker)
            # A slot may have been reused between the server's answer and the read of its bytes:
            # only what is wrong a second time is reported.
            found.defects = [
                defect for defect in found.defects if _is_still_wrong(remote, defect, checker)
            ]
        _print_report(problems, found)
        if repair:
            _delete(remote, found.defects)
    return _status(problems, found)


def _checked(
    parts: Iterable[SnapshotPart], files: Path | None, sample: int | None
) -> PageCheckReport | None:
    if files is None:
        return None
    from hicache_metadata_server.backup.page_checks import check_snapshot, open_page_checker

    with closing(open_page_checker(files)) as checker:
        return check_snapshot(_some(parts, sample), checker)


def _some(parts: Iterable[SnapshotPart], sample: int | None) -> Iterable[SnapshotPart]:
    if sample is None:
        return parts
    from hicache_metadata_server.backup.page_checks import sampled

    return sampled(parts, sample, random.Random())


def _rewrite(
    store: str, service: MetadataService, defects: Iterable[PageDefect], stamp: object
) -> None:
    from hicache_metadata_server.backup.filters import without
    from hicache_metadata_server.backup.offline import snapshot_of
    from hicache_metadata_server.backup.sqlite import StoreStamp
    from hicache_metadata_server.backup.target import fill, open_target
    from hicache_metadata_server.core.errors import SnapshotError

    going = {(defect.scope, defect.slot) for defect in defects}
    with closing(open_target(store, replace=True)) as target:
        if StoreStamp.of(store) != stamp:
            raise SnapshotError(
                f"a server has opened {store} since the check; nothing was repaired"
            )
        tally = fill(target, without(snapshot_of(service, time.time()), going))
        target.commit()
    typer.echo(f"repaired: {tally.pages:,} pages left", err=True)


def _is_still_wrong(remote: AdminClient, defect: PageDefect, checker: PageChecker) -> bool:
    """Return True if a page is still live in its slot, and its bytes are still wrong.

    The question comes after the read: a page that is live now was live when its bytes were read.
    """
    from hicache_metadata_server.backup.page_checks import defects_of
    from hicache_metadata_server.core.snapshot_parts import Pages
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
