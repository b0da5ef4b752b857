"""`hicache demo`: a writer is killed, and every acknowledged page comes back in another process."""

from __future__ import annotations

import tempfile
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer
from rich.console import Console


def demo(
    path: Annotated[
        Path | None, typer.Option(help="Directory of the store; by default a temporary one.")
    ] = None,
    gib: Annotated[float, typer.Option(help="Size of a conversation, in GiB.")] = 1.0,
) -> None:
    """Store a hybrid model's cache, kill the writer, restore it elsewhere, verify every byte.

    Exits with 1 if an acknowledged page is lost or wrong.
    """
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as temporary:
        store = str(path or temporary)
        console.print(
            f"a process stores the cache of a conversation, {gib:g} GiB of KV pages and Mamba "
            f"states, in {store}, and is killed before its end",
            soft_wrap=True,
            markup=False,
        )
        # Torch is in there, which takes seconds.
        from hicache_storage.cli.demo_run import run

        if not run(store, gib, console):
            raise typer.Exit(1)
