"""Writes pages: slots are leased, written, and made live with length and checksum."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.scopes import metadata_key, metadata_keys
from hicache_backends.hf3fs.slots.checking import MISFITS, CheckedFile, Claim
from hicache_backends.hf3fs.slots.engine import SlotWrite
from hicache_metadata_server.protocol import (
    CommitScope,
    DeleteScope,
    LeaseScope,
    LookupScope,
    Reserved,
    ReserveScope,
    SlotState,
)
from hicache_storage.objects import Call, ObjectWrite
from hicache_storage.objects.envelope import ENVELOPE_BYTES, stored_checksum
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicache_backends.hf3fs.scopes import ScopeOfSlots
    from hicache_backends.hf3fs.store import Store
    from hicache_storage.objects import Namespace, WriteBatch

logger = logging.getLogger(__name__)

STRETCH_BYTES: Final = 64 << 20
"""Written at a time; before each stretch, leases that are half over are renewed."""
LEASE_SHARE: Final = 0.9
"""Of a lease counts as lasting: the rest is for clocks that run differently."""
SHORTEST_PAUSE: Final = 0.01
LONGEST_PAUSE: Final = 0.1


@dataclass(slots=True, eq=False)
class WriteOutcome:
    """What has become of some writes."""

    stored: set[ObjectWrite] = field(default_factory=set[ObjectWrite])
    faults: list[Exception] = field(default_factory=list[Exception])


@dataclass(slots=True, eq=False)
class _Share:
    """One batch of a call, as far as it has come."""

    scope: ScopeOfSlots
    left: list[ObjectWrite]
    given_way: set[ObjectWrite] = field(default_factory=set[ObjectWrite])
    """Those that were to replace another, which is gone."""
    stored: int = 0
    leases: list[int] = field(default_factory=list[int])
    jobs: list[SlotWrite] = field(default_factory=list[SlotWrite])
    """As many as `leases`."""
    waiting: list[ObjectWrite] = field(default_factory=list[ObjectWrite])
    """Somebody else writes them, or there is no slot for them yet."""
    existing: list[ObjectWrite] = field(default_factory=list[ObjectWrite])

    def given_back(self, settled: set[int]) -> list[int]:
        """Leases that are neither settled nor of a write that may still happen."""
        pairs = zip(self.leases, self.jobs, strict=True)
        return [lease for lease, job in pairs if lease not in settled and not job.in_doubt]


class PageWriter:
    """Writes batches of pages. Safe for many threads.

    Args:
        store: the open store.
        evicted: told the namespace and the number of pages that were evicted.
        owner: whom others see in the metadata server as holding the leases.
    """

    def __init__(self, store: Store, evicted: Callable[[Namespace, int], None], owner: str) -> None:
        self._store, self._evicted, self._owner = store, evicted, owner

    def write(self, batches: Sequence[WriteBatch], call: Call) -> WriteOutcome:
        """Store pages.

        Raises:
            StorageUnavailableError: the directory does not answer, and nothing was stored.
        """
        outcome = WriteOutcome()
        scopes = self._store.scopes([batch.namespace for batch in batches])
        shares = [_Share(scope, self._fitting(batch, scope, outcome)) for batch, scope in zip(batches, scopes, strict=True)]
        until, pause = time.monotonic() + self._store.config.wait_seconds, SHORTEST_PAUSE
        while any(share.left for share in shares) and not call.expired():
            try:
                goes_on = self._pass(shares, outcome, call)
            except StorageUnavailableError as error:
                if not outcome.stored:
                    raise
                outcome.faults.append(error)
                break
            if goes_on or not any(share.left for share in shares):
                continue
            left = call.remaining()
            if time.monotonic() + pause > until or (left is not None and left < 2 * pause):
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return outcome

    def _pass(self, shares: Sequence[_Share], outcome: WriteOutcome, call: Call) -> bool:
        """Do what can be done now; whether more can be done at once."""
        self._reserve(shares, call)
        try:
            self._put(shares, outcome, call)
        except BaseException:
            self._give_back(shares, set())
            raise
        replaced = self._settle_existing(shares, outcome, call)
        for share in shares:
            share.left = [write for write in share.left if write in replaced] + share.waiting
        return bool(replaced)

    # Leases.

    def _reserve(self, shares: Sequence[_Share], call: Call) -> None:
        config = self._store.config
        named = [(share.scope.name, metadata_keys([write.key for write in share.left])) for share in shares]
        asked = [ReserveScope(scope=name, keys=keys, prefixes=_prefixes(keys, call)) for name, keys in named]
        begin = time.monotonic()
        answer = self._store.directory.reserve(asked, call, owner=self._owner, lease_seconds=config.lease_seconds)
        until, ends = begin + LEASE_SHARE * answer.lease_seconds, begin + answer.lease_seconds
        for share, part in zip(shares, answer.scopes, strict=True):
            share.leases, share.jobs, share.waiting, share.existing = [], [], [], []
            if part.evicted:
                self._evicted(share.scope.namespace, part.evicted)
            # Pages of this call do not make room for others of it.
            room = share.scope.file.geometry.slots - share.stored - sum(state is Reserved.LEASED for state in part.states)
            columns = zip(share.left, part.states, part.slots, part.generations, part.leases, strict=True)
            for write, state, slot, generation, lease in columns:
                if state is Reserved.LEASED:
                    share.leases.append(lease)
                    share.jobs.append(SlotWrite(write, share.scope.file, slot, until, ends=ends, generation=generation))
                elif state is Reserved.EXISTS:
                    share.existing.append(write)
                elif state is Reserved.BUSY or room > 0:
                    room -= state is Reserved.FULL
                    share.waiting.append(write)

    def _put(self, shares: Sequence[_Share], outcome: WriteOutcome, call: Call) -> None:
        """Write what is leased, and make it live."""
        if not any(share.jobs for share in shares):
            return
        for stretch in _stretches([job for share in shares for job in share.jobs]):
            self._renew(shares, call)
            self._store.engine.write(stretch, call)
        self._see_overruns(shares)
        outcome.faults += [job.fault for share in shares for job in share.jobs if job.fault is not None]
        if call.expired():
            self._give_back(shares, set())
            return
        whole = [[pair for pair in zip(share.leases, share.jobs, strict=True) if pair[1].whole] for share in shares]
        asked = [
            CommitScope(
                scope=share.scope.name,
                leases=[lease for lease, _ in pairs],
                lengths=[job.size for _, job in pairs],
                checksums=[stored_checksum(job.write.envelope) for _, job in pairs],
            )
            for share, pairs in zip(shares, whole, strict=True)
        ]
        done = self._store.directory.commit(asked, call)
        live = set[int]()
        for share, pairs, flags in zip(shares, whole, done, strict=True):
            share.stored += sum(flags)
            for (lease, job), flag in zip(pairs, flags, strict=True):
                if flag:
                    outcome.stored.add(job.write)
                live.add(lease)
        self._give_back(shares, live)

    def _renew(self, shares: Sequence[_Share], call: Call) -> None:
        """Renew the leases that are half over; writes whose lease is lost are late and are not begun."""
        seconds = self._store.config.lease_seconds
        jobs = [job for share in shares for job in share.jobs]
        if min(job.until for job in jobs) - time.monotonic() > seconds / 2:
            return
        begin = time.monotonic()
        asked = [LeaseScope(scope=share.scope.name, leases=share.leases) for share in shares]
        held = self._store.directory.renew(asked, call, lease_seconds=seconds)
        for share, flags in zip(shares, held, strict=True):
            for job, flag in zip(share.jobs, flags, strict=True):
                job.until = begin + LEASE_SHARE * seconds if flag else 0.0
                job.ends = begin + seconds if flag else job.ends

    def _give_back(self, shares: Sequence[_Share], settled: set[int]) -> None:
        self._store.directory.abort([LeaseScope(scope=share.scope.name, leases=share.given_back(settled)) for share in shares])

    # Writes that came back too late.

    def _see_overruns(self, shares: Sequence[_Share]) -> None:
        """Delete pages that a write has damaged which stalled past the end of its lease: their slots are somebody else's by then.

        No file system refuses such a write. A reader would find the damage, but a set would take the page for stored until then.
        """
        now = time.monotonic()
        for share in shares:
            late = {job.slot: job for job in share.jobs if now >= job.ends and not job.in_doubt}
            if not late:
                continue
            try:
                damaged = self._delete_damaged(share.scope, late)
            except StorageUnavailableError as error:
                logger.warning(
                    "hf3fs: %d writes ended after their leases, and what they damaged is not known: %s", len(late), error
                )
            else:
                logger.warning("hf3fs: %d writes ended after their leases; %d pages of others were damaged", len(late), damaged)

    def _delete_damaged(self, scope: ScopeOfSlots, late: Mapping[int, SlotWrite]) -> int:
        # The call's own time is over by now.
        call = Call(self._store.config.timeout_seconds)
        file = CheckedFile(scope.file.path, scope.geometry, bytes.fromhex(scope.namespace.name))
        keys, generations = list[str](), list[int]()
        try:
            for status in self._store.directory.inspect(scope.name, list(late), call):
                if status.state is not SlotState.LIVE or status.generation == late[status.slot].generation:
                    continue
                if file.verdict(Claim(status.slot, status.key, status.length, status.checksum)) in MISFITS:
                    keys.append(status.key)
                    generations.append(status.generation)
        finally:
            file.close()
        if keys:
            self._store.directory.delete([DeleteScope(scope=scope.name, keys=keys, generations=generations)], call)
        return len(keys)

    # Pages that are there already.

    def _settle_existing(self, shares: Sequence[_Share], outcome: WriteOutcome, call: Call) -> set[ObjectWrite]:
        """Pages that somebody else has stored are stored; damaged ones give way, and are to be written now."""
        if not any(share.existing for share in shares):
            return set()
        asked = [LookupScope(scope=share.scope.name, keys=metadata_keys([w.key for w in share.existing])) for share in shares]
        found = self._store.directory.lookup(asked, call, touch=False)
        going, again = list[DeleteScope](), set[ObjectWrite]()
        for share, part in zip(shares, found.scopes, strict=True):
            keys, generations = list[str](), list[int]()
            for write, slot, generation, length in zip(share.existing, part.slots, part.generations, part.lengths, strict=True):
                is_whole = slot >= 0 and length == share.scope.namespace.object_bytes
                if is_whole and (not write.replaces or write in share.given_way):
                    outcome.stored.add(write)
                    continue
                again.add(write)
                share.given_way.add(write)
                if slot >= 0:
                    keys.append(metadata_key(write.key))
                    generations.append(generation)
            going.append(DeleteScope(scope=share.scope.name, keys=keys, generations=generations))
        if any(part.keys for part in going):
            self._store.directory.delete(going, call)
        return again

    def _fitting(self, batch: WriteBatch, scope: ScopeOfSlots, outcome: WriteOutcome) -> list[ObjectWrite]:
        """The writes that fit into a slot; all, unless somebody writes objects of another length."""
        most = scope.file.geometry.slot_bytes - ENVELOPE_BYTES
        fitting = [write for write in batch.writes if sum(map(len, write.buffers)) <= most]
        if len(fitting) < len(batch.writes):
            outcome.faults.append(OSError(errno.EFBIG, f"objects longer than {most} bytes do not fit into a slot"))
        return fitting


def _prefixes(keys: Sequence[str], call: Call) -> list[str]:
    """The key before each: pages that exist already are left out of a batch, but an earlier page of the chain does as well."""
    return [metadata_key(call.prefix_keys[-1]) if call.prefix_keys else "", *keys][: len(keys)]


def _stretches(jobs: Sequence[SlotWrite]) -> Iterator[list[SlotWrite]]:
    some, size = list[SlotWrite](), 0
    for job in jobs:
        if some and size + job.size > STRETCH_BYTES:
            yield some
            some, size = [], 0
        some.append(job)
        size += job.size
    if some:
        yield some
