"""What a driver promises, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hicache_storage.spec.transfers import MAX_KEY_BYTES


class Sharing(StrEnum):
    """Who sees pages that a storage has set."""

    NONE = "none"
    """Only the storage itself."""
    PROCESS = "process"
    """Every storage of equal identity and configuration in the same process."""
    PROCESSES = "processes"
    """Also those of other processes and nodes."""


class Durability(StrEnum):
    """What an acknowledged page survives."""

    NONE = "none"
    REOPEN = "reopen"
    """Closing the storage and opening it again."""
    PROCESS = "process"
    """Also the death of any process at any instant."""
    MACHINE = "machine"
    """Also the loss of power."""


class StuckReads(StrEnum):
    """What a get does about a read that does not come back before the deadline (rule GET-9)."""

    WAITS = "waits"
    """It waits: reads go straight into the host pool and cannot be cancelled."""
    BUFFERED = "buffered"
    """It returns at the deadline: reads go through buffers of the driver's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a driver declares. Declaring a capability makes its rules binding; not declaring it makes the call raise."""

    sharing: Sharing = Sharing.NONE
    durability: Durability = Durability.NONE
    deletes: bool = False
    """`delete()` is implemented."""
    clears: bool = False
    """`clear()` is implemented."""
    evicts: bool = False
    """A configured capacity is kept by evicting pages (rules EV)."""
    networked: bool = False
    """Calls leave the machine, so that round trips count (rule EX-10)."""
    stuck_reads: StuckReads = StuckReads.WAITS
    may_hang: bool = True
    """A call may not come back while the store is away, so that keeping a deadline takes a thread (about 60 us a call).

    False for what needs no device: memory. A local disk may stall as well as a network.
    """
    lookup_seconds: float | None = None
    """Longest time that an exists of an open storage takes, whatever the store does, by limits that the driver itself keeps.

    It needs no thread where the deadline is not shorter. None where it may hang.
    """
    device_memory: bool = False
    """Host pools may lie in device memory."""
    max_page_bytes: int | None = None
    """Largest page that can be stored, None for no limit."""
    max_key_bytes: int = MAX_KEY_BYTES
