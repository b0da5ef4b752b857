"""`ObjectStorage`: three batch methods of a driver become the whole contract."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

from hicache_storage.objects.batches import (
    Call,
    LookupBatch,
    ObjectRead,
    ObjectWrite,
    ReadBatch,
    WriteBatch,
)
from hicache_storage.objects.lifecycle import Lifecycle, begin_in_children
from hicache_storage.objects.namespace import Namespace
from hicache_storage.objects.recorder import StatsRecorder
from hicache_storage.objects.requests import (
    PoolRequest,
    RegisteredPool,
    check_transfers,
    pool_requests,
)
from hicache_storage.observability.logs import fields
from hicache_storage.observability.request_ids import RequestScope
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import (
    Capabilities,
    DriverContractError,
    Health,
    HiCacheError,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolPresence,
    PoolTransfer,
    PoolTransferResult,
    StorageIdentity,
    StorageRefusedError,
    StorageStats,
    StorageTimeoutError,
    StorageUnavailableError,
    UnknownPoolError,
    common_hit,
    current_call_info,
)
from hicache_storage.spec.arguments import check_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.pools.access import PageAccess

logger = logging.getLogger(__name__)

MAX_REMEMBERED_DAMAGE = 65_536
"""Limit of the damaged pages that are remembered.

Remembered, so that the next set repairs them; beyond this the oldest are forgotten and found again.
"""

CLOSE_TIMEOUT_SECONDS = 30.0
"""Time that `close` waits for calls in flight."""

_OWN_MEMBERS: Final = set[str]()
"""Names of `ObjectStorage`'s private methods, which no subclass may define."""

MOVING = frozenset({"read", "write"})
"""Operations that may answer without having touched what fails.

A driver that knows that no page is there reads none.
"""

ItemT = TypeVar("ItemT")


class ObjectStorage(HiCacheStorage):
    """Base class of drivers that store pages as objects.

    A driver implements three methods: look objects up, read them into buffers, write them from
    buffers. This class implements identity, keys, policies, argument checks, envelopes,
    deduplication, partial results, statistics, lazy opening and closing.

    The driver's methods may be called from several threads at once. They raise the errors of their
    store (`StorageUnavailableError`, `OSError`, ...): the call is then a miss for all its pages.

    A subclass that defines a private method of this class is refused with `DriverContractError`
    when it is created.

    Args:
        identity: identity of the pages.
        driver_name: name in messages and statistics.
        capabilities: capabilities of this instance.
        verifies_checksums: `False` only by the operator's explicit choice; length, identity and key
            are checked anyway.
        metrics: count pages, bytes and latencies; faults are always counted.
    """

    def __init__(
        self,
        identity: StorageIdentity,
        *,
        driver_name: str,
        capabilities: Capabilities,
        verifies_checksums: bool = True,
        metrics: bool = True,
    ) -> None:
        self._identity = identity
        self._capabilities = capabilities
        self._driver_name = driver_name
        self._verifies_checksums = verifies_checksums
        self._pools: dict[PoolName, RegisteredPool] = {}
        self._damaged: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._faulty = set[str]()
        """Operations that have failed since the last success; empty while the store serves."""
        self._lifecycle = Lifecycle(driver_name, self.connect, self._disconnect)
        self.recorder = StatsRecorder(
            driver_name, enabled=metrics, verifies_checksums=verifies_checksums
        )
        self.begin_in_child()
        begin_in_children(self)

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        # Otherwise a driver's own helper of that name would be called in the place of this class's,
        # and each call would fail as a miss.
        before = cls.__mro__[: cls.__mro__.index(ObjectStorage)]
        replaced = sorted(_OWN_MEMBERS & {name for owner in before for name in vars(owner)})
        if replaced:
            raise DriverContractError(
                f"{cls.__name__} defines {', '.join(replaced)}, which ObjectStorage needs for "
                f"itself: rename {'it' if len(replaced) == 1 else 'them'}"
            )

    def begin_in_child(self) -> None:
        """Replace the lock: a thread of the parent may have held it at the fork."""
        # Guards changes of `_damaged`. Lookups read it without the lock: a membership test is
        # atomic.
        self._damaged_lock = threading.Lock()

    writes_find_existing: ClassVar[bool] = False
    """`write_objects` skips existing objects, and sets `ObjectWrite.existed`.

    The SDK does not look them up before.
    """

    caches_lookups: ClassVar[bool] = False
    """`objects_exist_cached` is implemented."""

    # What a driver implements
    # ------------------------------------------------------------------------------------

    @abstractmethod
    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        """Look objects up: for each batch, for each key, `True` if the object exists.

        One round trip for all of them.
        """

    def objects_exist_cached(
        self, batches: Sequence[LookupBatch], call: Call
    ) -> list[list[bool]] | None:
        """Answer `objects_exist` without I/O, and without a lock that is held during I/O.

        None where that is not possible.

        Only with `caches_lookups`. A call answered so needs no thread for its deadline.
        """
        return None

    caches_reads: ClassVar[bool] = False
    """`read_objects_cached` is implemented."""

    @abstractmethod
    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        """Read objects: fill the parts of each read.

        Answers `True` if all of them were filled from one object.

        An object of another length than the parts is not delivered: set `read.damaged` and answer
        `False`.
        """

    def read_objects_cached(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        """Fill all reads without waiting for I/O or for a lock that is held during I/O.

        Only with `caches_reads`. A call answered so needs no thread for its deadline.

        Returns:
            True if every read was filled and verified; otherwise `read_objects` is called for all
            of them.
        """
        return False

    @abstractmethod
    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        """Write objects: store the parts of each write as one object; `True` if it is visible.

        It is visible whole or not at all.

        The SDK has left out pages that exist, unless `writes_find_existing`. Publish nothing once
        `call.expired()`.
        """

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        """Remove objects; `True` where one was removed. Only with the capability `deletes`."""
        raise DriverContractError(
            f"{type(self).__name__} declares 'deletes' without delete_objects()"
        )

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        """Remove all objects of these namespaces, and return when none is left.

        Only with the capability `clears`.

        Raise if the objects were not removed, or if that is unknown: callers rely on a clear that
        returns (rule LC-7). Check `call.expired()` between steps, and raise once it is true: the
        caller has been answered, and objects that are stored afterwards must not be removed.
        """
        raise DriverContractError(
            f"{type(self).__name__} declares 'clears' without clear_namespaces()"
        )

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        """Remove damaged objects that were just read, for all storages, if the driver can.

        A driver with the capability `deletes` need not implement it: the objects are read again,
        and those that are still damaged are deleted.

        Returns:
            True if they are removed. Otherwise the SDK hides them from its own lookups, and the
            next set replaces them. A set of another storage, which does not know of the damage,
            takes them as existing (rule SET-3).
        """
        if not self._capabilities.deletes or call.expired():
            return False
        # Another storage may have repaired them meanwhile.
        again = [
            ReadBatch(
                batch.namespace,
                [
                    ObjectRead.aside(
                        batch.namespace, read.key, verifies_checksum=self._verifies_checksums
                    )
                    for read in batch.reads
                ],
            )
            for batch in batches
        ]
        filled = self.read_objects(again, call)
        for batch, full in zip(again, filled, strict=True):
            damaged = [
                read.key
                for read, ok in zip(batch.reads, full, strict=True)
                if read.damaged or (ok and not read.verify())
            ]
            if damaged and not call.expired():
                self.delete_objects([LookupBatch(batch.namespace, damaged)], call)
        return not call.expired()

    def remove_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> bool:
        """Remove the remains of namespaces without objects, such as their files.

        Returns:
            True if nothing of them remains. A driver whose namespaces leave nothing in a store need
            not implement it.
        """
        return True

    def admit_pool(self, pool: RegisteredPool) -> None:
        """Check a pool before it is registered, in place of a former one of its name.

        Raises:
            InvalidPoolError: this driver cannot serve the pool; the former one stays.
        """

    def connect(self) -> None:
        """Connect to the store; called once before the first batch, never at construction."""

    def disconnect(self) -> None:
        """Undo `connect`; called once, when no batch is in flight any more."""

    def check_health(self) -> Health:
        """Check that the store answers; may raise."""
        return Health(ok=True)

    # What a driver may call
    # ----------------------------------------------------------------------------------------

    def note_partial_faults(self, faults: Sequence[Exception], *, served: bool) -> None:
        """Report faults of some pages of a batch, which the driver answers as missed or not stored.

        If other pages were served, one fault is counted; otherwise the first is raised, for the SDK
        to count and log. A refusal (`StorageRefusedError`) is no fault.

        Raises:
            Exception: the first of the faults, where no page was served.
        """
        if not faults:
            return
        real = [fault for fault in faults if not isinstance(fault, StorageRefusedError)]
        first = (real or faults)[0]
        if not served:
            raise first
        if real:
            self.recorder.count_fault()
        logger.debug("%s: answering misses for a part of a call: %s", self._driver_name, first)

    # The contract
    # ------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> StorageIdentity:
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def pools(self) -> dict[PoolName, RegisteredPool]:
        """The registered pools by name; not to be changed."""
        return self._pools

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        name = PoolName(host_pool_name)
        access = page_access(host_pool)
        with self._lifecycle:
            pool = RegisteredPool(name, access, Namespace(self._identity, name, access.geometry))
            self.admit_pool(pool)
            # A new dict, so that calls in flight go on with the pools that they have checked.
            self._pools = {**self._pools, name: pool}
        # Start the counters at 0: Prometheus sees an increase between two scrapes, but not the
        # first value of a new series.
        self.recorder.count(name)
        # For operators: engines that do not share pages have different namespaces.
        logger.info(
            "%s: pool %s of model %r has its pages in namespace %s",
            self._driver_name,
            name,
            self._identity.model,
            pool.namespace.name,
            extra=fields(driver=self._driver_name, pool=name),
        )

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        asked = _asked_pools(keys, pool_transfers)
        call = _call(extra_info)
        with self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            pools = [self._pools[name] for name in asked if name in self._pools]
            nothing = [list[bool]() for _ in pools]
            # A pool that was never registered is not looked up; `_hit` takes all its pages as
            # absent (rule EX-7).
            found = self._lookup([(pool, keys) for pool in pools], call) if keys else nothing
            return self._hit(keys, pool_transfers, pools, found, started)

    def batch_exists_cached(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult | None:
        if not self._may_answer_from_memory:
            return None
        asked = _asked_pools(keys, pool_transfers)
        call = _call(extra_info)
        with self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            pools = [self._pools[name] for name in asked if name in self._pools]
            found = self._lookup_cached([LookupBatch(pool.namespace, keys) for pool in pools], call)
            if found is None:
                return None
            return self._hit(keys, pool_transfers, pools, found, started)

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        check_keys(keys)
        name, call = PoolName(pool), _call(extra_info)
        with self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            registered = self._pools.get(name)
            if registered is None or not keys:
                return [False] * len(keys)
            [found] = self._lookup([(registered, keys)], call)
            self._count_lookup({name: found}, started)
            return found

    def batch_present_cached(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool] | None:
        if not self._may_answer_from_memory:
            return None
        check_keys(keys)
        name, call = PoolName(pool), _call(extra_info)
        with self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            registered = self._pools.get(name)
            if registered is None or not keys:
                return [False] * len(keys)
            found = self._lookup_cached([LookupBatch(registered.namespace, keys)], call)
            if found is None:
                return None
            self._count_lookup({name: found[0]}, started)
            return found[0]

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        call = _call(extra_info)
        with self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            requests = pool_requests(transfers, self._pools, distinct_slots=True)
            delivered = self._read([request for request in requests.values() if request.keys], call)
            self.recorder.observe("get", requests, started)
        return {name: delivered.get(name, []) for name in requests}

    def batch_get_cached(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]] | None:
        # After a fault, or with damage to be repaired, `batch_get_v2` decides and counts.
        if not self.caches_reads or "read" in self._faulty or self._damaged:
            return None
        call = _call(extra_info)
        with self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            requests = pool_requests(transfers, self._pools, distinct_slots=True)
            asked = [request for request in requests.values() if request.keys]
            # Connecting is I/O, and a pool that stages may wait for a device in `deliver`: both
            # need the thread that a deadline can abandon.
            if not self._lifecycle.connected or any(
                request.pool.access.stages for request in asked
            ):
                return None
            try:
                batches = [
                    ReadBatch(request.pool.namespace, self._reads(request, call))
                    for request in asked
                ]
                if not self.read_objects_cached(batches, call) or not all(
                    map(_is_verified, batches)
                ):
                    return None
            except Exception as error:  # noqa: BLE001 - `batch_get_v2` meets it again, counts it and logs it
                logger.debug("%s: cannot read from memory: %s", self._driver_name, error)
                return None
            for request, batch in zip(asked, batches, strict=True):
                self._account_read(request, batch, [True] * len(batch.reads), call)
            self.recorder.observe("get", requests, started)
        return {name: [True] * len(request.keys) for name, request in requests.items()}

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        call = _call(extra_info)
        with self._lifecycle, RequestScope(call.request_id):
            started = time.perf_counter()
            # One host page may be stored under several keys; only a destination must not be named
            # twice.
            requests = pool_requests(transfers, self._pools, distinct_slots=False)
            stored = self._write([request for request in requests.values() if request.keys], call)
            self.recorder.observe("set", requests, started)
        return {name: stored.get(name, []) for name in requests}

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        if not self._capabilities.deletes:
            return super().delete(keys, pool=pool)
        check_keys(keys)
        with self._lifecycle:
            registered = self._pools.get(PoolName(pool))
            if registered is None:
                raise UnknownPoolError(f"pool {pool!r} is not registered")
            batches = [LookupBatch(registered.namespace, keys)]
            self._forget_damage(registered.namespace, keys)
            call = _call(current_call_info())
            return self._ask("delete", lambda: self.delete_objects(batches, call), [keys], call)[0]

    def clear(self) -> None:
        if not self._capabilities.clears:
            super().clear()
            return
        with self._lifecycle:
            namespaces = [pool.namespace for pool in self._pools.values()]
            call = _call(current_call_info())
            try:
                # A clear is not answered with the failure of an earlier attempt: the caller relies
                # on its result (rule LC-7).
                self._lifecycle.ensure_connected(insist=True)
                self.clear_namespaces(namespaces, call)
            except Exception as error:
                self._count_fault(error)
                if isinstance(error, HiCacheError):
                    raise
                kind = (
                    StorageTimeoutError
                    if isinstance(error, TimeoutError)
                    else StorageUnavailableError
                )
                raise kind(
                    f"{self._driver_name}: cleared in part or not at all: {error!r}"
                ) from error
            # Not before: what is damaged and still there stays hidden.
            with self._damaged_lock:
                self._damaged.clear()

    def remove_pools(self, seconds: float) -> bool:
        """Remove what the namespaces of all registered pools leave in the store.

        The namespaces have to be empty. For tools: no engine does it.

        Returns:
            Whether nothing of them is left.

        Raises:
                HiCacheError, OSError: the store refuses, or cannot be reached.
        """
        with self._lifecycle:
            self._lifecycle.ensure_connected(insist=True)
            return self.remove_namespaces(
                [pool.namespace for pool in self._pools.values()], Call(seconds)
            )

    def get_stats(self) -> StorageStats:
        return self.recorder.snapshot()

    def fault_count(self) -> int:
        return self.recorder.faults

    @property
    def notes_faults(self) -> bool:
        return True

    def health(self) -> Health:
        try:
            with self._lifecycle:
                self._lifecycle.ensure_connected(insist=True)
                return self.check_health()
        except Exception as error:  # noqa: BLE001 - whatever is wrong is the answer
            return Health(ok=False, detail=f"{type(error).__name__}: {error}")

    def open(self) -> None:
        with self._lifecycle:
            try:
                self._lifecycle.ensure_connected(insist=True)
            except HiCacheError:
                raise
            except Exception as error:
                raise StorageUnavailableError(
                    f"{self._driver_name}: cannot open: {error}"
                ) from error

    def close(self) -> None:
        self._lifecycle.close(CLOSE_TIMEOUT_SECONDS)
        # Engines unmap the memory of their pools next.
        self._pools = {}

    # How it is done
    # ----------------------------------------------------------------------------------------------

    def _lookup(
        self, lookups: Sequence[tuple[RegisteredPool, Sequence[str]]], call: Call
    ) -> list[list[bool]]:
        batches = [LookupBatch(pool.namespace, keys) for pool, keys in lookups]
        found = self._ask(
            "exists", lambda: self.objects_exist(batches, call), [keys for _, keys in lookups], call
        )
        self._hide_damage(batches, found)
        return found

    @property
    def _may_answer_from_memory(self) -> bool:
        """Whether lookups may: after a fault, one that asks the store finds out if it serves."""
        return self.caches_lookups and "exists" not in self._faulty

    def _lookup_cached(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]] | None:
        try:
            found = self.objects_exist_cached(batches, call) if self._lifecycle.connected else None
        except Exception as error:  # noqa: BLE001 - `_lookup` meets it again, counts it and logs it
            logger.debug("%s: cannot answer from memory: %s", self._driver_name, error)
            return None
        if found is not None:
            self._hide_damage(batches, found)
        return found

    def _hide_damage(self, batches: Sequence[LookupBatch], found: Sequence[list[bool]]) -> None:
        """Take pages that are known to be damaged out of an answer."""
        if not self._damaged:
            return
        for batch, present in zip(batches, found, strict=True):
            name = batch.namespace.name
            present[:] = [
                exists and (name, key) not in self._damaged
                for exists, key in zip(present, batch.keys, strict=True)
            ]

    def _hit(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None,
        pools: Sequence[RegisteredPool],
        found: Sequence[list[bool]],
        started: float,
    ) -> PoolTransferResult:
        """Count what a lookup has found, and apply the policies."""
        absent = [False] * len(keys)
        present = {pool.name: pages for pool, pages in zip(pools, found, strict=True)}
        self._count_lookup(present, started)
        return common_hit(
            present.get(PoolName.KV, absent),
            [
                PoolPresence.of(transfer, present.get(transfer.name, absent))
                for transfer in pool_transfers or ()
            ],
        )

    def _count_lookup(self, present: Mapping[PoolName, list[bool]], started: float) -> None:
        self.recorder.observe("exists", present, started)
        for pool, pages in present.items():
            hits = pages.count(True)
            self.recorder.count(pool, pages_hit=hits, pages_absent=len(pages) - hits)

    def _read(self, requests: Sequence[PoolRequest], call: Call) -> dict[PoolName, list[bool]]:
        reads = [
            self._guarded(f"targets of {request.pool.name}", partial(self._reads, request, call))
            for request in requests
        ]
        reached = [
            (request, ReadBatch(request.pool.namespace, made))
            for request, made in zip(requests, reads, strict=True)
            if made
        ]
        batches = [batch for _, batch in reached]
        asked = [batch.reads for batch in batches]
        filled = (
            self._ask("read", lambda: self.read_objects(batches, call), asked, call)
            if batches
            else []
        )
        results = dict[PoolName, list[bool]]()
        for (request, batch), full in zip(reached, filled, strict=True):
            with call.shield() as active:
                # After a cancellation the buffers may hold other bytes: a failed check would count
                # whole objects as damaged.
                delivered = [
                    active and ok and read.verify()
                    for ok, read in zip(full, batch.reads, strict=True)
                ]
                if request.pool.access.stages and any(delivered):
                    brought = self._guarded(
                        f"delivery to {request.pool.name}",
                        partial(_deliver, request, batch, delivered),
                    )
                    delivered = delivered if brought else [False] * len(delivered)
            self._account_read(request, batch, delivered, call)
            results[request.pool.name] = delivered
        for request in requests:
            if request.pool.name not in results:
                self.recorder.count(request.pool.name, pages_missed=len(request.keys))
                results[request.pool.name] = [False] * len(request.keys)
        return results

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
        self, request: PoolRequest, batch: ReadBatch, delivered: Sequence[bool], call: Call
    ) -> None:
        pages, name = sum(delivered), batch.namespace.name
        known = self._damaged
        if known:
            # Another storage has replaced the damaged copy meanwhile.
            self._forget_damage(
                batch.namespace,
                [read.key for read, ok in zip(batch.reads, delivered, strict=True) if ok],
            )
        damaged = (
            []
            if pages == len(delivered)
            else [read for read in batch.reads if read.damaged and (name, read.key) not in known]
        )
        self.recorder.count(
            request.pool.name,
            pages_read=pages,
            bytes_read=pages * batch.namespace.page_bytes,
            pages_missed=len(delivered) - pages,
            pages_damaged=len(damaged),
        )
        if damaged:
            self._retire(request.pool.name, ReadBatch(batch.namespace, damaged), call)

    def _retire(self, pool: PoolName, damaged: ReadBatch, call: Call) -> None:
        """Remove or hide damaged objects, and log them once (rule GET-7)."""
        keys = [read.key for read in damaged.reads]
        defect = damaged.reads[0].defect()
        # Before `discard_objects`, which takes time: no other thread's lookup may report the page
        # meanwhile.
        self._remember_damage(damaged.namespace, keys)
        logger.warning(
            "%s: %d damaged pages in pool %s, first %r, %s; they are misses until they are set again",
            self._driver_name,
            len(keys),
            pool,
            keys[0],
            defect,
            extra=fields(driver=self._driver_name, pool=pool, pages=len(keys), defect=defect),
        )
        if self._attempt("discard", lambda: self.discard_objects([damaged], call)):
            self._forget_damage(damaged.namespace, keys)

    def _write(self, requests: Sequence[PoolRequest], call: Call) -> dict[PoolName, list[bool]]:
        # Each key once, and not as a set: drivers are given the pages in the order of their chain.
        lookups = [(request.pool, list(dict.fromkeys(request.keys))) for request in requests]
        existing = self._existing(lookups, call) if requests else []
        stored = [
            dict(zip(keys, present, strict=True))
            for (_, keys), present in zip(lookups, existing, strict=True)
        ]
        batches = [
            self._missing_pages(request, known)
            for request, known in zip(requests, stored, strict=True)
        ]
        pending = [index for index, batch in enumerate(batches) if batch.writes]
        if pending:
            asked = [batches[index] for index in pending]
            written = self._ask(
                "write",
                lambda: self.write_objects(asked, call),
                [batch.writes for batch in asked],
                call,
            )
            for index, outcome in zip(pending, written, strict=True):
                self._account_write(requests[index], stored[index], batches[index], outcome)
        return {
            request.pool.name: [known[key] for key in request.keys]
            for request, known in zip(requests, stored, strict=True)
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
        return self._lookup(lookups, call)

    def _missing_pages(self, request: PoolRequest, stored: dict[str, bool]) -> WriteBatch:
        """Select the pages that this rank has to write.

        Those not stored, each once, from the slot of its first key.
        """
        namespace = request.pool.namespace
        slots = dict[str, int]()
        for key, slot in zip(request.keys, request.slots, strict=True):
            if not stored[key]:
                slots.setdefault(key, slot)
        if not self._identity.is_writer(request.pool.name):
            slots.clear()
        elif slots and not self._fits(namespace):
            self.recorder.count(request.pool.name, pages_refused=len(slots))
            slots.clear()
        places = list(slots.values())
        pages = (
            self._guarded(
                f"sources of {request.pool.name}", lambda: request.pool.access.sources(places)
            )
            if places
            else []
        )
        if pages is None:
            self.recorder.count(request.pool.name, pages_refused=len(slots))
            return WriteBatch(namespace, [])
        writes = [
            ObjectWrite(namespace, key, buffers, replaces=(namespace.name, key) in self._damaged)
            for key, buffers in zip(slots, pages, strict=True)
        ]
        return WriteBatch(namespace, writes)

    def _account_write(
        self,
        request: PoolRequest,
        stored: dict[str, bool],
        batch: WriteBatch,
        outcome: Sequence[bool],
    ) -> None:
        pages = sum(
            ok and not write.existed for write, ok in zip(batch.writes, outcome, strict=True)
        )
        stored.update((write.key, ok) for write, ok in zip(batch.writes, outcome, strict=True))
        self._forget_damage(
            batch.namespace,
            [write.key for write, ok in zip(batch.writes, outcome, strict=True) if ok],
        )
        self.recorder.count(
            request.pool.name,
            pages_written=pages,
            bytes_written=pages * batch.namespace.page_bytes,
            pages_refused=outcome.count(False),
        )

    def _fits(self, namespace: Namespace) -> bool:
        limit = self._capabilities.max_page_bytes
        return limit is None or namespace.page_bytes <= limit

    def _ask(
        self,
        operation: str,
        question: Callable[[], list[list[bool]]],
        items: Sequence[Sequence[ItemT]],
        call: Call,
    ) -> list[list[bool]]:
        """Call the driver; a fault is `False` for every item (rule FT-1).

        So is an answer of the wrong shape.

        After the deadline the driver is not called, which is no fault of the store.
        """
        if call.expired():
            return [[False] * len(batch) for batch in items]

        def checked() -> list[list[bool]]:
            answers = question()
            if [len(answer) for answer in answers] != [len(batch) for batch in items]:
                raise DriverContractError(
                    "the driver answered for another number of objects than it was asked for"
                )
            return answers

        answers = self._attempt(operation, checked, _is_any_served if operation in MOVING else None)
        return [[False] * len(batch) for batch in items] if answers is None else answers

    def _attempt(
        self,
        operation: str,
        question: Callable[[], ItemT],
        proves: Callable[[ItemT], bool] | None = None,
    ) -> ItemT | None:
        """Call the driver; None after a fault.

        Args:
            proves: returns True for an answer which shows that the store serves again after faults.
        """

        def connected() -> ItemT:
            # Inside the guard: a store that cannot be reached is a miss, too, and not an error
            # (rule FT-1). Without a lock: `connected` becomes false in `close` only, which first
            # waits for calls such as this one.
            if not self._lifecycle.connected:
                self._lifecycle.ensure_connected()
            return question()

        return self._guarded(operation, connected, proves)

    def _guarded(
        self,
        operation: str,
        question: Callable[[], ItemT],
        proves: Callable[[ItemT], bool] | None = None,
    ) -> ItemT | None:
        """Call foreign code, a driver or an engine's pool; None after a fault."""
        try:
            answer = question()
        except Exception as error:  # noqa: BLE001 - a fault below, even a driver's bug, must not reach the engine
            self._note_fault(operation, error)
            return None
        # Only an operation that has failed ends an episode of faults: on a full disk, lookups
        # succeed all the time.
        if operation in self._faulty and (proves is None or proves(answer)):
            self._faulty = set()
            logger.info(
                "%s: serving again",
                self._driver_name,
                extra=fields(driver=self._driver_name, operation=operation),
            )
        return answer

    def _disconnect(self) -> None:
        try:
            self.disconnect()
        except Exception as error:  # noqa: BLE001 - `close` has to succeed also without the store
            self.recorder.count_fault()
            logger.warning("%s: closed, but not cleanly: %s", self._driver_name, error)

    def _count_fault(self, error: Exception) -> None:
        if not isinstance(error, StorageRefusedError):
            self.recorder.count_fault()

    def _note_fault(self, operation: str, error: Exception) -> None:
        self._count_fault(error)
        expected = isinstance(error, (StorageUnavailableError, OSError))
        begins = not self._faulty
        self._faulty.add(operation)
        # One warning for an episode of faults: a store that is down fails each call.
        logger.log(
            logging.WARNING if begins else logging.DEBUG,
            "%s: answering misses: %s" if begins else "%s: still answering misses: %s",
            self._driver_name,
            error,
            # Only an unexpected exception has a traceback in the log: it may be a bug of the
            # driver. A store that is down says enough in its message.
            exc_info=None if expected else error,
            extra=fields(driver=self._driver_name, operation=operation),
        )

    def _remember_damage(self, namespace: Namespace, keys: Sequence[str]) -> None:
        with self._damaged_lock:
            for key in keys:
                self._damaged[namespace.name, key] = None
            while len(self._damaged) > MAX_REMEMBERED_DAMAGE:
                self._damaged.popitem(last=False)

    def _forget_damage(self, namespace: Namespace, keys: Sequence[str]) -> None:
        if self._damaged:
            with self._damaged_lock:
                for key in keys:
                    self._damaged.pop((namespace.name, key), None)


_OWN_MEMBERS.update(
    name
    for name, member in vars(ObjectStorage).items()
    # `_abc_...` belongs to `abc`, and every subclass has its own.
    if name.startswith("_") and not name.startswith(("__", "_abc_")) and callable(member)
)


def _target(access: PageAccess, slot: int) -> list[memoryview]:
    return access.targets([slot])[0]


def _deliver(request: PoolRequest, batch: ReadBatch, delivered: Sequence[bool]) -> bool:
    """Copy staged pages into the pool; always `True`, unless it raises."""
    whole = [
        (slot, read.buffers)
        for slot, read, ok in zip(request.slots, batch.reads, delivered, strict=True)
        if ok
    ]
    request.pool.access.deliver(
        [slot for slot, _ in whole], [buffers for _, buffers in whole], [True] * len(whole)
    )
    return True


def _is_verified(batch: ReadBatch) -> bool:
    return all(read.verify() for read in batch.reads)


def _asked_pools(
    keys: Sequence[str], transfers: Sequence[PoolTransfer] | None
) -> dict[PoolName, None]:
    """Return the pools of a lookup, after a check of the keys and the policies' geometry.

    Raises:
        InvalidTransferError: a key or a policy's geometry is illegal.
    """
    check_keys(keys)
    check_transfers(transfers or (), "pool_transfers")
    absent = [False] * len(keys)
    for transfer in transfers or ():
        PoolPresence.of(transfer, absent)
    return dict.fromkeys((PoolName.KV, *(transfer.name for transfer in transfers or ())))


def _is_any_served(answers: list[list[bool]]) -> bool:
    return any(map(any, answers))


def _call(extra_info: HiCacheStorageExtraInfo | None) -> Call:
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
