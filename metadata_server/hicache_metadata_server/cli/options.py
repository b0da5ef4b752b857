"""Shared options of the commands, and their error handling."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_metadata_server.cli.admin_client import AdminClient
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.sqlite import SqliteStore

FOUND_PROBLEMS: Final = 1
FAILED: Final = 2
LOCAL: Final = "http://127.0.0.1:18000"

Url = Annotated[
    str, typer.Option(metavar="URL", help="Address of the server.", envvar="HICACHE_METADATA_URL")
]
Token = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File that contains only a token; default: $HICACHE_METADATA_TOKEN.",
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default="the system's",
        help="PEM file of authorities for https, or $HICACHE_METADATA_CA.",
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="PEM file with a client certificate and its key, or $HICACHE_METADATA_CERTIFICATE.",
    ),
]


Model = Annotated[
    str,
    typer.Option(metavar="NAME", help="Instead of names: the scopes of this model, all ranks."),
]


def named_scopes(remote: AdminClient, names: list[str], model: str) -> list[str]:
    """Return the given names without repetition, or the names of a model's scopes.

    Raises:
        ValueError: both are given or neither, or the model has no scope.
    """
    from hicache_metadata_server.protocol import Scopes

    if bool(names) == bool(model):
        raise ValueError("name scopes, or their model with --model NAME")
    if names:
        return list(dict.fromkeys(names))
    scopes = remote.call("/v2/scopes", None, Scopes).scopes
    found = [status.scope for status in scopes if status.model == model]
    if not found:
        models = sorted({status.model for status in scopes} - {""})
        raise ValueError(f"no scope has the model {model!r}; there are {models}")
    return found


def open_client(
    url: str, token_file: Path | None, ca: Path | None = None, certificate: Path | None = None
) -> AdminClient:
    """Return a client of the server at `url`; no request is sent yet."""
    import os

    from hicache_metadata_server.cli.admin_client import AdminClient
    from hicache_metadata_server.client.http_transport import client_context

    # Not an `envvar` of the option: the option names a file, the variable holds the token itself.
    environment = os.environ.get
    token = environment("HICACHE_METADATA_TOKEN", "")
    if token_file:
        token = token_file.read_text("utf-8").strip()
    authorities = ca or environment("HICACHE_METADATA_CA", "")
    client = certificate or environment("HICACHE_METADATA_CERTIFICATE", "")
    return AdminClient(
        url,
        token,
        client_context(ca=str(authorities), certificate=str(client))
        if url.startswith("https:")
        else None,
    )


@contextmanager
def opened_store(url: str) -> Generator[tuple[MetadataService, SqliteStore]]:
    """Return the service that a SQLite store recovers to, and the store."""
    from hicache_metadata_server.core.errors import StoreError
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.sqlite import SqliteStore
    from hicache_metadata_server.storage.store import sqlite_file

    file = sqlite_file(url)
    if not Path(file).is_file():
        # A mistyped path would be an empty store.
        raise StoreError(f"there is no store {file}")
    store, now = SqliteStore(file), time.time()
    try:
        service = MetadataService(durability=store.durability)
        service.restore(store.recover(now), store.rows, now)
        yield service, store
    finally:
        store.close()


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


@contextmanager
def exit_on_error() -> Generator[None]:
    """End the command with a message, instead of a traceback, on an expected error."""
    from hicache_metadata_server.client.errors import MetadataError
    from hicache_metadata_server.core.errors import RequestError, StoreError

    try:
        yield
    except RequestError as error:
        fail(error.problem.message)
    except (MetadataError, StoreError, ValueError, OSError) as error:
        fail(error_message(error))


def error_message(error: Exception) -> str:
    """Return the message of an error; for an `OSError` without its number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def fail(message: str) -> NoReturn:
    """End the command with a message and exit status 2."""
    # soft_wrap: messages contain commands and paths to copy, which a hard wrap would break.
    Console(stderr=True, soft_wrap=True).print(Text(message, "red"))
    raise typer.Exit(FAILED)
