"""Geometry of a slot file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache_storage.objects import Namespace

SECTOR: Final = 512
BLOCK: Final = 4096
LARGE: Final = 256 << 10
"""Objects of this size and larger end on a block: padding takes less than 2 %."""


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """Number and length of slots.

    Slot i begins at byte `i * slot_bytes`. It holds the page's components, its envelope and
    padding.
    """

    slot_bytes: int
    slots: int

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.slot_bytes * self.slots

    @classmethod
    def of(cls, namespace: Namespace, file_bytes: int) -> SlotGeometry:
        """Compute the slots for pages of a namespace that fit into `file_bytes`.

        Raises:
            ValueError: no slot fits.
        """
        unit = BLOCK if namespace.object_bytes >= LARGE else SECTOR
        slot_bytes = -(-namespace.object_bytes // unit) * unit
        if file_bytes < slot_bytes:
            raise ValueError(
                f"file_size {file_bytes} is less than a page of pool {namespace.pool} takes: "
                f"{slot_bytes} bytes"
            )
        return cls(slot_bytes, file_bytes // slot_bytes)
