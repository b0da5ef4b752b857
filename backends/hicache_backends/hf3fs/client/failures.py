"""Why the metadata server has not done what it was asked."""

from __future__ import annotations

from hicache_storage.spec import StorageRefusedError, StorageUnavailableError


class MetadataError(StorageUnavailableError):
    """The metadata server cannot be reached, does not understand, or refuses."""

    code = "metadata"


class UnknownScopeError(MetadataError):
    """The server knows nothing of a scope: it is new, or the server has lost its memory."""

    code = "metadata-scope"


class ScopeMismatchError(MetadataError):
    """A scope is there with other slots, bytes, geometry or identity than this client takes it for."""

    code = "metadata-mismatch"


class InUseError(MetadataError):
    """A scope that is to be dropped has slots that are not free."""

    code = "metadata-in-use"


class PassingError(MetadataError):
    """Asked again, the server may answer; or another one of its store."""

    code = "metadata-passing"


class SilentError(PassingError):
    """The server has not answered in time."""

    code = "metadata-silent"


class BusyError(PassingError):
    """Asked again, the server may answer; another one would say the same."""

    code = "metadata-busy"


class DrainingError(MetadataError):
    """The server gives no new leases, because it is about to end; another one of its store may."""

    code = "metadata-draining"


class TooManyError(MetadataError, StorageRefusedError):
    """The tenant sends more requests than it may: asked again at once, the server would refuse again."""

    code = "metadata-too-many"


class QuotaError(MetadataError, StorageRefusedError):
    """The tenant has as many scopes, slots or bytes as it may have."""

    code = "metadata-quota"


def refusal(status: int, code: str, message: str) -> MetadataError:
    """What an answer with a status of 400 or more means."""
    text = f"the metadata server refuses: {message} ({status} {code})"
    if code == "unknown_scope":
        return UnknownScopeError(text)
    if code == "mismatch":
        return ScopeMismatchError(f"{text}; all clients of a store must be configured alike")
    if code == "unauthorized":
        return MetadataError(f"{text}; the driver's option is `token`, or $HICACHE_METADATA_TOKEN")
    if code == "in_use":
        return InUseError(text)
    if status == 429:
        return TooManyError(text)
    if code == "quota":
        return QuotaError(text)
    if status == 408:
        return BusyError(text)
    if code == "draining":
        return DrainingError(text)
    if status >= 500:
        return PassingError(text)
    return MetadataError(text)
