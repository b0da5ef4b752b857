"""Chunks of a snapshot, read from Redis and written to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hicache_metadata_server.core.chunking import CHUNK_ENTRIES
from hicache_metadata_server.core.slot_table import LIVE
from hicache_metadata_server.core.snapshot_parts import EmptySlots, Pages, joined
from hicache_metadata_server.shared.catalog import MICROSECONDS, ScriptTask
from hicache_metadata_server.shared.scripts import columns_of, pages_of, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_metadata_server.shared.catalog import ScopeCatalog

SOONEST: Final = 0.001
"""Minimum quarantine of a slot that is in quarantine, in seconds; 0 would stand for a free slot."""


async def read_slots(
    catalog: ScopeCatalog, scope: str, first: int, count: int, now: float, max_lease_seconds: float
) -> tuple[Pages, EmptySlots, int, int, int]:
    """Read slots of a known scope.

    Returns:
        The live pages, the other used slots, the first slot behind all used ones, the epoch, and
        the last lease.
    """
    batches, empty, used, epoch, lease = list[Pages](), EmptySlots([], [], []), first + 1, 0, 0
    for start in range(first, first + count, CHUNK_ENTRIES):
        asked = (
            start,
            min(CHUNK_ENTRIES, first + count - start),
            round(max_lease_seconds * MICROSECONDS),
        )
        (reply,) = await catalog.run([ScriptTask("export", scope, "scope", asked)])
        used, epoch, lease, rows = value_of(reply)
        batches.append(_pages(rows, *columns_of(reply[2])))
        for slot, state, generation, left, *_ in rows:
            # Redis has durations, relative to its clock; a snapshot has times of this machine.
            if state != LIVE:
                empty.slots.append(slot)
                empty.generations.append(generation)
                empty.until.append(now + max(left / MICROSECONDS, SOONEST) if left else 0.0)
        if start + CHUNK_ENTRIES >= used:
            break
    return joined(batches), empty, used, epoch, lease


def tasks_of(scope: str, part: Pages | EmptySlots) -> Iterator[ScriptTask]:
    """Return the scripts that write a part of a snapshot into a scope that nobody uses yet."""
    for start in range(0, len(part), CHUNK_ENTRIES):
        cut = slice(start, start + CHUNK_ENTRIES)
        slots = part.slots[cut]
        if isinstance(part, Pages):
            pages = pages_of(part.lengths[cut], part.checksums[cut])
            yield ScriptTask(
                "take",
                scope,
                "scope",
                (slots, [0] * len(slots), part.keys[cut], part.prefixes[cut], part.uses[cut]),
                pages,
            )
            continue
        until = [round(end * MICROSECONDS) for end in part.until[cut]]
        names = [""] * len(slots)
        yield ScriptTask("take", scope, "scope", (slots, until, names, names, [0] * len(slots)))


def _pages(rows: list[list[Any]], lengths: list[int], checksums: list[int]) -> Pages:
    places = [i for i, row in enumerate(rows) if row[1] == LIVE]
    return Pages(
        [rows[i][0] for i in places],
        [rows[i][2] for i in places],
        [rows[i][6] for i in places],
        [lengths[i] for i in places],
        [checksums[i] for i in places],
        [rows[i][4] for i in places],
        [rows[i][5] for i in places],
    )
