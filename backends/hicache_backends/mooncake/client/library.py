"""Mooncake's Python module: its import, its variables, and its result codes."""

from __future__ import annotations

import importlib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hicache_storage.spec import DriverUnavailableError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

PACKAGE: Final = "mooncake-transfer-engine-non-cuda"
MIN_VERSION: Final = "0.3.13"
SYSTEM_PACKAGES: Final = "libibverbs1 libcurl4 libnuma1"
INSTALL: Final = (
    f"pip install 'hicache-storage[mooncake]', and on Debian apt-get install {SYSTEM_PACKAGES}"
)
ERRORS_ONLY: Final = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
"""Read by the C++ library when it is loaded."""
REFRESH: Final = {"MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "5"}
"""As well, so without effect if it is loaded already: the interval in which it asks the metadata
server where stores listen. Over TCP a store that was restarted under its old name has another port."""
TIME_LIMITS: Final = {"MC_RPC_TIMEOUT_MS": "5000", "MC_RPC_CONNECT_TIMEOUT_MS": "2000"}
"""Milliseconds for a request to the master, and for a connection to it."""

# Codes of mooncake-store's `ErrorCode`.
NO_ROOM: Final = -200
INVALID_PARAMS: Final = -600
INVALID_WRITE: Final = -700
NOT_FOUND: Final = -704
EXISTS: Final = -705
NO_REPLICA_IN_MEMORY: Final = -702
TRANSFER_FAILED: Final = -800
RPC_FAILED: Final = -900
RPC_TIMED_OUT: Final = -901
TENANT_QUOTA: Final = -1700
LEASE_EXPIRED: Final = -707
LOOK_UP_AGAIN: Final = frozenset({LEASE_EXPIRED, INVALID_PARAMS})
"""Codes of a read whose lookup has ended."""
GONE: Final = frozenset({-702, -703, NOT_FOUND, LEASE_EXPIRED, -710, -712})
"""Not found, not complete, or moved: a miss."""
NOT_BEGUN: Final = frozenset({0, INVALID_PARAMS})
"""Codes of a revoke for objects that this client does not write any more."""
FULL: Final = frozenset({NO_ROOM, TENANT_QUOTA})
UNREACHABLE: Final = frozenset({RPC_FAILED, RPC_TIMED_OUT})
TRANSFER_TIMEOUTS: Final = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "3", "MC_TCP_STATUS_TIMEOUT_SEC": "3"}
"""Whole seconds without progress after which the library gives a TCP transfer up.

The library's own limit is 30 s, for each object in turn."""
ABANDON_SECONDS: Final = 60.0
"""After this time the library returns a failure while the transfer goes on in the background.

A transfer that fails sooner has ended."""


Store: TypeAlias = Any
"""`mooncake.store.MooncakeDistributedStore`, which has no types. Methods return lengths or codes."""


def new_store() -> Store:
    """Create a client that is not set up.

    Raises:
        DriverUnavailableError: the library is missing or too old.
    """
    store = _module().MooncakeDistributedStore()
    if not hasattr(store, "batch_put_session_start"):
        raise DriverUnavailableError(
            f"driver 'mooncake': the installed Mooncake is too old: pip install "
            f"'{PACKAGE}>={MIN_VERSION}'"
        )
    return store


def set_transfer_timeouts() -> None:
    """Set the timeouts of TCP transfers without progress, unless the operator has set them.

    The library reads these variables at the start of each transfer. They stay set, for all its
    users in this process.
    """
    for name, seconds in TRANSFER_TIMEOUTS.items():
        os.environ.setdefault(name, seconds)


def replicate_config(copies: int) -> object:
    """The library's configuration for the number of replicas."""
    config: Any = _module().ReplicateConfig()
    config.replica_num = copies
    return config


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables within a context, except those that the operator has set."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _module() -> Any:
    with environment(ERRORS_ONLY):
        try:
            return importlib.import_module("mooncake.store")
        except ImportError as error:
            raise DriverUnavailableError(
                f"driver 'mooncake' cannot load Mooncake: {error}; {INSTALL}"
            ) from error
