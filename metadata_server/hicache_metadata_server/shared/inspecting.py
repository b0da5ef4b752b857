"""What `inspect` tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_metadata_server.core.slot_table import NAMES
from hicache_metadata_server.protocol import SlotState, SlotStatus
from hicache_metadata_server.shared.script_results import columns_of, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def statuses_of(reply: list[Any]) -> list[SlotStatus | None]:
    """Slots, or None where a key has none."""
    lengths, checksums = columns_of(reply[2])
    return list(_statuses(value_of(reply), lengths, checksums))


def _statuses(
    rows: list[Any], lengths: list[int], checksums: list[int]
) -> Iterator[SlotStatus | None]:
    for row, length, checksum in zip(rows, lengths, checksums, strict=True):
        if not row:
            yield None
            continue
        slot, number, generation, left, key, prefix, owner, pins = row
        state: SlotState = NAMES[int(number)]
        timed = state in (SlotState.LEASED, SlotState.QUARANTINED)
        yield SlotStatus(
            slot=slot,
            state=state,
            generation=generation,
            key=key,
            prefix=prefix,
            length=length,
            checksum=checksum,
            owner=owner,
            seconds_left=left / 1e6 if timed else 0.0,
            pins=pins,
        )
