"""Drivers with one planted fault each. Every one of them must be found out, by the rule that it breaks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from control_plain import CAPABILITIES, Plain, PlainConfig

from hicache_storage.objects import ObjectStorage
from hicache_storage.pools import PageAccess, byte_view
from hicache_storage.spec import (
    Capabilities,
    HostPool,
    PoolHitPolicy,
    PoolName,
    PoolPresence,
    PoolTransferResult,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import Call, LookupBatch, Namespace, ReadBatch, WriteBatch
    from hicache_storage.objects.requests import PoolRequest, RegisteredPool
    from hicache_storage.spec import PageGeometry, PoolTransfer, StorageIdentity


class FileControlConfig(PlainConfig, frozen=True, kw_only=True):
    path: str


# Answers --------------------------------------------------------------------------------------------------------------


class Misses(Plain):
    def there(self, pool: RegisteredPool, key: str) -> bool:
        return False

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        return False


class AlwaysTrue(Plain):
    def there(self, pool: RegisteredPool, key: str) -> bool:
        return True

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        super().take(pool, key, page)
        return True


class Refuses(Plain):
    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        return False


class Raises(Plain):
    def read(self, request: PoolRequest) -> list[bool]:
        raise OSError("the disk is gone")


class ShortAnswers(Plain):
    def read(self, request: PoolRequest) -> list[bool]:
        return [done for done in super().read(request) if done]


# Bytes ----------------------------------------------------------------------------------------------------------------


class SwappedKeys(Plain):
    def read(self, request: PoolRequest) -> list[bool]:
        if len(request.keys) > 1 and all(self.there(request.pool, key) for key in request.keys):
            request.keys[:2] = request.keys[1::-1]
        return super().read(request)


class CompactsHoles(Plain):
    """The stored pages land in the first places, whatever is missing between them."""

    def read(self, request: PoolRequest) -> list[bool]:
        done = [self.there(request.pool, key) for key in request.keys]
        stored = [key for key, there in zip(request.keys, done, strict=True) if there]
        targets = request.pool.access.targets(request.slots)
        for key, page in zip(stored, targets, strict=False):
            self.take(request.pool, key, page)
        request.pool.access.deliver(request.slots, targets, [True] * len(targets))
        return done


class DropsLastPage(Plain):
    def write(self, request: PoolRequest) -> list[bool]:
        if len(request.keys) < 2:
            return super().write(request)
        request.slots.pop()
        request.keys.pop()
        return [*super().write(request), True]


class TruncatesPages(Plain):
    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        return super().take(pool, key, page) if sum(map(len, page)) < 100 else self._half(pool, key, page)

    def _half(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        stored = self.pages.get(self.place(pool, key))
        if stored is None:
            return False
        page[0][: len(page[0]) // 2] = stored[: len(page[0]) // 2]
        return True


class LosesV(Plain):
    """Delivers the first component only."""

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        kept = [bytes(buffer) for buffer in page[1:]]
        done = super().take(pool, key, page)
        for buffer, before in zip(page[1:], kept, strict=True):
            buffer[:] = before
        return done


class OverrunsPages(Plain):
    """Clears the page behind each destination."""

    def read(self, request: PoolRequest) -> list[bool]:
        done = super().read(request)
        size = request.pool.namespace.geometry.page_size
        behind = max(request.slots, default=0) + size
        if behind < request.pool.namespace.geometry.size:
            for buffer in request.pool.access.targets([behind])[0]:
                buffer[:] = bytes(len(buffer))
        return done


class KeepsHostPages(Plain):
    """Copies a page when it is first read, not when it is set."""

    views: ClassVar[dict[tuple[object, ...], list[memoryview]]] = {}

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        if not self.there(pool, key):
            self.views.setdefault(self.place(pool, key), page)
            self.pages[self.place(pool, key)] = b""
        return True

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        if (late := self.views.pop(self.place(pool, key), None)) is not None:
            self.pages[self.place(pool, key)] = b"".join(late)
        return super().take(pool, key, page)


class Rewrites(Plain):
    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        self.pages[self.place(pool, key)] = b"".join(page)
        return True


class AllOrNothing(Plain):
    """Refuses a batch of which some pages exist and some do not."""

    def write(self, request: PoolRequest) -> list[bool]:
        there = [self.there(request.pool, key) for key in request.keys]
        return [False] * len(there) if any(there) and not all(there) else super().write(request)


class FlattensPages(Plain):
    """Reads into what an engine's pool gives as a flat page, which is a copy."""

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        pool = self.pools[PoolName(host_pool_name)]
        if not isinstance(host_pool, HostPool):
            self.pools[pool.name] = replace(pool, access=FlatPages(host_pool, pool.access.geometry))


class FlatPages(PageAccess):
    def __init__(self, pool: Any, geometry: PageGeometry) -> None:
        self.pool, self.geometry = pool, geometry

    def sources(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return [[byte_view(self.pool.get_data_page(slot))] for slot in first_slots]

    def targets(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        return self.sources(first_slots)


class SharesAScratchBuffer(Plain):
    """Reads through one buffer for all threads."""

    scratch: ClassVar[bytearray] = bytearray(8 << 20)

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        stored = self.pages.get(self.place(pool, key))
        if stored is None or len(stored) != sum(map(len, page)):
            return False
        self.scratch[: len(stored)] = stored
        threading.Event().wait(0.0005)
        start = 0
        for buffer in page:
            buffer[:] = self.scratch[start : start + len(buffer)]
            start += len(buffer)
        return True


# Names ----------------------------------------------------------------------------------------------------------------


class IgnoresIdentity(Plain):
    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        # The salt's middle tells one case from another; without it each case would find the one before.
        run, case, *_ = self.identity.salt.split(".")
        return (run, case, str(pool.name), key)

    def doomed(self) -> list[tuple[object, ...]]:
        run, case, *_ = self.identity.salt.split(".")
        return [place for place in list(self.pages) if place[:2] == (run, case)]


class IgnoresDtype(Plain):
    """Identities that differ in the KV's dtype alone are one."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self._told = identity
        self._identity = replace(identity, kv_dtype="any")

    @property
    def identity(self) -> StorageIdentity:
        return self._told


class IgnoresGeometry(Plain):
    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return (self.identity.fingerprint(pool.name), str(pool.name), key)

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        stored = self.pages.get(self.place(pool, key))
        for buffer in page:
            buffer[:] = ((stored or b"") + bytes(4096))[: len(buffer)]
        return stored is not None

    def doomed(self) -> list[tuple[object, ...]]:
        own = {self.identity.fingerprint(pool) for pool in self.pools}
        return [place for place in list(self.pages) if place[0] in own]


class IgnoresPools(Plain):
    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return (self.identity.fingerprint(PoolName.KV), key)


class IgnoresCase(Plain):
    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return super().place(pool, key.lower())


class PastesKeys(Plain):
    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return super().place(pool, key.replace("/", "-"))


class WritesByPath(Plain):
    """Keeps a file for each page, named as the key is."""

    def __init__(self, identity: StorageIdentity, config: FileControlConfig) -> None:
        super().__init__(identity, config)
        self.root = Path(config.path)

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        path = self.root / "pages" / f"{key}.bin"
        if "escape" in key and not key.startswith("/"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(page))
        return super().put(pool, key, page)


class EveryRankWrites(Plain):
    def write(self, request: PoolRequest) -> list[bool]:
        sources = request.pool.access.sources(request.slots)
        return [self.put(request.pool, key, page) for key, page in zip(request.keys, sources, strict=True)]


class OneStateForAllRanks(Plain):
    """Takes Mamba state beside replicated KV for replicated too."""

    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        if not self.identity.kv_replicated:
            return super().place(pool, key)
        return (replace(self.identity, tp_rank=0, tp_size=1).fingerprint(PoolName.KV), str(pool.name), key)


class SetLooksElsewhere(Plain):
    """Sets of a single page go by another name than batches."""

    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return super().place(pool, key.strip())

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        self.pages.setdefault(super().place(pool, key.strip("/")), b"".join(page))
        return True


# Policies -------------------------------------------------------------------------------------------------------------


class MinimumOfMaxima(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        right = super().fold(kv, pools)
        hit = min(right.extra_pool_hit_pages.values())
        return PoolTransferResult(hit, right.extra_pool_hit_pages, list(range(1, hit + 1)))


class TrailingAsAll(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        changed = [
            replace(pool, hit_policy=PoolHitPolicy.ALL_PAGES) if pool.hit_policy is PoolHitPolicy.TRAILING_PAGES else pool
            for pool in pools
        ]
        return super().fold(kv, changed)


class GroupsDecide(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        right = super().fold(kv, pools)
        bounds = [right.extra_pool_hit_pages[pool.name] for pool in pools if pool.hit_policy is PoolHitPolicy.BLOCK_GROUPS]
        listed = [endpoint for endpoint in right.restorable_prefix_pages if endpoint <= min(bounds, default=1 << 30)]
        return PoolTransferResult(listed[-1] if listed else 0, right.extra_pool_hit_pages, listed)


class NoList(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        right = super().fold(kv, pools)
        return replace(right, restorable_prefix_pages=right.restorable_prefix_pages[-1:])


class OmitsPools(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        right = super().fold(kv, pools)
        return replace(right, extra_pool_hit_pages={pool: hit for pool, hit in right.extra_pool_hit_pages.items() if hit})


class CountsGapsAway(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        return super().fold([True] * sum(kv) + [False] * (len(kv) - sum(kv)), pools)


class RaisesOnUnknownPools(Plain):
    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        return [self.there(self.pools[name], key) for key in keys]


class FailsWithoutKeys(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        if not kv:
            raise ValueError("no keys")
        return super().fold(kv, pools)


# Life -----------------------------------------------------------------------------------------------------------------


class ConnectsAtOnce(Plain):
    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))


class WritesAtOnce(Plain):
    def __init__(self, identity: StorageIdentity, config: FileControlConfig) -> None:
        super().__init__(identity, config)
        Path(config.path).mkdir(parents=True, exist_ok=True)
        (Path(config.path) / f"owner-{os.getpid()}").touch()


class LeavesAThread(Plain):
    def open(self) -> None:
        super().open()
        threading.Thread(target=threading.Event().wait, daemon=True, name="left-behind").start()


class LeavesADescriptor(Plain):
    left: ClassVar[list[int]] = []

    def open(self) -> None:
        super().open()
        self.left.append(os.open("/dev/null", os.O_RDONLY))


class KeepsPools(Plain):
    registered: ClassVar[list[object]] = []

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.registered.append(host_pool)


class WorksWhenClosed(Plain):
    def _check_open(self) -> None:
        return


class InstallsAHandler(Plain):
    def open(self) -> None:
        super().open()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, lambda number, frame: None)


class NeedsTheMainThread(Plain):
    def open(self) -> None:
        super().open()
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


class Exits(Plain):
    def open(self) -> None:
        super().open()
        if threading.current_thread() is not threading.main_thread():
            sys.exit("no server")


class DeclaresMoreWhenOpen(Plain):
    """Declares what its base declares; it is registered with nothing."""


class ConfiguresLogging(Plain):
    def open(self) -> None:
        super().open()
        logging.getLogger().setLevel(logging.DEBUG)


class ForgetsForks(Plain):
    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self._pid = os.getpid()

    def _check_open(self) -> None:
        super()._check_open()
        if os.getpid() != self._pid:
            raise RuntimeError("bad file descriptor")


class ClearsEverything(Plain):
    def doomed(self) -> list[tuple[object, ...]]:
        return list(self.pages)


class ClearsStrangersFiles(Plain):
    def __init__(self, identity: StorageIdentity, config: FileControlConfig) -> None:
        super().__init__(identity, config)
        self.root = Path(config.path)

    def open(self) -> None:
        super().open()
        self.root.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        super().clear()
        for path in self.root.iterdir():
            path.unlink()


# Misuse, logs, counters -----------------------------------------------------------------------------------------------


class SwallowsMisuse(Plain):
    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra_info: object = None) -> dict[PoolName, list[bool]]:
        try:
            return super().batch_get_v2(transfers)
        except ValueError:
            return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class ForeignErrors(Plain):
    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: object = None) -> dict[PoolName, list[bool]]:
        for transfer in transfers:
            self.pools[transfer.name]
        return super().batch_set_v2(transfers)


class WritesBeforeItChecks(Plain):
    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: object = None) -> dict[PoolName, list[bool]]:
        answer = dict[PoolName, list[bool]]()
        for transfer in transfers:
            for name, done in super().batch_set_v2([transfer]).items():
                answer.setdefault(name, []).extend(done)
        return answer


class LogsMisses(Plain):
    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        done = super().take(pool, key, page)
        if not done:
            logging.getLogger("control").warning("page %s is not there", key)
        return done


# Damage: these are `ObjectStorage` drivers ----------------------------------------------------------------------------


class Objects(ObjectStorage):
    """A right driver over `ObjectStorage`."""

    stores: ClassVar[dict[str, dict[str, bytes]]] = {}
    promises: ClassVar[Capabilities] = CAPABILITIES
    verifies: ClassVar[bool] = True

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, driver_name="control", capabilities=self.promises, verifies_checksums=self.verifies)
        self.objects = self.stores.setdefault(f"{type(self).__name__}/{config.store}", {})

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [[batch.namespace.object_name(key) in self.objects for key in batch.keys] for batch in batches]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        return [[read.fill(self.objects.get(read.namespace.object_name(read.key))) for read in batch.reads] for batch in batches]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        for batch in batches:
            self.objects.update({write.namespace.object_name(write.key): write.tobytes() for write in batch.writes})
        return [[True] * len(batch.writes) for batch in batches]

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        for batch in batches:
            for read in batch.reads:
                self.objects.pop(read.namespace.object_name(read.key), None)
        return True

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [[self.objects.pop(batch.namespace.object_name(key), None) is not None for key in batch.keys] for batch in batches]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        for name in list(self.objects):
            if name.startswith(tuple(namespace.name for namespace in namespaces)):
                self.objects.pop(name, None)


class PromisesNothing(Objects):
    """Keeps pages for itself only, and says so."""

    promises = Capabilities(may_hang=False)

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.objects = {}


class PromisesTooLittle(Objects):
    """Shares pages without saying so."""

    promises = Capabilities(may_hang=False)


class PromisesTooMuch(PromisesNothing):
    """Says that it shares and keeps pages, and does not."""

    promises = CAPABILITIES


class CountsNoBytes(Objects):
    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        for pool in stats.pools.values():
            pool.bytes_read = 0
        return stats


class TrustsBytes(Objects):
    """Verifies no checksum, and does not say so."""

    verifies = False

    def get_stats(self) -> StorageStats:
        return replace(super().get_stats(), verifies_checksums=True)


class LeavesChecksumsOut(Objects):
    """Verifies no checksum, as an operator may have asked, and says so."""

    verifies = False


class HidesDamage(Objects):
    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        filled = super().read_objects(batches, call)
        answer = [
            [ok and read.verify() for ok, read in zip(done, batch.reads, strict=True)]
            for done, batch in zip(filled, batches, strict=True)
        ]
        for batch in batches:
            for read in batch.reads:
                read.damaged = False
        return answer


class KeepsDamage(Objects):
    """Puts a damaged object back under the set that repairs it."""

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        for batch in batches:
            for write in batch.writes:
                self.objects.setdefault(write.namespace.object_name(write.key), write.tobytes())
        return [[True] * len(batch.writes) for batch in batches]

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        return False


class Dies(Plain):
    def read(self, request: PoolRequest) -> list[bool]:
        os._exit(3)


class Hangs(Plain):
    def read(self, request: PoolRequest) -> list[bool]:
        threading.Event().wait()
        raise AssertionError


class CannotOpen(Plain):
    def open(self) -> None:
        raise ConnectionRefusedError("no server at 127.0.0.1:1")
