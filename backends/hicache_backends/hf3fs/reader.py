"""The get: lookup, read and verification, because a slot may change hands during the read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.slots.engine import SlotRead
from hicache_backends.hf3fs.slots.names import metadata_keys
from hicache_backends.posix.faults import ReadOutcome
from hicache_metadata_server.protocol import LookupScope
from hicache_storage.objects import ObjectRead
from hicache_storage.objects.namespace import stored_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.hf3fs.slots.files import SlotFile
    from hicache_backends.hf3fs.store import Store
    from hicache_metadata_server.protocol import FoundPages
    from hicache_storage.objects import Call, ReadBatch

ATTEMPTS: Final = 4
"""A page that moves during the read is read again, from its new slot."""


_Location = tuple[int, int, int, int]
"""Slot, generation, length and checksum of a page, as the server returns them."""


def read_pages(store: Store, batches: Sequence[ReadBatch], call: Call) -> ReadOutcome:
    """Read pages into their buffers, and verify them.

    Raises:
        StorageUnavailableError: the metadata server does not answer.
    """
    outcome = ReadOutcome()
    files = store.files([batch.namespace for batch in batches])
    wrong = dict[ObjectRead, _Location]()
    left = [list(batch.reads) for batch in batches]
    for attempt in range(ATTEMPTS):
        asked = [
            LookupScope(scope=file.scope, keys=metadata_keys([read.key for read in reads]))
            for file, reads in zip(files, left, strict=True)
        ]
        # One use for the LRU order, however often the page is read again.
        found = store.metadata.lookup(asked, call, touch=not attempt)
        wrong = _read_found(store, files, left, found, wrong, outcome, call)
        if not wrong or call.expired():
            break
        left = [[read for read in reads if read in wrong] for reads in left]
    for read in wrong:
        # Neither a hit nor certainly damaged: a miss.
        read.retract()
    return outcome


def _read_found(
    store: Store,
    files: Sequence[SlotFile],
    left: Sequence[Sequence[ObjectRead]],
    pages: Sequence[FoundPages],
    before: dict[ObjectRead, _Location],
    outcome: ReadOutcome,
    call: Call,
) -> dict[ObjectRead, _Location]:
    """Read the found slots.

    Returns the reads that failed verification, with their locations.
    """
    jobs = list[tuple[SlotRead, _Location]]()
    for file, reads, found in zip(files, left, pages, strict=True):
        columns = zip(found.slots, found.generations, found.lengths, found.checksums, strict=True)
        for read, location in zip(reads, columns, strict=True):
            slot, _, length, _ = location
            if before and read in before and before[read] != location:
                # The page has moved: what was read and found wrong was another one's.
                read.retract()
            if slot < 0:
                continue
            if length != read.namespace.object_bytes or (before and before.get(read) == location):
                # The slot was this page's before and after the read, so its content is damaged.
                read.damaged = True
            else:
                jobs.append((SlotRead(read, file, slot), location))
    store.engine.read([job for job, _ in jobs], call)
    wrong = dict[ObjectRead, _Location]()
    for job, location in jobs:
        read = job.read
        if job.fault is not None:
            outcome.faults.append(job.fault)
        elif job.whole and read.verify() and stored_checksum(read.envelope) == location[3]:
            outcome.arrived.add(read)
        else:
            # The slot may have been given to another page during the read: only the next lookup
            # tells.
            wrong[read] = location
    return wrong
