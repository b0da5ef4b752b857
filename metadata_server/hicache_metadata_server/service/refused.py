"""A request that is not done, and why."""

from __future__ import annotations

from hicache_metadata_server.protocol import Problem


class RefusedError(Exception):
    """The client asked for what cannot be; nothing was done, unless the operation says otherwise."""

    def __init__(self, status: int, code: str, message: str, field: str = "", *, retry_seconds: int = 0) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.retry_seconds = retry_seconds
        """When it may be tried again; 0 where that is not known."""
        self.problem = Problem(code=code, message=message, field=field)


def invalid(message: str, field: str) -> RefusedError:
    """A field has a value that it cannot have."""
    return RefusedError(422, "invalid", message, field)


def too_large(message: str, field: str) -> RefusedError:
    """More than the limits allow."""
    return RefusedError(413, "too_large", message, field)


def unknown_scope(name: str, field: str) -> RefusedError:
    """Nobody has initialized it."""
    return RefusedError(404, "unknown_scope", f"scope {name!r} is not initialized", field)
