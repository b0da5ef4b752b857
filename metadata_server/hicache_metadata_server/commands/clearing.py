"""`hicache metadata clear`."""

from __future__ import annotations

from typing import Annotated

import typer

from hicache_metadata_server.commands.asking import LOCAL, Ca, Certificate, Token, Url, complaints, remote_of


def clear(
    scope: Annotated[list[str], typer.Argument(metavar="SCOPE", help="rank:namespace, as `scopes` lists it.")],
    url: Url = LOCAL,
    token_file: Token = None,
    ca: Ca = None,
    certificate: Certificate = None,
) -> None:
    """Forget all pages of some scopes, and the leases on them. The scopes stay, and data files are never written."""
    from hicache_metadata_server.protocol import Clear, Cleared

    with complaints():
        cleared = remote_of(url, token_file, ca, certificate).call("/v2/clear", Clear(scopes=scope), Cleared)
    for name, pages in zip(scope, cleared.pages, strict=True):
        typer.echo(f"{name}: {pages:,} pages forgotten")
