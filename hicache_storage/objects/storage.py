"""`ObjectStorage`: three batch methods of a driver become the whole contract."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate, compress
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.objects.batches import (
    Call,
    LookupBatch,
    ObjectRead,
    ObjectWrite,
    ReadBatch,
    WriteBatch,
)
from hicache_storage.objects.driver import ObjectDriver
from hicache_storage.objects.faults import DamagedPages, FaultGuard
from hicache_storage.objects.lifecycle import Lifecycle
from hicache_storage.objects.recorder import StatsRecorder
from hicache_storage.objects.removals import RemovalLog
from hicache_storage.objects.requests import (
    PoolRequest,
    RegisteredPool,
    asked_pools,
    check_identity,
    common_answer,
    pool_requests,
    registered_pool,
)
from hicache_storage.observability.logs import fields
from hicache_storage.observability.request_ids import RequestScope
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import (
    Capabilities,
    Health,
    HiCacheError,
    HiCacheStorageExtraInfo,
    MayHangError,
    MissReason,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    RemovalScope,
    StorageIdentity,
    StorageRefusedError,
    StorageStats,
    StorageTimeoutError,
    StorageUnavailableError,
    UnknownPoolError,
    current_call_info,
    from_memory,
    is_refusal,
    note_answer_from_memory,
)
from hicache_storage.spec.arguments import check_keys
from hicache_storage.spec.calls import check_info
from hicache_storage.spec.removals import check_cursor, no_removals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.objects.namespace import Namespace
    from hicache_storage.pools.access import PageAccess
    from hicache_storage.spec import Removals

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS = 30.0
"""Time that `close` waits for calls in flight."""

ItemT = TypeVar("ItemT")


class ObjectStorage(ObjectDriver):
    """Base class of drivers that store pages as objects.

    A driver implements three methods: look objects up, read them into buffers, write them from
    buffers. This class implements identity, keys, policies, argument checks, envelopes,
    deduplication, partial results, statistics, lazy opening and closing.

    Names that begin with an underscore are this class's own; a subclass chooses others.

    Args:
        identity: identity of the pages.
        driver_name: name in messages and statistics.
        capabilities: capabilities of this instance.
        verifies_checksums: `False` only by the operator's explicit choice; length, identity and key
            are checked anyway.
    """

    def __init__(
        self,
        identity: StorageIdentity,
        *,
        driver_name: str,
        capabilities: Capabilities,
        verifies_checksums: bool = True,
    ) -> None:
        self._identity = identity
        # Implemented here, for every driver.
        self._capabilities = replace(capabilities, head_shards=True)
        self.driver_name = driver_name
        self._verifies_checksums = verifies_checksums
        self.pools: dict[PoolName, RegisteredPool] = {}
        """The registered pools by name; not to be changed."""
        self._damaged = DamagedPages()
        self._removals = RemovalLog()
        self._lifecycle = Lifecycle(driver_name, self.connect, self._disconnect)
        self.recorder = StatsRecorder(driver_name, verifies_checksums=verifies_checksums)
        self._guard = FaultGuard(driver_name, self._lifecycle, self.recorder)

    # The contract
    # ------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> StorageIdentity:
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        name = PoolName(host_pool_name)
        access = page_access(host_pool)
        check_identity(self._identity, name, host_pool, access.geometry)
        with self._lifecycle.lock(), self._lifecycle:
            pool = registered_pool(self._identity, name, access)
            self.admit_pool(pool)
            # A new dict, so that calls in flight go on with the pools that they have checked.
            self.pools = {**self.pools, name: pool}
        # Start the counters at 0: Prometheus sees an increase between two scrapes, but not the
        # first value of a new series.
        self.recorder.count(name)
        # For operators: engines that do not share pages have different namespaces.
        logger.info(
            "%s: pool %s of model %r has its pages in namespace %s",
            self.driver_name,
            name,
            self._identity.model,
            ", ".join(part.namespace.name for part in pool.parts),
            extra=fields(driver=self.driver_name, pool=name),
        )

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        asked = asked_pools(keys, pool_transfers)
        return common_answer(keys, pool_transfers, self._find(keys, asked, extra_info))

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        check_keys(keys)
        name = PoolName(pool)
        found = self._find(keys, [name], extra_info)
        return found[name] if name in found else [False] * len(keys)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        call = self._reading(extra_info)
        with self._lifecycle.lock(), self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            requests = pool_requests(transfers, self.pools, distinct_slots=True)
            read = self._read_cached if from_memory.get() else self._read
            delivered = read([request for request in requests.values() if request.keys], call)
            self.recorder.observe("get", requests, started)
        return {name: delivered.get(name, []) for name in requests}

    def answers_from_memory(self, operation: str) -> bool:
        # After a fault, or with damage to be repaired, a call that asks the store decides and counts.
        if operation == "lookup":
            return self.caches_lookups and "exists" not in self._guard.faulty
        caches = operation == "read" and self.caches_reads
        return caches and "read" not in self._guard.faulty and not self._damaged

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        call = _call(extra_info)
        with self._lifecycle.lock(), self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            # One host page may be stored under several keys; only a destination must not be named
            # twice.
            requests = pool_requests(transfers, self.pools, distinct_slots=False)
            stored = self._write([request for request in requests.values() if request.keys], call)
            self.recorder.observe("set", requests, started)
        return {name: stored.get(name, []) for name in requests}

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        if not self._capabilities.deletes:
            return super().delete(keys, pool=pool)
        check_keys(keys)
        with self._lifecycle.lock(), self._lifecycle:
            registered = self.pools.get(PoolName(pool))
            if registered is None:
                raise UnknownPoolError(f"pool {pool!r} is not registered")
            batches = [LookupBatch(part.namespace, keys) for part in registered.parts]
            call = _call(current_call_info())
            removed = self._guard.ask("delete", self.delete_objects, batches, call)
            # Not before: what is damaged and still there stays hidden.
            for batch, done in zip(batches, removed, strict=True):
                self._damaged.forget(batch.namespace, list(compress(keys, done)))
            # A page is gone with the first of its shards.
            return removed[0] if len(removed) == 1 else list(map(any, zip(*removed, strict=True)))

    def clear(self) -> None:
        if not self._capabilities.clears:
            super().clear()
            return
        with self._lifecycle.lock(), self._lifecycle:
            namespaces = self._namespaces()
            call = _call(current_call_info())
            try:
                # A clear is not answered with the failure of an earlier attempt: the caller relies
                # on its result (rule LC-7).
                self._lifecycle.ensure_connected(insist=True)
                self.clear_namespaces(namespaces, call)
            except Exception as error:
                refused = is_refusal(error)
                if not refused:
                    self.recorder.count_fault()
                if isinstance(error, HiCacheError):
                    raise
                kind = (
                    StorageRefusedError
                    if refused
                    else StorageTimeoutError
                    if isinstance(error, TimeoutError)
                    else StorageUnavailableError
                )
                raise kind(
                    f"{self.driver_name}: cleared in part or not at all: {error!r}"
                ) from error
            # Not before: what is damaged and still there stays hidden.
            self._damaged.clear()

    def removals(
        self, since: int | None = None, *, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> Removals:
        if self._capabilities.removals is RemovalScope.NONE:
            return super().removals(since, extra_info=extra_info)
        check_cursor(since)
        call = _call(extra_info)
        if from_memory.get():
            raise MayHangError(f"{self.driver_name}: the store is asked for removals")
        with self._lifecycle.lock(), self._lifecycle, RequestScope(call.request_id):
            if call.expired():
                note_answer_from_memory()
            elif self._guard.run("removals", partial(self._collect_removals, call)):
                return self._removals.since(since)
        return no_removals(since)

    def remove_pools(self, seconds: float, *others: ObjectStorage) -> bool:
        """Remove what the namespaces of all registered pools leave in the store.

        The namespaces have to be empty. For tools: no engine does it.

        Args:
            seconds: deadline.
            others: storages of the same store, whose namespaces are removed in the same request.

        Returns:
            Whether nothing of them is left.

        Raises:
            HiCacheError, OSError: the store refuses, or cannot be reached.
        """
        with self._lifecycle.lock(), self._lifecycle:
            self._lifecycle.ensure_connected(insist=True)
            namespaces = [one for storage in (self, *others) for one in storage._namespaces()]
            return self.remove_namespaces(namespaces, Call(seconds))

    def get_stats(self) -> StorageStats:
        return self.recorder.snapshot()

    def fault_count(self) -> int:
        return self.recorder.faults

    @property
    def notes_faults(self) -> bool:
        return True

    def health(self) -> Health:
        try:
            with self._lifecycle.lock(), self._lifecycle:
                self._lifecycle.ensure_connected(insist=True)
                health, refusal = self.check_health(), self._guard.refusal
        except Exception as error:  # noqa: BLE001 - whatever is wrong is the answer
            return Health(ok=False, detail=f"{type(error).__name__}: {error}")
        if not refusal:
            return health
        detail = "; ".join(filter(None, (health.detail, f"sets are refused: {refusal}")))
        return replace(health, writable=False, detail=detail)

    def open(self) -> None:
        with self._lifecycle.lock(), self._lifecycle:
            try:
                self._lifecycle.ensure_connected(insist=True)
            except HiCacheError:
                raise
            except Exception as error:
                raise StorageUnavailableError(
                    f"{self.driver_name}: cannot open: {error}"
                ) from error

    def close(self) -> None:
        self._lifecycle.close(CLOSE_TIMEOUT_SECONDS)
        # Engines unmap the memory of their pools next.
        self.pools = {}

    # How it is done
    # ----------------------------------------------------------------------------------------------

    def _namespaces(self) -> list[Namespace]:
        return [part.namespace for pool in self.pools.values() for part in pool.parts]

    def _collect_removals(self, call: Call) -> bool:
        """Add what the driver reports to the removals; always `True`, unless it raises."""
        pools = list(self.pools.values())
        namespaces = [part.namespace for pool in pools for part in pool.parts]
        with self._removals.collecting(call.remaining()):
            removed, lost = self.collect_removals(namespaces, call)
            self._removals.add(pools, removed, lost=lost)
        return True

    def _find(
        self,
        keys: Sequence[str],
        names: Iterable[PoolName],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> dict[PoolName, list[bool]]:
        """Look pages up in pools: for each key, True if all objects of the page exist.

        A pool that was never registered is left out: all its pages are absent (rule EX-7).

        Raises:
            MayHangError: memory alone cannot answer, and shall.
        """
        call = self._reading(extra_info)
        with self._lifecycle.lock(), self._lifecycle:
            started = time.perf_counter()
            pools = [self.pools[name] for name in names if name in self.pools]
            batches = [
                LookupBatch(part.namespace, keys) for pool in pools if keys for part in pool.parts
            ]
            # From memory no request id is set: nothing is sent, and what is logged here is met
            # again by the lookup that asks the store.
            if from_memory.get():
                parts = self._lookup_cached(batches, call)
            else:
                with RequestScope(call.request_id):
                    parts = self._lookup(batches, call)
            divided = _of_pools(pools, parts) if keys else [[list[bool]()] for _ in pools]
            found = {pool.name: own for pool, own in zip(pools, divided, strict=True)}
            present = {name: _all(own) for name, own in found.items()}
            # The deadline layer has counted the misses that it has answered.
            if not call.cancelled:
                self.recorder.observe_lookup(
                    present,
                    started,
                    lambda name: self._miss_reasons(found[name], self._hidden(name, keys), call),
                )
            return present

    def _reading(self, extra_info: HiCacheStorageExtraInfo | None) -> Call:
        """Make the call of a lookup or get."""
        call = _call(extra_info)
        call.faults_before = self.recorder.faults
        return call

    def _hidden(self, pool: PoolName, keys: Sequence[str]) -> list[bool]:
        """Return for each page whether lookups do not find it because it is damaged."""
        parts = self.pools[pool].parts if self._damaged else ()
        names = [part.namespace.name for part in parts]
        return [any((name, key) in self._damaged for name in names) for key in keys]

    def _miss_reasons(
        self, parts: Sequence[Sequence[bool]], damaged: Sequence[bool], call: Call
    ) -> Counter[MissReason]:
        """Count the pages of a pool that were not found or delivered, by reason.

        Args:
            parts: for each shard, or for the pool itself, for each page, True if it was.
            damaged: for each page, True if one of its objects is damaged.
            call: which has missed them.
        """
        # Faults of some pages of a call are not reported by page; and of calls in other threads,
        # some may be taken for this one's.
        failed = self.recorder.faults != call.faults_before
        other = call.miss_reason or (MissReason.FAULT if failed else MissReason.ABSENT)
        # Mostly a page is absent, and a lookup may have many.
        if len(parts) == 1 and not any(damaged):
            return Counter({other: parts[0].count(False)})
        reasons = Counter[MissReason]()
        for shards, is_damaged in zip(zip(*parts, strict=True), damaged, strict=True):
            if all(shards):
                continue
            is_part = any(shards) and other is MissReason.ABSENT
            reasons[
                MissReason.DAMAGED if is_damaged else MissReason.INCOMPLETE if is_part else other
            ] += 1
        return reasons

    def _lookup(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        """Look objects up; pools with shards are given by their parts."""
        if not batches:
            note_answer_from_memory()
            return []
        found = self._guard.ask("exists", self.objects_exist, batches, call)
        self._damaged.hide(batches, found)
        return found

    def _lookup_cached(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        """Look objects up without I/O.

        Raises:
            MayHangError: that is not possible.
        """
        try:
            found = self.objects_exist_cached(batches, call) if self._lifecycle.connected else None
        except Exception as error:  # `_lookup` meets it again, counts it and logs it
            raise MayHangError(f"{self.driver_name}: {error}") from error
        if found is None:
            raise MayHangError(f"{self.driver_name}: memory does not tell")
        self._damaged.hide(batches, found)
        return found

    def _read_cached(
        self, requests: Sequence[PoolRequest], call: Call
    ) -> dict[PoolName, list[bool]]:
        """Read pages without I/O.

        Raises:
            MayHangError: that is not possible.
        """
        pools = [request.pool for request in requests]
        # Connecting is I/O, and a pool that stages may wait for a device in `deliver`: both need the
        # thread that a deadline can abandon.
        if not self._lifecycle.connected or any(pool.access.stages for pool in pools):
            raise MayHangError(f"{self.driver_name}: pages are not in memory")
        try:
            batches = [
                ReadBatch(part.pool.namespace, self._reads(part, call))
                for request in requests
                for part in request.parts
            ]
            served = self.read_objects_cached(batches, call) and all(map(_is_verified, batches))
        except Exception as error:  # `_read` meets it again, counts it and logs it
            raise MayHangError(f"{self.driver_name}: {error}") from error
        if not served:
            raise MayHangError(f"{self.driver_name}: pages are not in memory")
        return {
            request.pool.name: self._account_read(
                request, parts, [[True] * len(request.keys)] * len(parts), call
            )
            for request, parts in zip(requests, _of_pools(pools, batches), strict=True)
        }

    def _read(self, requests: Sequence[PoolRequest], call: Call) -> dict[PoolName, list[bool]]:
        # All shards of all pools in one batch (rule BU-1).
        parts = [part for request in requests for part in request.parts]
        reads = [
            self._guard.run(
                f"targets of {part.pool.name}", partial(self._reads, part, call), connects=False
            )
            for part in parts
        ]
        batches = [
            ReadBatch(part.pool.namespace, made or [])
            for part, made in zip(parts, reads, strict=True)
        ]
        full = self._guard.ask("read", self.read_objects, batches, call)
        pools = [request.pool for request in requests]
        divided = zip(requests, _of_pools(pools, batches), _of_pools(pools, full), strict=True)
        return {
            request.pool.name: self._delivered(request, mine, done, call)
            for request, mine, done in divided
        }

    def _delivered(
        self,
        request: PoolRequest,
        batches: Sequence[ReadBatch],
        filled: Sequence[Sequence[bool]],
        call: Call,
    ) -> list[bool]:
        """Verify the objects of a pool's pages and bring the whole pages into the pool."""
        with call.shield() as active:
            # After a cancellation the buffers may hold other bytes: a failed check would count
            # whole objects as damaged.
            verified = [
                [
                    active and ok and read.verify()
                    for ok, read in zip(done, batch.reads, strict=True)
                ]
                # Of a pool that has given no buffers nothing was read.
                or [False] * len(request.keys)
                for done, batch in zip(filled, batches, strict=True)
            ]
            whole = _all(verified)
            if request.pool.access.stages and any(whole):
                brought = self._guard.run(
                    f"delivery to {request.pool.name}",
                    partial(_deliver, request, batches, whole),
                    connects=False,
                )
                if not brought:
                    verified = [[False] * len(request.keys)] * len(batches)
        return self._account_read(request, batches, verified, call)

    def _reads(self, request: PoolRequest, call: Call) -> list[ObjectRead]:
        namespace, access = request.pool.namespace, request.pool.access
        targets: Sequence[list[memoryview] | Callable[[], list[memoryview]]] = (
            [partial(_target, access, slot) for slot in request.slots]
            if access.stages
            else access.targets(request.slots)
        )
        return [
            ObjectRead(
                namespace, key, buffers, verifies_checksum=self._verifies_checksums, call=call
            )
            for key, buffers in zip(request.keys, targets, strict=True)
        ]

    def _account_read(
        self,
        request: PoolRequest,
        batches: Sequence[ReadBatch],
        verified: Sequence[list[bool]],
        call: Call,
    ) -> list[bool]:
        """Count the pages of a pool that were read, and retire damaged objects.

        Args:
            request: of the pool.
            batches: of its shards, or of itself.
            verified: for each of them, for each page, True if the object was read and is right.

        Returns:
            For each page, True if all of its objects are.
        """
        whole, damaged = _all(verified), list[ReadBatch]()
        for batch, good in zip(batches, verified, strict=True):
            if self._damaged:
                # Another storage has replaced the damaged copy meanwhile.
                self._damaged.forget(
                    batch.namespace,
                    [read.key for read, ok in zip(batch.reads, good, strict=False) if ok],
                )
            if all(good):
                continue
            name, known = batch.namespace.name, self._damaged
            found = [read for read in batch.reads if read.damaged and (name, read.key) not in known]
            if found:
                damaged.append(ReadBatch(batch.namespace, found))
        pages = whole.count(True)
        missed = Counter[MissReason]()
        if pages < len(whole) and not call.cancelled:
            # Of a pool that has given no buffers nothing was read.
            reads = [batch.reads for batch in batches if batch.reads]
            marks = [any(read.damaged for read in page) for page in zip(*reads, strict=True)]
            missed = self._miss_reasons(verified, marks or [False] * len(whole), call)
        self.recorder.count(
            request.pool.name,
            pages_read=pages,
            bytes_read=pages * sum(batch.namespace.page_bytes for batch in batches),
            missed=missed,
            # Pages and not objects: several shards of a page may be damaged.
            pages_damaged=len({read.key for batch in damaged for read in batch.reads})
            if len(damaged) > 1
            else sum(map(len, damaged)),
        )
        for batch in damaged:
            self._retire(request.pool, batch, call)
        return whole

    def _retire(self, pool: RegisteredPool, damaged: ReadBatch, call: Call) -> None:
        """Remove or hide damaged objects, and log them once (rule GET-7)."""
        keys = [read.key for read in damaged.reads]
        defect = damaged.reads[0].defect()
        # Before `discard_objects`, which takes time: no other thread's lookup may report the page
        # meanwhile.
        self._damaged.remember(damaged.namespace, keys)
        logger.warning(
            "%s: %d damaged pages in pool %s, first %r, %s; they are misses until they are set again",
            self.driver_name,
            len(keys),
            pool.name,
            keys[0],
            defect,
            extra=fields(driver=self.driver_name, pool=pool.name, pages=len(keys), defect=defect),
        )
        if self._guard.run("discard", lambda: self.discard_objects([damaged], call)):
            self._damaged.forget(damaged.namespace, keys)
        else:
            self._removals.add_damaged(pool, keys)

    def _write(self, requests: Sequence[PoolRequest], call: Call) -> dict[PoolName, list[bool]]:
        parts = [part for request in requests for part in request.parts]
        # Each key once, and not as a set: drivers are given the pages in the order of their chain.
        lookups = [(part.pool, list(dict.fromkeys(part.keys))) for part in parts]
        existing = self._existing(lookups, call) if parts else []
        stored = [
            dict(zip(keys, present, strict=True))
            for (_, keys), present in zip(lookups, existing, strict=True)
        ]
        batches = [
            self._missing_pages(part, known) for part, known in zip(parts, stored, strict=True)
        ]
        outcomes = self._guard.ask("write", self.write_objects, batches, call)
        pools = [request.pool for request in requests]
        for request, mine, known, answers in zip(
            requests,
            _of_pools(pools, batches),
            _of_pools(pools, stored),
            _of_pools(pools, outcomes),
            strict=True,
        ):
            self._account_write(request, known, mine, answers)
        return {
            request.pool.name: _all([[found[key] for key in request.keys] for found in known])
            for request, known in zip(requests, _of_pools(pools, stored), strict=True)
        }

    def _existing(
        self, lookups: Sequence[tuple[RegisteredPool, Sequence[str]]], call: Call
    ) -> list[list[bool]]:
        """Look up pages that need not be written.

        None if the driver does it itself, unless this rank is no writer.
        """
        # A rank that is not the writer answers what exists (rule ID-3), so it has to look even
        # where the driver would find existing objects while it writes.
        if self.writes_find_existing and all(
            self._identity.is_writer(pool.name) for pool, _ in lookups
        ):
            return [[False] * len(keys) for _, keys in lookups]
        return self._lookup([LookupBatch(part.namespace, keys) for part, keys in lookups], call)

    def _missing_pages(self, request: PoolRequest, stored: dict[str, bool]) -> WriteBatch:
        """Select the pages that this rank has to write.

        Those not stored, each once, from the slot of its first key.
        """
        namespace = request.pool.namespace
        slots = dict[str, int]()
        for key, slot in zip(request.keys, request.slots, strict=True):
            if not stored[key]:
                slots.setdefault(key, slot)
        limit = self._capabilities.max_page_bytes
        is_too_long = limit is not None and namespace.page_bytes > limit
        if is_too_long or not self._identity.is_writer(request.pool.name):
            slots.clear()
        places = list(slots.values())
        pages = (
            self._guard.run(
                f"sources of {request.pool.name}",
                lambda: request.pool.access.sources(places),
                connects=False,
            )
            if places
            else []
        )
        if pages is None:
            return WriteBatch(namespace, [])
        known = bool(self._damaged)
        writes = [
            ObjectWrite(
                namespace, key, buffers, replaces=known and (namespace.name, key) in self._damaged
            )
            for key, buffers in zip(slots, pages, strict=True)
        ]
        return WriteBatch(namespace, writes)

    def _account_write(
        self,
        request: PoolRequest,
        stored: Sequence[dict[str, bool]],
        batches: Sequence[WriteBatch],
        outcomes: Sequence[Sequence[bool]],
    ) -> None:
        """Count the pages of a pool that were written, and note what is stored now.

        Args:
            request: of the pool.
            stored: for each of its shards, or for itself, by key, if it is stored; completed here.
            batches: what was to be written of them.
            outcomes: what the driver has answered to that.
        """
        written, length = set[str](), 0
        for known, batch, outcome in zip(stored, batches, outcomes, strict=True):
            known.update((write.key, ok) for write, ok in zip(batch.writes, outcome, strict=True))
            visible = [write for write, ok in zip(batch.writes, outcome, strict=True) if ok]
            self._damaged.forget(batch.namespace, [write.key for write in visible])
            new = [write.key for write in visible if not write.existed]
            written.update(new)
            length += len(new) * batch.namespace.page_bytes
        # Also those too large, or whose bytes the engine's pool has not given.
        refused = (
            {key for known in stored for key, ok in known.items() if not ok}
            if self._identity.is_writer(request.pool.name)
            else set[str]()
        )
        if written:
            self._guard.note_stored()
        if written or refused:
            # A page once, however many of its shards were written, and only if it is complete.
            self.recorder.count(
                request.pool.name,
                pages_written=len(written - refused),
                bytes_written=length,
                pages_refused=len(refused),
            )

    def _disconnect(self) -> None:
        try:
            self.disconnect()
        except Exception as error:  # noqa: BLE001 - `close` has to succeed also without the store
            self.recorder.count_fault()
            logger.warning("%s: closed, but not cleanly: %s", self.driver_name, error)


def _target(access: PageAccess, slot: int) -> list[memoryview]:
    return access.targets([slot])[0]


def _deliver(request: PoolRequest, batches: Sequence[ReadBatch], delivered: Sequence[bool]) -> bool:
    """Copy staged pages into the pool; always `True`, unless it raises."""
    for part, batch in zip(request.pool.parts, batches, strict=True):
        whole = [
            (slot, read.buffers)
            for slot, read, ok in zip(request.slots, batch.reads, delivered, strict=True)
            if ok
        ]
        part.access.deliver([slot for slot, _ in whole], [buffers for _, buffers in whole])
    return True


def _of_pools(pools: Sequence[RegisteredPool], items: Sequence[ItemT]) -> list[Sequence[ItemT]]:
    """Divide what there is for each part of some pools by the pools."""
    if len(pools) == 1:
        return [items]
    ends = list(accumulate(len(pool.parts) for pool in pools))
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _all(parts: Sequence[list[bool]]) -> list[bool]:
    """Combine the answers for the parts of pages: True for a page where all are."""
    # Mostly everything is there, which takes a tenth of the time to find out.
    if len(parts) == 1 or all(map(all, parts)):
        return parts[0]
    return list(map(all, zip(*parts, strict=True)))


def _is_verified(batch: ReadBatch) -> bool:
    return all(read.verify() for read in batch.reads)


def _call(extra_info: HiCacheStorageExtraInfo | None) -> Call:
    check_info(extra_info)
    if extra_info is None:
        return Call()
    if extra_info.prefix_keys:
        check_keys(extra_info.prefix_keys, "prefix_keys")
    return Call(
        extra_info.deadline_seconds,
        prefix_keys=extra_info.prefix_keys or (),
        request_id=extra_info.request_id,
        cancellation=extra_info.cancellation,
    )
