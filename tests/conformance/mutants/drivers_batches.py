"""Drivers with one planted fault each that shows for some batches, keys, bytes or orders only."""

from __future__ import annotations

import subprocess
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from drivers_objects import Objects
from drivers_plain import Plain, PlainConfig

from hicache_storage.objects import ObjectWrite
from hicache_storage.objects.requests import PoolRequest, RegisteredPool
from hicache_storage.spec import PoolName, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import Call, Namespace, ReadBatch
    from hicache_storage.spec import (
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
        StorageIdentity,
    )

MAX_BATCH = 64
"""Pages of a request, for those that make one request of a batch."""


# Long batches, and host pages in an order
# ------------------------------------------------------------------------------------------------


class ReadsSixtyFourPages(Plain):
    """Reads the first 64 pages of a batch, and answers True for the others."""

    def read(self, request: PoolRequest) -> list[bool]:
        first = PoolRequest(request.pool, request.keys[:MAX_BATCH], request.slots[:MAX_BATCH])
        return [*super().read(first), *[True] * len(request.keys[MAX_BATCH:])]


class WritesSixtyFourPages(Plain):
    """Writes the first 64 pages of a batch, and answers True for the others."""

    def write(self, request: PoolRequest) -> list[bool]:
        first = PoolRequest(request.pool, request.keys[:MAX_BATCH], request.slots[:MAX_BATCH])
        return [*super().write(first), *[True] * len(request.keys[MAX_BATCH:])]


def _steps(request: PoolRequest) -> set[int]:
    """Distances between the host pages of a batch, in pages."""
    size = request.pool.namespace.geometry.page_size
    pairs = zip(request.slots, request.slots[1:], strict=False)
    return {(after - before) // size for before, after in pairs}


class SkipsTheLastAdjoiningPage(Plain):
    """Reads host pages that adjoin in one piece, which is a page too short."""

    def deliver(self, request: PoolRequest) -> list[bool]:
        if len(request.keys) < 4 or _steps(request) != {1}:
            return super().deliver(request)
        there = self.there(request.pool, request.keys.pop())
        request.slots.pop()
        return [*super().deliver(request), there]


class SortsDescendingPages(Plain):
    """Writes host pages that descend one by one in one piece, from the lowest on."""

    def write(self, request: PoolRequest) -> list[bool]:
        if len(request.keys) >= 4 and _steps(request) == {-1}:
            request.slots.sort()
        return super().write(request)


class ReadsThePlainTensor(Plain):
    """Takes the memory of the indices for the indices, whatever part of it they are."""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        super().batch_get_v2([])
        for transfer in transfers:
            given = transfer.host_indices
            if isinstance(given, torch.Tensor) and given.dtype == torch.int64:
                whole = torch.empty(0, dtype=torch.int64).set_(given.untyped_storage())
                transfer.host_indices = whole[: given.numel()]
        return super().batch_get_v2(transfers, extra_info)


class DividesItsIndices(Plain):
    """Makes page numbers of the caller's indices, in place."""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answer = super().batch_get_v2(transfers, extra_info)
        for transfer in transfers:
            if transfer.host_indices is not None:
                size = self.pools[transfer.name].namespace.geometry.page_size
                transfer.host_indices.floor_divide_(size)
        return answer


class EmptiesItsKeys(Plain):
    """Takes the keys out of the caller's list while it writes them."""

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answer = super().batch_set_v2(transfers, extra_info)
        for transfer in transfers:
            if isinstance(transfer.keys, list):
                transfer.keys.clear()
        return answer


class ScramblesItsSources(Plain):
    """Turns the host pages of a set into the form in which it stores them, in place."""

    def write(self, request: PoolRequest) -> list[bool]:
        done = super().write(request)
        for page in request.pool.access.sources(request.slots):
            for buffer in page:
                if not buffer.readonly:
                    buffer[:] = bytes(byte ^ 0xFF for byte in buffer)
        return done


class BlanksBehindMisses(Plain):
    """Blanks the destination of a missing page, and the page behind it."""

    def read(self, request: PoolRequest) -> list[bool]:
        done = super().read(request)
        geometry = request.pool.namespace.geometry
        behind = [
            slot + geometry.page_size
            for slot, ok in zip(request.slots, done, strict=True)
            if not ok and slot + 2 * geometry.page_size <= geometry.size
        ]
        for page in request.pool.access.targets(
            [slot for slot in behind if slot not in request.slots]
        ):
            for buffer in page:
                buffer[:] = bytes(len(buffer))
        return done


class AnswersForTheFirstPool(Plain):
    """Reads a pool that comes without the first one from the first one's pages."""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        first = next(iter(self.pools), None)
        self.other = len(transfers) == 1 and transfers[0].name != first
        try:
            return super().batch_get_v2(transfers, extra_info)
        finally:
            self.other = False

    other = False

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        return super().take(next(iter(self.pools.values())) if self.other else pool, key, page)


class KeepsTheFirstGeometry(Plain):
    """Keeps the namespace of a pool when the pool is registered again."""

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        before = self.pools.get(PoolName(host_pool_name))
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if before is not None:
            again = self.pools[before.name]
            self.pools[before.name] = RegisteredPool(before.name, again.access, before.namespace)


class NoTransfersRaise(Plain):
    """Notes the pool of each call, by its first transfer."""

    pool_of_the_call = ""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        self.pool_of_the_call = transfers[0].name
        return super().batch_get_v2(transfers, extra_info)


class BorrowsForSetsOnly(Plain):
    """Fills in borrowed indices for a set; in a get such a transfer has no keys."""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        own = [transfer for transfer in transfers if transfer.keys is not None]
        answer = super().batch_get_v2(own, extra_info)
        return {transfer.name: answer.get(transfer.name, []) for transfer in transfers}


# Removal
# ------------------------------------------------------------------------------------------------


class DeletesInAllPools(Plain):
    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        for other in self.pools:
            if other != pool:
                super().delete(keys, pool=other)
        return super().delete(keys, pool=pool)


class DeletesFromKVOnly(Plain):
    """Deletes from the KV pool, whatever pool it is told."""

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        return super().delete(keys)


class NoKeysDeleteEverything(Plain):
    """Takes a delete of no keys for one of all keys."""

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        if not keys:
            self.clear()
        return super().delete(keys, pool=pool)


class NoPoolsClearEverything(Plain):
    """Clears by the beginning of names, which is empty where no pool is registered."""

    def doomed(self) -> list[tuple[object, ...]]:
        return super().doomed() if self.pools else list(self.pages)


# Bytes
# ------------------------------------------------------------------------------------------------


class ZerosAreAHole(Plain):
    """Takes a page of zeros for a place that was never written."""

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        stored = self.pages.get(self.place(pool, key))
        return stored is not None and any(stored) and super().take(pool, key, page)


class StripsZeros(Plain):
    """Stores a page without the zeros at its end."""

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        self.pages.setdefault(self.place(pool, key), b"".join(page).rstrip(b"\0") or b"\0")
        return True


class EndsAtItsMark(Plain):
    """Writes a mark behind each page, and reads up to the first one."""

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        content = (b"".join(page) + b"HCP2").partition(b"HCP2")[0]
        self.pages.setdefault(self.place(pool, key), content)
        return True


# Names
# ------------------------------------------------------------------------------------------------


class NamesByCRC32(Plain):
    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return (pool.namespace.name, zlib.crc32(key.encode()))


class CutsKeys(Plain):
    """Uses as much of a key as a file's name can hold."""

    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return super().place(pool, key[:255])


class NamesByPrefix(Plain):
    """Names a page by the prefix keys of the call and its own key."""

    prefix: tuple[str, ...] = ()

    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return (*super().place(pool, key), self.prefix[-1:])

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self._with(extra_info, lambda: super(NamesByPrefix, self).batch_set_v2(transfers))

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self._with(extra_info, lambda: super(NamesByPrefix, self).batch_get_v2(transfers))

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return self._with(
            extra_info, lambda: super(NamesByPrefix, self).batch_exists_v2(keys, pool_transfers)
        )

    def _with(self, extra_info: HiCacheStorageExtraInfo | None, ask: Any) -> Any:
        self.prefix = tuple((extra_info and extra_info.prefix_keys) or ())
        try:
            return ask()
        finally:
            self.prefix = ()


class CachesFingerprints(Plain):
    """Computes the namespace of a model's pool once for all storages of the process."""

    known: ClassVar[dict[tuple[str, PoolName], Namespace]] = {}

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        pool = self.pools[PoolName(host_pool_name)]
        # The salt's middle tells one case from another.
        case = ".".join(self.identity.salt.split(".")[:2])
        namespace = self.known.setdefault(
            (f"{case}/{self.identity.model}", pool.name), pool.namespace
        )
        self.pools[pool.name] = RegisteredPool(pool.name, pool.access, namespace)


class LooksUpByRank(Plain):
    """Looks replicated pools up in the namespace of its own rank."""

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        found = super()._present(name, keys)
        return found if self.identity.is_writer(name) else [False] * len(found)


# Verification
# ------------------------------------------------------------------------------------------------


class _VerifiesSome(Objects):
    """Makes up the envelopes of some pages that it reads, so that nothing notices damage."""

    def is_verified(self, batch: ReadBatch, index: int) -> bool:
        return True

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        filled = super().read_objects(batches, call)
        for batch, done in zip(batches, filled, strict=True):
            for index, read in enumerate(batch.reads):
                if done[index] and not self.is_verified(batch, index):
                    read.envelope = ObjectWrite(read.namespace, read.key, read.buffers).envelope
        return filled


class VerifiesTheFirstPage(_VerifiesSome):
    def is_verified(self, batch: ReadBatch, index: int) -> bool:
        return index == 0


class VerifiesAllButTheLast(_VerifiesSome):
    def is_verified(self, batch: ReadBatch, index: int) -> bool:
        return index == 0 or index < len(batch.reads) - 1


class VerifiesKVOnly(_VerifiesSome):
    def is_verified(self, batch: ReadBatch, index: int) -> bool:
        return batch.namespace.pool == PoolName.KV


# Life cycle, and threads
# ------------------------------------------------------------------------------------------------


class ConnectsToSet(Plain):
    """Connects in open() and in the first set; other calls find no connection."""

    connected = False

    def open(self) -> None:
        super().open()
        self.connected = True

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        self.connected = True
        return super().batch_set_v2(transfers, extra_info)

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        return self.connected and super().take(pool, key, page)

    def there(self, pool: RegisteredPool, key: str) -> bool:
        return self.connected and super().there(pool, key)


class ClearsBeforeItConnects(Plain):
    """Has nothing to clear before open() or a set has connected it."""

    connected = False

    def open(self) -> None:
        super().open()
        self.connected = True

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        self.connected = True
        return super().batch_set_v2(transfers, extra_info)

    def doomed(self) -> list[tuple[object, ...]]:
        return super().doomed() if self.connected else []


class ClearsWhenClosed(Plain):
    def clear(self) -> None:
        for place in self.doomed():
            self.pages.pop(place, None)


class DeletesWhenClosed(Plain):
    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        registered = self.pools[PoolName(pool)]
        return [self.pages.pop(self.place(registered, key), None) is not None for key in keys]


class LeavesAProcess(Plain):
    """Starts a helper process, and does not end it."""

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def open(self) -> None:
        super().open()
        quiet = subprocess.DEVNULL
        self.started.append(
            subprocess.Popen(["sleep", "30"], stdin=quiet, stdout=quiet, stderr=quiet)
        )


class HandlesRareSignals(Plain):
    def open(self) -> None:
        import signal

        super().open()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGURG, lambda number, frame: None)


class RegistersForOneThread(Plain):
    """Knows a pool in the thread that has registered it."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.registered_in: dict[PoolName, int] = {}

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.registered_in[PoolName(host_pool_name)] = threading.get_ident()

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        mine = self.registered_in.get(name) == threading.get_ident()
        return super()._present(name, keys) if mine else [False] * len(keys)


class RegistersFromScratch(Plain):
    """Makes its list of pools anew when one is registered."""

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        before = dict(self.pools)
        self.pools.clear()
        time.sleep(0.002)
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.pools.update({name: pool for name, pool in before.items() if name not in self.pools})


class LocksInTheCallersOrder(Plain):
    """Locks the pools of a call one after the other, in the order of its transfers."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.locks: dict[PoolName, threading.Lock] = {}

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        held = list[threading.Lock]()
        try:
            for name in dict.fromkeys(transfer.name for transfer in transfers):
                lock = self.locks.setdefault(name, threading.Lock())
                # A deadlock ends, so that a test of it takes no minutes.
                if not lock.acquire(timeout=0.5):
                    raise StorageUnavailableError(f"waited too long for the lock of {name!r}")
                held.append(lock)
                time.sleep(0.001)
            return super().batch_set_v2(transfers, extra_info)
        finally:
            for lock in held:
                lock.release()


class BlanksWhatItDeletes(Plain):
    """Blanks a page in place before it removes it."""

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        registered = self.pools[PoolName(pool)]
        for key in keys:
            place = self.place(registered, key)
            stored = self.pages.get(place)
            if stored is not None:
                self.pages[place] = bytes(len(stored))
        time.sleep(0.001)
        return super().delete(keys, pool=pool)
