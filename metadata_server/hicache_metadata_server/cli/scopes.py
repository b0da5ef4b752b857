"""`hicache metadata clear` and `hicache metadata drop`."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from hicache_metadata_server.cli.options import (
    LOCAL,
    Ca,
    Certificate,
    Token,
    Url,
    exit_on_error,
    open_client,
)

ScopeNames = Annotated[
    list[str], typer.Argument(metavar="SCOPE", help="rank:namespace, as listed by `scopes`.")
]
POLL_SECONDS: Final = 0.2


def clear(
    scope: ScopeNames,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Remove all pages and leases of scopes. The scopes stay, and data files are never written."""
    from hicache_metadata_server.protocol import Clear, Cleared

    with exit_on_error():
        remote = open_client(url, token_file, ca, certificate)
        # One by one: scopes that are named together get one owner, where servers share a Redis.
        for name in scope:
            (pages,) = remote.call("/v2/clear", Clear(scopes=[name]), Cleared).pages
            typer.echo(f"{name}: {pages:,} pages removed")


def drop(
    scope: ScopeNames,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time to wait until leased and quarantined slots are free.",
        ),
    ] = 0.0,
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Remove empty scopes from the list of scopes, all or none: `clear` them first.

    An engine that still uses one creates it again.
    """
    from hicache_metadata_server.cli.admin_client import RefusalError
    from hicache_metadata_server.protocol import Drop, Dropped

    until = time.monotonic() + wait
    with exit_on_error():
        remote = open_client(url, token_file, ca, certificate)
        while True:
            try:
                remote.call("/v2/drop", Drop(scopes=scope), Dropped)
                break
            except RefusalError as error:
                # Leases and quarantines end by themselves; other refusals do not.
                if error.code != "in_use" or time.monotonic() >= until:
                    raise
            time.sleep(POLL_SECONDS)
    # The server drops a scope that is named twice once.
    for name in dict.fromkeys(scope):
        typer.echo(f"{name}: dropped")
