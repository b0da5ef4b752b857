"""Reads pages: where the directory says they are, and verified, because a slot may have been given away meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.scopes import metadata_keys
from hicache_backends.hf3fs.slots.engine import SlotRead
from hicache_metadata_server.protocol import LookupScope
from hicache_storage.objects import ObjectRead
from hicache_storage.objects.envelope import stored_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.hf3fs.client.directory import Located
    from hicache_backends.hf3fs.scopes import ScopeOfSlots
    from hicache_backends.hf3fs.store import Store
    from hicache_storage.objects import Call, ReadBatch

ATTEMPTS: Final = 4
"""A page that was written anew while it was read is read from its new slot."""


@dataclass(slots=True, eq=False)
class ReadOutcome:
    """What has become of some reads."""

    arrived: set[ObjectRead] = field(default_factory=set[ObjectRead])
    faults: list[OSError] = field(default_factory=list[OSError])


_Place = tuple[int, int, int, int]
"""What the directory says about one page: slot, generation, length and checksum."""


class PageReader:
    """Reads batches of pages. Safe for many threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, batches: Sequence[ReadBatch], call: Call) -> ReadOutcome:
        """Read pages into their buffers, and verify them.

        Raises:
            StorageUnavailableError: the directory does not answer.
        """
        outcome = ReadOutcome()
        scopes = self._store.scopes([batch.namespace for batch in batches])
        wrong = dict[ObjectRead, _Place]()
        left = [list(batch.reads) for batch in batches]
        for attempt in range(ATTEMPTS):
            located = self._locate(scopes, left, call, first=not attempt)
            try:
                wrong = self._read_found(scopes, left, located, wrong, outcome, call)
            finally:
                self._store.directory.unpin(located.pins)
            if not wrong or call.expired():
                break
            left = [[read for read in reads if read in wrong] for reads in left]
        for read in wrong:
            # It could not be settled whether this is damage: a miss.
            read.retract()
        return outcome

    def _locate(
        self, scopes: Sequence[ScopeOfSlots], left: Sequence[Sequence[ObjectRead]], call: Call, *, first: bool
    ) -> Located:
        asked = [
            LookupScope(scope=scope.name, keys=metadata_keys([read.key for read in reads]))
            for scope, reads in zip(scopes, left, strict=True)
        ]
        return self._store.directory.lookup(asked, call, pin_seconds=self._store.config.pin_seconds, touch=first)

    def _read_found(
        self,
        scopes: Sequence[ScopeOfSlots],
        left: Sequence[Sequence[ObjectRead]],
        located: Located,
        before: dict[ObjectRead, _Place],
        outcome: ReadOutcome,
        call: Call,
    ) -> dict[ObjectRead, _Place]:
        """Read what was found; those that hold something else, and where."""
        jobs, places = list[SlotRead](), list[_Place]()
        for scope, reads, found in zip(scopes, left, located.scopes, strict=True):
            columns = zip(found.slots, found.generations, found.lengths, found.checksums, strict=True)
            for read, place in zip(reads, columns, strict=True):
                slot, _, length, _ = place
                if before and read in before and before[read] != place:
                    read.retract()
                if slot < 0:
                    continue
                if length != read.namespace.object_bytes or (before and before.get(read) == place):
                    # It was this page's slot before and after it was read: what is in it is damage.
                    read.damaged = True
                else:
                    jobs.append(SlotRead(read, scope.file, slot))
                    places.append(place)
        self._store.engine.read(jobs, call)
        wrong = dict[ObjectRead, _Place]()
        for job, place in zip(jobs, places, strict=True):
            read = job.read
            if job.fault is not None:
                outcome.faults.append(job.fault)
            elif job.whole and read.verify() and stored_checksum(read.envelope) == place[3]:
                outcome.arrived.add(read)
            else:
                wrong[read] = place
        return wrong
