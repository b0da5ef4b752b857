"""Errors of requests to the metadata server."""

from __future__ import annotations

from typing import Final

from hicache_storage.spec import StorageRefusedError, StorageUnavailableError


class MetadataError(StorageUnavailableError):
    """The metadata server cannot be reached, or it refuses a request."""

    code = "metadata"


class UnknownScopeError(MetadataError):
    """The server does not know a scope: it is new, or the server has lost its state."""

    code = "metadata-scope"


class ScopeMismatchError(MetadataError):
    """A scope exists with other slots, bytes, geometry or identity than this client declares."""

    code = "metadata-mismatch"


class InUseError(MetadataError):
    """A scope cannot be dropped, because some of its slots are not free."""

    code = "metadata-in-use"


class MovedError(MetadataError):
    """Another server owns the scopes of the request."""

    def __init__(self, message: str, url: str) -> None:
        super().__init__(message)
        self.url = url
        """Address of that server."""


class RetryableError(MetadataError):
    """A failure that another attempt may not have, at this server or at another one."""

    code = "metadata-passing"


class NoResponseError(RetryableError):
    """No response within the time of an attempt."""


class BusyError(RetryableError):
    """A failure that a later attempt may not have; other servers would answer alike now."""


class NoOwnerError(RetryableError):
    """This server does not own the scopes now, or cannot write; another one may own them soon."""


class DrainingError(MetadataError):
    """The server gives no new leases, because it is draining; another one may."""

    code = "metadata-draining"


# Refusals, not faults: the circuit breaker must not open for a client that exceeds its rate.
class RateLimitedError(MetadataError, StorageRefusedError):
    """A proxy before the server limits rates. An immediate retry would be refused, too."""

    code = "metadata-too-many"


class QuotaError(MetadataError, StorageRefusedError):
    """The tenant has reached its quota of scopes, slots or bytes."""

    code = "metadata-quota"


def error_of_response(status: int, code: str, message: str) -> MetadataError:
    """Convert a response with a status of 400 or more to an error."""
    text = f"the metadata server refuses: {message} ({status} {code})"
    if code == "mismatch":
        text += "; all clients of a store must be configured alike"
    elif code == "unauthorized":
        text += (
            "; --token-file FILE of a command, `token` of the driver, or $HICACHE_METADATA_TOKEN"
        )
    # The status only where the code says nothing: 503 is also the status of `draining`.
    other = RetryableError if status >= 500 else MetadataError
    return _BY_CODE.get(code, _BY_STATUS.get(status, other))(text)


_BY_CODE: Final = {
    "unknown_scope": UnknownScopeError,
    "mismatch": ScopeMismatchError,
    "in_use": InUseError,
    "quota": QuotaError,
    "moving": NoOwnerError,
    "unavailable": NoOwnerError,
    "draining": DrainingError,
}
_BY_STATUS: Final = {408: BusyError, 429: RateLimitedError}
