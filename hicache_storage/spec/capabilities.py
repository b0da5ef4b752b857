"""Capabilities: guarantees that a driver declares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hicache_storage.spec.removals import RemovalScope
from hicache_storage.spec.transfers import MAX_KEY_BYTES


class Sharing(StrEnum):
    """Scope in which the pages of a storage are visible."""

    NONE = "none"
    """Only the storage itself."""
    PROCESS = "process"
    """Every storage of equal identity and configuration in the same process."""
    PROCESSES = "processes"
    """Also those of other processes and nodes."""


class Durability(StrEnum):
    """Events that an acknowledged page survives."""

    NONE = "none"
    REOPEN = "reopen"
    """Closing the storage and opening it again."""
    PROCESS = "process"
    """Also the death of any process at any instant."""
    MACHINE = "machine"
    """Also the loss of power."""


class HungReads(StrEnum):
    """Policy for a read that has not returned at the deadline of its get (rule GET-9)."""

    WAIT = "wait"
    """The get waits: reads go straight into the host pool and cannot be cancelled."""
    BOUNCE_BUFFER = "bounce_buffer"
    """The get returns at the deadline: reads go through bounce buffers of the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a driver or of one storage.

    The rules of a declared capability are binding; a call of one that is not declared raises.
    """

    sharing: Sharing = Sharing.NONE
    durability: Durability = Durability.NONE
    deletes: bool = False
    """`delete()` is implemented."""
    clears: bool = False
    """`clear()` is implemented."""
    evicts: bool = False
    """Pages are evicted, to keep a configured capacity or to leave others room (rules EV)."""
    removals: RemovalScope = RemovalScope.NONE
    """`removals()` is implemented, and reports these (rules RM)."""
    networked: bool = False
    """Calls leave the machine, so that round trips count (rule EX-10)."""
    requests_in_flight: int | None = None
    """Requests that an exists has in flight at a time, where the store serves one for each page.

    None where one request serves a whole lookup. EX-10 counts by it how often an exists may wait.
    """
    hung_reads: HungReads = HungReads.WAIT
    may_hang: bool = True
    """True if a call may hang while the store does not respond.

    A deadline then needs a thread (about 60 us a call).

    False for storage in memory alone. A local disk may stall as well as a network.
    """
    lookup_seconds: float | None = None
    """Limit of the time of an exists of an open storage, in seconds.

    Kept by the driver itself, whatever the store does.

    Such an exists needs no thread, unless the deadline is shorter. None if it may hang.
    """
    head_shards: bool = False
    """Pools are stored in shards of KV heads, where the identity has a `store_tp_size`.

    Every driver over `ObjectStorage` has it from there. A driver without it may store what a rank
    holds as one object: other TP sizes do not find it.
    """
    max_page_bytes: int | None = None
    """Largest page that can be stored, None for no limit."""
    max_key_bytes: int = MAX_KEY_BYTES

    def exceeding(self, declared: Capabilities) -> list[str]:
        """Return the promises that `declared` does not make, or makes weaker, as `name=value`.

        What depends on where a store lies (whether calls leave the machine, may hang, or need
        buffers) and `head_shards`, which `ObjectStorage` adds, are no promises of a driver.
        """
        return [
            f"{name}={getattr(self, name)}"
            for name in _PROMISES
            if _strength(getattr(self, name)) > _strength(getattr(declared, name))
        ]


_PROMISES: Final = (
    "sharing",
    "durability",
    "deletes",
    "clears",
    "evicts",
    "removals",
    "max_page_bytes",
    "max_key_bytes",
)


def _strength(value: StrEnum | int | None) -> float:
    if isinstance(value, StrEnum):
        # Members are declared from the weakest promise to the strongest.
        return list(type(value)).index(value)
    # No limit promises more than any limit.
    return float("inf") if value is None else value
