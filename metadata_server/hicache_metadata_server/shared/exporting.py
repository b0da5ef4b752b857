"""Pieces of a snapshot, read from Redis and written there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hicache_metadata_server.backup.parts import Pages, Rests, joined
from hicache_metadata_server.core.chunking import CHUNK_ENTRIES
from hicache_metadata_server.core.slot_table import LIVE
from hicache_metadata_server.shared.scopes import MICROSECONDS, Task
from hicache_metadata_server.shared.script_results import columns_of, pages_of, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_metadata_server.shared.scopes import Scopes

SOONEST: Final = 0.001
"""Seconds that a slot rests at least which rests at all."""


async def read_slots(
    catalog: Scopes, scope: str, first: int, count: int, now: float, max_lease_seconds: float
) -> tuple[Pages, Rests, int, int, int]:
    """Slots of a scope that was found; and from where on nobody has used any, the epoch, and the
    last lease."""
    batches, rests, used, epoch, lease = list[Pages](), Rests([], [], []), first + 1, 0, 0
    for start in range(first, first + count, CHUNK_ENTRIES):
        asked = (
            start,
            min(CHUNK_ENTRIES, first + count - start),
            round(max_lease_seconds * MICROSECONDS),
        )
        (reply,) = await catalog.run([Task("export", scope, "scope", asked)])
        used, epoch, lease, rows = value_of(reply)
        batches.append(_pages(rows, *columns_of(reply[2])))
        for slot, state, generation, left, *_ in rows:
            if state != LIVE:
                rests.slots.append(slot)
                rests.generations.append(generation)
                rests.until.append(now + max(left / MICROSECONDS, SOONEST) if left else 0.0)
        if start + CHUNK_ENTRIES >= used:
            break
    return joined(batches), rests, used, epoch, lease


def tasks_of(scope: str, part: Pages | Rests) -> Iterator[Task]:
    """What writes a part into a scope that nobody uses yet."""
    for start in range(0, len(part), CHUNK_ENTRIES):
        cut = slice(start, start + CHUNK_ENTRIES)
        slots = part.slots[cut]
        if isinstance(part, Pages):
            pages = pages_of(part.lengths[cut], part.checksums[cut])
            yield Task(
                "take",
                scope,
                "scope",
                (slots, [0] * len(slots), part.keys[cut], part.prefixes[cut], part.uses[cut]),
                pages,
            )
            continue
        nothing, till = (
            [""] * len(slots),
            [round(until * MICROSECONDS) for until in part.until[cut]],
        )
        yield Task("take", scope, "scope", (slots, till, nothing, nothing, [0] * len(slots)))


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
