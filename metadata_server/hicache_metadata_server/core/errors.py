"""A request that is not done, and why."""

from __future__ import annotations

import math

from hicache_metadata_server.protocol import IDEMPOTENCY_HEADER, Problem


class RefusedError(Exception):
    """The client asked for what cannot be; nothing was done, unless the operation says
    otherwise."""

    def __init__(
        self, status: int, code: str, message: str, field: str = "", *, retry_seconds: int = 0
    ) -> None:
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


def mismatch(scope: str, name: str, known: object, wanted: object, field: str) -> RefusedError:
    """A scope is there, and is another than the client takes it for."""
    return RefusedError(
        409, "mismatch", f"scope {scope!r} has {name} {known!r}, not {wanted!r}", field
    )


def in_use(scope: str, slots: int, seconds: float, field: str) -> RefusedError:
    """A scope that is to be removed is not empty."""
    message = f"scope {scope!r} has {slots} slots that are live, leased or quarantined: clear it, and try again after the quarantine"
    return RefusedError(409, "in_use", message, field, retry_seconds=math.ceil(seconds))


def other_size(scope: str, known: int, wanted: int) -> RefusedError:
    """The same, of the compatible part."""
    return RefusedError(
        409, "mismatch", f"scope {scope!r} has {known} pages, not {wanted}", "num_pages"
    )


def stale(field: str) -> RefusedError:
    """A client of the compatible part confirms or releases what it does not hold."""
    return RefusedError(
        409, "stale", "that slot is not reserved for that key; all else was done", field
    )


def key_reused() -> RefusedError:
    """The idempotency key belongs to another request."""
    return RefusedError(
        422, "key_reused", "this idempotency key belongs to another request", IDEMPOTENCY_HEADER
    )


def draining() -> RefusedError:
    """No new leases."""
    return RefusedError(503, "draining", "this server gives no new leases while it drains")
