"""Shared options of the commands, and their error handling."""

from __future__ import annotations

from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    import ssl
    from collections.abc import Generator

    from hicache_metadata_server.protocol import Answer, Request

A = TypeVar("A", bound="Answer")

# An fsck of a large store is one request, and takes its time.
ANSWER_SECONDS: Final = 60.0
MAX_MOVES: Final = 5
CERTIFICATE: Final = "--certificate FILE, or HICACHE_METADATA_CERTIFICATE"
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


class AdminClient:
    """Client of the server at one address; opens a connection for each request.

    Raises:
        ValueError: the address is malformed.
    """

    def __init__(self, url: str, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        from hicache_metadata_server.client.failover import addresses
        from hicache_metadata_server.protocol import MSGPACK

        [self._url] = addresses(url if "://" in url else f"http://{url}")
        self._tls = tls
        self._headers = {"Content-Type": MSGPACK}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def call(self, path: str, request: Request | None, kind: type[A]) -> A:
        """Send a request to a route of the protocol; return the answer.

        Raises:
            MetadataError: there is no answer, or it is a refusal.
        """
        from msgspec import msgpack

        from hicache_metadata_server.client.errors import MetadataError, MovedError, RetryableError
        from hicache_metadata_server.client.failover import ServerEndpoint
        from hicache_metadata_server.client.http_transport import HttpTransport, PendingRequest

        body = None if request is None else msgpack.encode(request)
        pending = PendingRequest(path, self._headers, body, kind)
        url = self._url
        with closing(HttpTransport(self._tls)) as transport:
            for _ in range(MAX_MOVES):
                try:
                    return transport.send(ServerEndpoint(url), pending, ANSWER_SECONDS)
                except MovedError as moved:
                    # Servers that share a Redis name the owner of a scope.
                    url = moved.url
                except RetryableError as error:
                    # A server that requires a client certificate closes the connection without
                    # saying why.
                    if not url.startswith("https:") or not isinstance(error.__cause__, OSError):
                        raise
                    hint = f"; if the server asks for a client certificate: {CERTIFICATE}"
                    raise MetadataError(f"{error}{hint}") from error
        raise MetadataError(f"no server owns the scopes; the last one that was named is {url}")

    def problem(self) -> str:
        """Ask for the reason that the server is not ready; empty if it is."""
        from hicache_metadata_server.client.failover import ServerEndpoint
        from hicache_metadata_server.client.http_transport import HttpTransport

        with closing(HttpTransport(self._tls)) as transport:
            return transport.problem(ServerEndpoint(self._url))


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
