"""Abstract slot engine: moves pages between host memory and slots, and checks slots."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_backends.hf3fs.slots.scopes import page_key
from hicache_backends.posix.files import Handle
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead
from hicache_storage.objects.namespace import stored_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.hf3fs.slots.files import SlotFile
    from hicache_backends.hf3fs.slots.scopes import SlotScope
    from hicache_metadata_server.protocol import SlotStatus
    from hicache_storage.objects import Call, ObjectWrite


@dataclass(slots=True, eq=False)
class SlotRead:
    """One page to be read from a slot.

    The engine sets `whole` or `fault`, or neither if the file ends before the slot does.
    """

    read: ObjectRead
    file: SlotFile
    slot: int
    whole: bool = False
    """The buffers are filled and `read.verify()` was called."""
    fault: OSError | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.read.namespace.object_bytes


@dataclass(slots=True, eq=False)
class SlotWrite:
    """One page to be written to a slot."""

    write: ObjectWrite
    file: SlotFile
    slot: int
    until: float
    """Time by `time.monotonic()` after which no write begins: 9/10 of the lease."""
    whole: bool = False
    ends: float = math.inf
    """End of the lease. Bytes written after it may damage another client's page."""
    generation: int = 0
    """Generation of the leased slot."""
    fault: OSError | None = None
    in_doubt: bool = False
    """The write was given up and may still happen, so its lease is not given back."""
    size: int = field(init=False)
    """Bytes to write. They differ from `namespace.object_bytes` for objects of another length."""

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.write.buffers)) + ENVELOPE_BYTES

    @property
    def late(self) -> bool:
        """True if no write may begin any more."""
        return time.monotonic() >= self.until


class SlotEngine(ABC):
    """Reads and writes slots. Safe for many threads. Sets the fault of each job and raises none."""

    name: str
    buffered: bool
    """True if a hung read does not delay its caller beyond the deadline."""

    def adopt(self, descriptor: int) -> Handle:
        """Wrap an open file for this engine. The last reference to the handle closes it.

        Raises:
            OSError: the engine cannot use the file; the descriptor is closed.
        """
        return Handle(descriptor)

    @abstractmethod
    def read(self, jobs: Sequence[SlotRead], call: Call) -> None:
        """Read pages and verify them. Writes no host memory after the caller has returned."""

    @abstractmethod
    def write(self, jobs: Sequence[SlotWrite], call: Call) -> None:
        """Write pages. No write goes on after the return, except those in doubt."""

    @abstractmethod
    def stuck(self) -> int:
        """Count the hung reads whose callers have returned."""

    @abstractmethod
    def close(self) -> None:
        """Release threads, buffers and registrations."""


def is_damaged(engine: SlotEngine, scope: SlotScope, listed: SlotStatus, call: Call) -> bool | None:
    """Read a live slot again, and return True if a reader would not take it for its page.

    None where it cannot be read: the page may be whole.
    """
    if listed.length != scope.namespace.object_bytes:
        return True
    read = ObjectRead.aside(scope.namespace, page_key(listed.key))
    job = SlotRead(read, scope.file, listed.slot)
    engine.read([job], call)
    if job.fault is not None:
        return None
    whole = job.whole and read.verify()
    return not (whole and stored_checksum(read.envelope) == listed.checksum)
