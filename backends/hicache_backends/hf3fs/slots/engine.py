"""What moves pages between the host pool and slots."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_backends.posix.descriptors import Handle
from hicache_storage.objects import ENVELOPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.hf3fs.slots.files import SlotFile
    from hicache_storage.objects import Call, ObjectRead, ObjectWrite


@dataclass(slots=True, eq=False)
class SlotRead:
    """One page to be read from a slot. An engine sets either `whole` or `fault`, or neither where the file ends too early."""

    read: ObjectRead
    file: SlotFile
    slot: int
    whole: bool = False
    """The parts are filled and `read.verify()` has been asked."""
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
    """When the lease ends, by `time.monotonic()`: nothing is begun after that."""
    whole: bool = False
    ends: float = math.inf
    """When the lease ends indeed: what is written after that may lie in somebody else's page."""
    generation: int = 0
    """Of the slot, as it was leased."""
    fault: OSError | None = None
    in_doubt: bool = False
    """It may still be written, some time: its slot is not to be given back before its lease ends."""
    size: int = field(init=False)
    """Bytes that are written; not `namespace.object_bytes`, where somebody writes an object of another length."""

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.write.buffers)) + ENVELOPE_BYTES

    @property
    def late(self) -> bool:
        """Whether the slot may be somebody else's by now."""
        return time.monotonic() >= self.until


class SlotEngine(ABC):
    """Reads and writes slots. Safe for many threads; faults are told job by job and never raised."""

    name: str
    buffered: bool
    """Whether a read that hangs keeps nobody waiting."""

    def adopt(self, descriptor: int) -> Handle:
        """An open file that this engine is to use; closed with the last reference to it.

        Raises:
            OSError: the engine cannot use it; it is closed.
        """
        return Handle(descriptor)

    @abstractmethod
    def read(self, jobs: Sequence[SlotRead], call: Call) -> None:
        """Fill pages and verify them. Nothing is written to the host pool after the caller has left."""

    @abstractmethod
    def write(self, jobs: Sequence[SlotWrite], call: Call) -> None:
        """Write pages; when it returns, nothing of them is written any more, but those in doubt."""

    @abstractmethod
    def stuck(self) -> int:
        """Reads that hang, though nobody waits for them any more."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads, buffers and registrations."""
