"""Errors of requests, with status, code and field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_metadata_server.protocol import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence


class RequestError(Exception):
    """A request that is refused. It has changed nothing, unless the operation says otherwise."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: str = "",
        *,
        retry_seconds: int = 0,
        location: str = "",
    ) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.location = location
        """URL that serves the request; empty for none."""
        self.retry_seconds = retry_seconds
        """Seconds until a retry may succeed; 0 if unknown."""
        self.problem = Problem(code=code, message=message, field=field)


def invalid(message: str, field: str) -> RequestError:
    """A field with a value that it cannot have."""
    return RequestError(422, "invalid", message, field)


def too_large(message: str, field: str) -> RequestError:
    """A request that exceeds the limits."""
    return RequestError(413, "too_large", message, field)


def unknown_scope(name: str, field: str) -> RequestError:
    """A scope that is not initialized."""
    return RequestError(404, "unknown_scope", f"scope {name!r} is not initialized", field)


def moved(location: str) -> RequestError:
    """A request about scopes that another server owns."""
    return RequestError(307, "moved", "another server owns these scopes", location=location)


def moving() -> RequestError:
    """A request about scopes that have no owner, or several, at the moment."""
    return RequestError(503, "moving", "these scopes are about to get an owner", retry_seconds=1)


class StoreError(Exception):
    """The store cannot be opened, read or written."""


class FencedError(StoreError):
    """Another server owns scopes by now, or their log has lost writes.

    Nothing was written to them. The store works.
    """

    def __init__(self, scopes: Sequence[str]) -> None:
        names = ", ".join(scopes) or "these scopes"
        super().__init__(f"another server owns {names}, or their log has lost writes")
        self.scopes = scopes
