"""Messages between a case and a worker process."""

from __future__ import annotations

from typing import Any

import msgspec

from hicache_conformance.history.events import Begun, Call, Ended
from hicache_conformance.history.workload import Workload  # noqa: TC001 - msgspec reads the annotations
from hicache_conformance.model.cause import Cause  # noqa: TC001 - msgspec reads the annotations
from hicache_storage.layers import StorageOptions  # noqa: TC001 - msgspec reads the annotations
from hicache_storage.spec import PoolStats, StorageIdentity  # noqa: TC001 - msgspec reads the annotations


class PoolShape(msgspec.Struct, frozen=True, kw_only=True):
    """A host pool that a worker makes for itself; as the arguments of `GuardedPool`."""

    pages: int = 64
    page_size: int = 2
    components: tuple[int, ...] = (96, 160)


class OpenStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make a storage, register its pools and open it. Answered with `Ready`."""

    name: str
    driver: str
    config: dict[str, Any]
    identity: StorageIdentity
    pools: dict[str, PoolShape]
    options: StorageOptions | None = None
    seed: str = ""
    """Of the places in the pools."""
    clock: float = 0.0
    """Seconds by which the clock of the process is ahead of this machine's."""


class MakeCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make one call. Answered with its two ends and `Ready`."""

    call: Call
    keys: list[str]
    pool: str
    value: int = 0
    killed_at: int | None = None
    """Step of the call after which the process kills itself; 0 counts the steps alone."""


class RunWorkload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a workload. Answered with both ends of every call as they happen, and `Ready`."""

    work: Workload


class ReadStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tell a pool's counters. Answered with `Counted`."""

    pool: str


class CloseStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Close the storage and end. Answered with `Ready`."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last request has been done."""

    steps: int = 0
    """Of its call, where they were counted."""


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A pool's counters."""

    stats: PoolStats


class DriverUnusable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver cannot be made in this process."""

    reason: str


class Swallowed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Exceptions that were answered as misses since the last one of these."""

    causes: list[Cause]


class Violated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver broke a rule in this process."""

    rule: str
    message: str


class SuiteBroken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The suite itself broke in this process."""

    traceback: str


Request = OpenStorage | MakeCall | RunWorkload | ReadStats | CloseStorage
Answer = Begun | Ended | Ready | Counted | DriverUnusable | Swallowed | Violated | SuiteBroken
