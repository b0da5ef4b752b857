"""`hicache new`: a package with a driver that keeps the contract, to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hicache_storage.plugins import registry
from hicache_storage.tools.scaffold import STORES, check_name, make_package

USAGE_ERROR = 2


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the driver, as in create_storage(NAME).")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The directory to make; by default NAME, here."),
    ] = None,
    store: Annotated[
        str, typer.Option(metavar="STORE", help=f"What it begins with: {', '.join(STORES)}.")
    ] = "memory",
) -> None:
    """Make a package with a driver that runs and conforms.

    It has an entry point, options, tests, a CI workflow and a badge.

    Exits with 2, and writes nothing, if the name is unusable or taken, there is no such store, or
    the directory exists.
    """
    target = directory or Path(name)
    try:
        names = check_name(name)
        owner = registry().owners.get(name)
        if owner is not None:
            raise ValueError(
                f"{owner} registers a driver {name!r} already; two of a name exclude each other"
            )
        written = make_package(names, target, store)
    except (OSError, ValueError) as error:
        message = str(error)
        if isinstance(error, FileExistsError):
            message = f"{target} exists; nothing has been written. Choose another --directory"
        elif isinstance(error, OSError):
            message = f"cannot make {target}: {error.strerror}"
        Console(stderr=True, soft_wrap=True).print(Text(message, "red"))
        raise typer.Exit(USAGE_ERROR) from error
    console = Console(highlight=False, soft_wrap=True)
    for path in written:
        console.print(f"  {path}", markup=False)
    here = target if target.is_absolute() else f"./{target}"
    console.print(
        f"\npip install -e {here}\nhicache doctor {name}\nhicache conformance run {name}\n",
        markup=False,
    )
    console.print(
        f"Then put the calls of your own store into {target / names.package / 'driver.py'}.",
        markup=False,
    )
