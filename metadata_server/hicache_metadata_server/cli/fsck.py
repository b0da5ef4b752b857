"""`hicache metadata fsck`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hicache_metadata_server.cli.options import (
    FOUND_PROBLEMS,
    LOCAL,
    Ca,
    Certificate,
    Token,
    Url,
    audited,
    exit_on_error,
    fail,
    open_client,
    opened_store,
)

if TYPE_CHECKING:
    from hicache_metadata_server.cli.admin_client import AdminClient
    from hicache_metadata_server.core.service import MetadataService

MAX_SHOWN: Final = 100


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
) -> None:
    """Check the invariants of scopes; nothing is changed.

    Exits with 1 if it finds a problem.
    """
    if store and scope:
        fail("a store is checked as a whole: leave the scopes out, or ask a server")
    with exit_on_error():
        slots, problems = (
            _check_store(store)
            if store
            else _check_served(open_client(url, token_file, ca, certificate), scope or [])
        )
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
        return _slots(service), audited(service)
    with opened_store(store) as (service, _):
        return _slots(service), audited(service)


def _slots(service: MetadataService) -> int:
    return sum(scope.geometry.slots for scope in service.scopes.values())


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
