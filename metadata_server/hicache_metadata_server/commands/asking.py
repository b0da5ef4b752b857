"""What commands have in common: whom they ask, and how they fail."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_metadata_server.remote import Remote

FOUND_PROBLEMS: Final = 1
FAILED: Final = 2

Token = Annotated[Path | None, typer.Option("--token-file", help="A file with nothing but a token, or $HICACHE_METADATA_TOKEN.")]


def remote_of(url: str, token_file: Path | None) -> Remote:
    """A client of the server there, which has not been asked yet."""
    import os

    from hicache_metadata_server.remote import Remote

    token = token_file.read_text("utf-8").strip() if token_file else os.environ.get("HICACHE_METADATA_TOKEN", "")
    return Remote(url, token)


@contextmanager
def complaints() -> Generator[None]:
    """Errors that are the operator's to read end the command with a sentence."""
    from hicache_metadata_server.remote import RemoteError
    from hicache_metadata_server.service.refused import RefusedError
    from hicache_metadata_server.stores.store import StoreError

    try:
        yield
    except RefusedError as error:
        fail(error.problem.message)
    except (RemoteError, StoreError, ValueError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """End the command with a sentence."""
    Console(stderr=True, soft_wrap=True).print(Text(message, "red"))
    raise typer.Exit(FAILED)
