"""Replay of the log at a start: the groups after the last compaction.

A crash during the replay loses nothing: the log stays, and the next start replays it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from hicache_metadata_server.core.changes import Changes
from hicache_metadata_server.storage.blocks import SlotBlock, split_by_block
from hicache_metadata_server.storage.compaction import CompactionBatch
from hicache_metadata_server.storage.schema import SCOPE_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_metadata_server.storage.blocks import LeaseColumns, StateColumns

BYTES: Final = 16 << 20
"""Bytes of the log in one transaction."""
_GROUP: Final = msgspec.msgpack.Decoder(Changes)


def replayed(
    groups: Iterator[tuple[int, bytes]], read: Callable[[int], SlotBlock | None]
) -> Iterator[CompactionBatch]:
    """Yield the blocks that groups have changed, merged into the blocks of the database.

    A block may have changes of later groups already. Replaying all groups in order repeats them, so
    the block ends in the state of the last group.

    Args:
        groups: numbers and payloads, in ascending order.
        read: returns the database's block at a place.

    Raises:
        msgspec.DecodeError: a payload is malformed.
    """
    while True:
        batch = _next_batch(groups, read)
        if not batch.last_group:
            return
        yield batch


def _next_batch(
    groups: Iterator[tuple[int, bytes]], read: Callable[[int], SlotBlock | None]
) -> CompactionBatch:
    parts: dict[int, list[tuple[StateColumns | LeaseColumns, int, int]]] = {}
    last = size = 0
    rest = Changes()
    for last, payload in groups:  # noqa: B007 - the last one is needed
        changes = _GROUP.decode(payload)
        rest.add_all_but_slots(changes)
        for scope, slots in changes.slots.items():
            for block, written, start, end in split_by_block(slots):
                parts.setdefault((scope << SCOPE_BITS) + block, []).append((written, start, end))
        size += len(payload)
        if size >= BYTES:
            break
    blocks = [(place, _merged(read(place) or SlotBlock(), parts[place])) for place in sorted(parts)]
    return CompactionBatch(blocks, last, 0, rest)


def _merged(block: SlotBlock, parts: list[tuple[StateColumns | LeaseColumns, int, int]]) -> bytes:
    for written, start, end in parts:
        written.merge(block, start, end)
    return block.encode()
