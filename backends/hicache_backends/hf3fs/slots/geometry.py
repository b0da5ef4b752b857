"""How pages lie in a file of slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache_storage.objects import Namespace

SECTOR: Final = 512
BLOCK: Final = 4096
LARGE: Final = 256 << 10
"""From here on, what is lost by ending slots on a block is less than two in a hundred."""


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """Slot i lies at byte `i * slot_bytes`: the page's components, its envelope, and nothing up to the next slot."""

    slot_bytes: int
    slots: int

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.slot_bytes * self.slots

    @classmethod
    def of(cls, namespace: Namespace, file_bytes: int) -> SlotGeometry:
        """As many slots for pages of a namespace as fit into so many bytes.

        Raises:
            ValueError: not even one does.
        """
        unit = BLOCK if namespace.object_bytes >= LARGE else SECTOR
        slot_bytes = -(-namespace.object_bytes // unit) * unit
        if file_bytes < slot_bytes:
            raise ValueError(f"file_size {file_bytes} is less than a page of pool {namespace.pool} takes: {slot_bytes} bytes")
        return cls(slot_bytes, file_bytes // slot_bytes)
