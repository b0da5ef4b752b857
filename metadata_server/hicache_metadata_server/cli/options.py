"""Shared options of the commands, and their error handling."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from inspect import Signature, signature
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator

    from hicache_metadata_server.protocol import Answer, Request

A = TypeVar("A", bound="Answer")

# An fsck of a large store is one request, and takes its time.
ANSWER_SECONDS: Final = 60.0
MAX_MOVES: Final = 5
CERTIFICATE: Final = "--certificate FILE, or HICACHE_METADATA_CERTIFICATE"
FOUND_PROBLEMS: Final = 1
FAILED: Final = 2
PREFIX: Final = "HICACHE_METADATA_"
"""Of variables of the environment."""

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


def of_server(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a server, and its client as the first argument.

    Expected errors end the command with a message.
    """

    def run(
        url: Annotated[
            str,
            typer.Option(metavar="URL", help="Address of the server.", envvar=f"{PREFIX}URL"),
        ] = "http://127.0.0.1:18000",
        # Not an `envvar`: the option names a file, the variable holds the token itself.
        token_file: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help=f"File that contains only a token; default: ${PREFIX}TOKEN.",
            ),
        ] = None,
        ca: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                show_default="the system's",
                help="PEM file of authorities for https.",
                envvar=f"{PREFIX}CA",
            ),
        ] = None,
        certificate: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help="PEM file with a client certificate and its key.",
                envvar=f"{PREFIX}CERTIFICATE",
            ),
        ] = None,
        **own: Any,
    ) -> None:
        from hicache_metadata_server.client.http_transport import client_context

        with exit_on_error():
            token = os.environ.get(f"{PREFIX}TOKEN", "")
            if token_file:
                token = token_file.read_text("utf-8").strip()
            tls = None
            if url.startswith("https:"):
                tls = client_context(ca=str(ca or ""), certificate=str(certificate or ""))
            command(AdminClient(url, token, tls), **own)

    _, *parameters = signature(command, eval_str=True).parameters.values()
    *options, _ = signature(run, eval_str=True).parameters.values()
    # Typer reads both.
    run.__signature__ = Signature([*parameters, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*parameters, *options)}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


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
