"""`hicache` itself, without a command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hicache-storage {version('hicache-storage')}")
        raise typer.Exit


def root(
    _version: Annotated[
        bool,
        typer.Option(
            # Eager: it ends before typer complains that no command was given.
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version and end.",
        ),
    ] = False,
) -> None:
    """Drivers and tools for KV caches outside the GPU."""
