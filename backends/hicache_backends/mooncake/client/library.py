"""The part of Mooncake's Python module that this driver calls, its result codes, and how it is imported."""

from __future__ import annotations

import importlib
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from hicache_storage.spec import DriverUnavailableError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

PACKAGE: Final = "mooncake-transfer-engine-non-cuda"
OLDEST: Final = "0.3.13"
SYSTEM_PACKAGES: Final = "libibverbs1 libcurl4 libnuma1"
INSTALL: Final = f"pip install 'hicache-storage[mooncake]', and on Debian apt-get install {SYSTEM_PACKAGES}"
ERRORS_ONLY: Final = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
"""Looked at by its C++ side when it is loaded."""

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
GONE: Final = frozenset({-702, -703, NOT_FOUND, -707, -710, -712})
"""Not there, not complete, or no longer where the master thought: a miss."""
NOT_BEGUN: Final = frozenset({0, INVALID_PARAMS})
"""What the library answers who gives up an object that it is writing no longer, or has never begun to."""
FULL: Final = frozenset({NO_ROOM, TENANT_QUOTA})
UNREACHABLE: Final = frozenset({RPC_FAILED, RPC_TIMED_OUT})
PATIENCE: Final = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "10", "MC_TCP_STATUS_TIMEOUT_SEC": "10"}
"""Whole seconds that a TCP transfer may stand still before the library gives it up: without these 30, for each object in turn."""
OWN_PATIENCE_SECONDS: Final = 30
HANGS: Final = 0.9
"""Of the patience: what fails sooner has failed at once, or soon after it had made progress."""
GIVES_UP_SECONDS: Final = 60.0
"""A transfer that takes longer is answered as failed though it goes on. A sooner failure is the end of it."""


class Store(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`. Numbers that are answered are lengths or codes."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        *,
        tenant_id: str,
    ) -> int: ...

    def close(self) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def unregister_buffer(self, buffer_ptr: int) -> int: ...

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]
    ) -> list[int]: ...

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]: ...

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]: ...

    def batch_get_session_end(self, keys: Sequence[str]) -> int: ...

    def batch_put_session_start(self, keys: Sequence[str], sizes: Sequence[int], config: object) -> list[int]: ...

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]: ...

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]: ...

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]: ...

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]: ...

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int: ...

    def get_size(self, key: str) -> int: ...


def check_installed() -> None:
    """Load the library.

    Raises:
        DriverUnavailableError: it is missing, or one that it is linked to; the message says how to install them.
    """
    _module()


def new_store() -> Store:
    """A client that is not set up.

    Raises:
        DriverUnavailableError: the library is missing or too old.
    """
    store = cast("Store", _module().MooncakeDistributedStore())
    if not hasattr(store, "batch_put_session_start"):
        raise DriverUnavailableError(f"driver 'mooncake': the installed Mooncake is too old: pip install '{PACKAGE}>={OLDEST}'")
    return store


def limit_patience() -> None:
    """Let transfers over TCP that stand still be given up sooner, unless the operator has said when.

    The library looks at these variables whenever a transfer begins, so that they stay, for all its users in this process.
    """
    for name, seconds in PATIENCE.items():
        os.environ.setdefault(name, seconds)


def has_hung(began: float) -> bool:
    """Whether a transfer that has failed, begun at a time of `time.monotonic()`, was given up for standing still."""
    patience = min(_whole_seconds(os.environ.get(name, "")) for name in PATIENCE)
    return time.monotonic() - began >= HANGS * patience


def replicate_config(copies: int) -> object:
    """How an object is to be kept."""
    config: Any = _module().ReplicateConfig()
    config.replica_num = copies
    return config


def _whole_seconds(text: str) -> int:
    """As the library reads them: what is no positive number counts for nothing."""
    return int(text) if text.isdecimal() and int(text) else OWN_PATIENCE_SECONDS


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Variables for what reads them at once; those that the operator has set stay as they are."""
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
            raise DriverUnavailableError(f"driver 'mooncake' cannot load Mooncake: {error}; {INSTALL}") from error
