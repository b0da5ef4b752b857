"""The set: leases slots, writes them, and commits length and checksum."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.slots.engine import SlotWrite
from hicache_backends.hf3fs.slots.names import metadata_keys
from hicache_backends.hf3fs.store import TIMEOUT_SECONDS
from hicache_backends.posix.buffers import split
from hicache_backends.posix.faults import WriteOutcome, detached
from hicache_metadata_server.protocol import (
    CommitScope,
    LeaseScope,
    Reserved,
    ReserveScope,
    SlotState,
)
from hicache_storage.objects import Call, ObjectWrite
from hicache_storage.objects.namespace import ENVELOPE_BYTES, stored_checksum
from hicache_storage.spec import StorageRefusedError, StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_backends.hf3fs.slots.files import SlotFile
    from hicache_backends.hf3fs.store import Store
    from hicache_storage.objects import Namespace, WriteBatch

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 64 << 20
"""Written at a time. Before each chunk, leases of which half has passed are renewed."""
LEASE_FRACTION: Final = 0.9
"""Usable part of a lease: the rest allows for clocks that run at different speeds."""
MIN_PAUSE_SECONDS: Final = 0.01
MAX_PAUSE_SECONDS: Final = 0.1


@dataclass(slots=True, eq=False)
class _BatchProgress:
    """Progress of one batch of a call."""

    file: SlotFile
    left: list[ObjectWrite]
    """Pages to be stored, in their order, in which each is a prefix of the next."""
    deleted: set[ObjectWrite] = field(default_factory=set[ObjectWrite])
    """Writes whose former page this call has deleted."""
    stored: int = 0
    jobs: list[SlotWrite] = field(default_factory=list[SlotWrite])
    """One for each lease that is held."""
    full: bool = False
    """The last pass found no slot for some of them."""
    existing: list[ObjectWrite] = field(default_factory=list[ObjectWrite])
    """Pages that are there and have to be replaced."""


class PageWriter:
    """Writes batches of pages. Safe for many threads.

    Args:
        store: the open store.
        on_evicted: called with a namespace and the number of pages that the server has evicted.
    """

    def __init__(self, store: Store, on_evicted: Callable[[Namespace, int], None]) -> None:
        self._store = store
        self._on_evicted = on_evicted

    def write(self, batches: Sequence[WriteBatch], call: Call) -> WriteOutcome:
        """Store pages.

        Raises:
            StorageUnavailableError: the metadata server does not answer, and nothing was stored.
        """
        outcome = WriteOutcome()
        files = self._store.files([batch.namespace for batch in batches])
        progress = [
            _BatchProgress(file, _fitting(batch, file))
            for batch, file in zip(batches, files, strict=True)
        ]
        if call.expired():
            return outcome
        # In this order: a client that finds a file without length tells the server that nobody has
        # a lease of it, and that must be so.
        self._store.metadata.initialize([file.scope for file in files], call)
        for batch in progress:
            try:
                # Before the reservation, which may evict pages for those that cannot be written.
                batch.file.borrow(writes=True)
            except OSError as error:
                outcome.faults.append(detached(error))
                batch.left = []
        until, pause = time.monotonic() + self._store.config.wait_seconds, MIN_PAUSE_SECONDS
        while any(batch.left for batch in progress) and not call.expired():
            try:
                again = self._pass(progress, outcome, call)
            except StorageUnavailableError as error:
                if not outcome.stored:
                    raise
                outcome.faults.append(error)
                break
            if again or not any(batch.left for batch in progress):
                continue
            left = call.remaining()
            if time.monotonic() + pause > until or (left is not None and left < 2 * pause):
                break
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        self._note_refusals(progress, outcome)
        return outcome

    def _note_refusals(self, batches: Sequence[_BatchProgress], outcome: WriteOutcome) -> None:
        """Note the pages for which no slot has left quarantine in time."""
        for batch in batches:
            if batch.full and batch.left:
                text = (
                    f"no slot of {batch.file.scope} is free, all are leased or in quarantine; "
                    f"full, it takes {self._store.sustained(batch.file)} for long, and more with a "
                    f"larger file_size or a shorter quarantine; a restored store of the server "
                    f"gives slots once earlier leases have ended"
                )
                outcome.faults.append(StorageRefusedError(text))

    def _pass(self, batches: Sequence[_BatchProgress], outcome: WriteOutcome, call: Call) -> bool:
        """Store what can be stored now; the rest is left.

        True if the next pass can begin without a pause.
        """
        self._reserve(batches, outcome, call)
        try:
            self._put(batches, outcome, call)
        except BaseException:
            # Otherwise other writers would wait for these keys until the leases end.
            self._abort(batches)
            raise
        return self._delete_existing(batches, call)

    # Leases.

    def _reserve(
        self, batches: Sequence[_BatchProgress], outcome: WriteOutcome, call: Call
    ) -> None:
        config = self._store.config
        named = [
            (batch.file.scope, metadata_keys([write.key for write in batch.left]))
            for batch in batches
        ]
        asked = [
            ReserveScope(scope=name, keys=keys, prefixes=_prefixes(keys, call))
            for name, keys in named
        ]
        # Before the request: the server counts from its receipt, so that a lease ends here first.
        begin = time.monotonic()
        answer = self._store.metadata.reserve(asked, call, lease_seconds=config.lease_seconds)
        until, ends = begin + LEASE_FRACTION * answer.lease_seconds, begin + answer.lease_seconds
        for batch, part in zip(batches, answer.scopes, strict=True):
            writes = batch.left
            batch.left = []
            batch.jobs = []
            batch.full = False
            batch.existing = []
            if part.evicted:
                self._on_evicted(batch.file.namespace, part.evicted)
            # Pages of this call are not evicted for others of it, so no more than these can wait.
            room = (
                batch.file.slots
                - batch.stored
                - sum(state is Reserved.LEASED for state in part.states)
            )
            columns = zip(
                writes, part.states, part.slots, part.generations, part.leases, strict=True
            )
            for write, state, slot, generation, lease in columns:
                if state is Reserved.LEASED:
                    batch.jobs.append(
                        SlotWrite(write, batch.file, slot, generation, lease, until, ends)
                    )
                elif state is Reserved.EXISTS and write.replaces and write not in batch.deleted:
                    batch.existing.append(write)
                    batch.left.append(write)
                elif state is Reserved.EXISTS:
                    write.existed = True
                    outcome.stored.add(write)
                elif state is Reserved.BUSY or room > 0:
                    room -= state is Reserved.FULL
                    batch.full = batch.full or state is Reserved.FULL
                    # Another writer has it, or there is no slot yet.
                    batch.left.append(write)

    def _put(self, batches: Sequence[_BatchProgress], outcome: WriteOutcome, call: Call) -> None:
        """Write the leased slots, and commit those that were written whole."""
        if not any(batch.jobs for batch in batches):
            return
        for chunk in split(
            (job for batch in batches for job in batch.jobs), attrgetter("size"), CHUNK_BYTES
        ):
            self._renew(batches, call)
            self._store.engine.write(chunk, call)
        self._check_late_writes(batches)
        outcome.faults += [
            job.fault for batch in batches for job in batch.jobs if job.fault is not None
        ]
        # The caller may have overwritten the bytes while they were written (rule SET-8).
        if not call.expired():
            self._commit(batches, outcome, call)
        self._abort(batches)

    def _commit(self, batches: Sequence[_BatchProgress], outcome: WriteOutcome, call: Call) -> None:
        """Publish the pages that were written whole."""
        whole = [[job for job in batch.jobs if job.whole] for batch in batches]
        asked = [
            CommitScope(
                scope=batch.file.scope,
                leases=[job.lease for job in jobs],
                lengths=[job.size for job in jobs],
                checksums=[stored_checksum(job.write.envelope) for job in jobs],
            )
            for batch, jobs in zip(batches, whole, strict=True)
        ]
        done = self._store.metadata.commit(asked, call)
        for batch, jobs, flags in zip(batches, whole, done, strict=True):
            batch.stored += sum(flags)
            outcome.stored.update(job.write for job, flag in zip(jobs, flags, strict=True) if flag)
        self._note_lost_leases(batches, outcome)
        for batch in batches:
            # Answered, so settled either way: a lease that was refused is not held any more.
            batch.jobs = [job for job in batch.jobs if not job.whole]

    def _note_lost_leases(self, batches: Sequence[_BatchProgress], outcome: WriteOutcome) -> None:
        """Note a fault where leases ended, or were lost to a clear, before their pages were stored.

        Otherwise nobody would learn why pages are refused on a machine whose disk stalls.
        """
        lost = sum(
            job.late and job.fault is None and job.write not in outcome.stored
            for batch in batches
            for job in batch.jobs
        )
        if lost:
            outcome.faults.append(
                StorageTimeoutError(
                    f"hf3fs: {lost} leases ended before their pages were stored; longer leases "
                    f"('lease_seconds') allow for a disk that stalls"
                )
            )

    def _renew(self, batches: Sequence[_BatchProgress], call: Call) -> None:
        """Renew leases of which half has passed. No write of a lost lease begins."""
        seconds = self._store.config.lease_seconds
        jobs = [job for batch in batches for job in batch.jobs]
        if min(job.until for job in jobs) - time.monotonic() > seconds / 2:
            return
        begin = time.monotonic()
        asked = [_leases(batch) for batch in batches]
        held = self._store.metadata.renew(asked, call, lease_seconds=seconds)
        for batch, flags in zip(batches, held, strict=True):
            for job, flag in zip(batch.jobs, flags, strict=True):
                job.until = begin + LEASE_FRACTION * seconds if flag else 0.0
                job.ends = begin + seconds if flag else job.ends

    def _abort(self, batches: Sequence[_BatchProgress]) -> None:
        """Give leases back."""
        self._store.metadata.abort([_leases(batch) for batch in batches])

    # Late writes.

    def _check_late_writes(self, batches: Sequence[_BatchProgress]) -> None:
        """Delete the pages that late writes have damaged: their slots may have had new owners.

        No file system refuses such a write. A reader would find the damage, but until then a set
        would take the page for stored.
        """
        now = time.monotonic()
        for batch in batches:
            late = {job.slot: job for job in batch.jobs if now >= job.ends}
            if not late:
                continue
            try:
                pages = self._delete_overwritten(batch.file, late)
                damage = f"{pages} pages of others were damaged"
            except StorageUnavailableError as error:
                damage = f"what they damaged is not known: {error}"
            logger.warning("hf3fs: %d writes ended after their leases; %s", len(late), damage)

    def _delete_overwritten(self, file: SlotFile, late: Mapping[int, SlotWrite]) -> int:
        # The deadline of the running call has usually passed by now.
        call = Call(TIMEOUT_SECONDS)
        others = [
            page
            for page in self._store.metadata.inspect(file.scope, call, slots=list(late))
            # With the generation of the lease the slot still has this writer's own page.
            if page.state is SlotState.LIVE and page.generation != late[page.slot].generation
        ]
        deleted, _ = self._store.delete_damaged(file, others, call)
        return deleted

    # Existing pages.

    def _delete_existing(self, batches: Sequence[_BatchProgress], call: Call) -> bool:
        """Delete the pages that are to be replaced; True if there are any."""
        some = [batch for batch in batches if batch.existing]
        for batch in some:
            keys = [write.key for write in batch.existing]
            pages = self._store.live_pages(batch.file, keys, call)
            self._store.delete(batch.file, pages, call)
            batch.deleted.update(batch.existing)
        return bool(some)


def _fitting(batch: WriteBatch, file: SlotFile) -> list[ObjectWrite]:
    """Return the writes that fit into a slot; only objects of another length do not."""
    limit = file.slot_bytes - ENVELOPE_BYTES
    return [write for write in batch.writes if sum(map(len, write.buffers)) <= limit]


def _leases(batch: _BatchProgress) -> LeaseScope:
    return LeaseScope(scope=batch.file.scope, leases=[job.lease for job in batch.jobs])


def _prefixes(keys: Sequence[str], call: Call) -> list[str]:
    """Return the key before each key. Any earlier page of the chain is a valid prefix."""
    first = metadata_keys(call.prefix_keys[-1:]) or [""]
    return [*first, *keys][: len(keys)]
