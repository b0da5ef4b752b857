"""Errors of requests, with status, code and field."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hicache_metadata_server.protocol import IDEMPOTENCY_HEADER, Problem

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


def mismatch(scope: str, name: str, known: object, wanted: object, field: str) -> RequestError:
    """A scope that exists with another property than the client declares."""
    return RequestError(
        409, "mismatch", f"scope {scope!r} has {name} {known!r}, not {wanted!r}", field
    )


def others_scope(scope: str, field: str) -> RequestError:
    """A scope of another tenant."""
    return RequestError(403, "forbidden", f"scope {scope!r} is another tenant's", field)


def in_use(scope: str, slots: int, seconds: float, field: str) -> RequestError:
    """A scope that cannot be dropped, because it is not empty."""
    message = (
        f"scope {scope!r} has {slots} slots that are live, leased or quarantined: clear it, and try "
        f"again after the quarantine"
    )
    return RequestError(409, "in_use", message, field, retry_seconds=math.ceil(seconds))


def other_size(scope: str, known: int, wanted: int) -> RequestError:
    """A scope that exists with another number of pages; for SGLang's protocol."""
    return RequestError(
        409, "mismatch", f"scope {scope!r} has {known} pages, not {wanted}", "num_pages"
    )


def stale(field: str) -> RequestError:
    """A confirm or release of a slot that is not reserved; for SGLang's protocol."""
    return RequestError(
        409, "stale", "that slot is not reserved for that key; all else was done", field
    )


def key_reused() -> RequestError:
    """An idempotency key that belongs to another request."""
    return RequestError(
        422, "key_reused", "this idempotency key belongs to another request", IDEMPOTENCY_HEADER
    )


def moved(location: str) -> RequestError:
    """A request about scopes that another server owns."""
    return RequestError(307, "moved", "another server owns these scopes", location=location)


def moving() -> RequestError:
    """A request about scopes that have no owner, or several, at the moment."""
    return RequestError(503, "moving", "these scopes are about to get an owner", retry_seconds=1)


def draining() -> RequestError:
    """A reserve that is refused while the server drains."""
    return RequestError(503, "draining", "this server gives no new leases while it drains")


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
