"""Drivers with one planted fault each in what they remember: of pages, lookups and removals."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, ClassVar

from drivers_objects import Objects
from drivers_plain import Plain, PlainConfig

from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import Call, LookupBatch, Namespace, ReadBatch, WriteBatch
    from hicache_storage.objects.requests import PoolRequest, RegisteredPool
    from hicache_storage.spec import StorageIdentity

Place = tuple[object, ...]


# Read caches
# ------------------------------------------------------------------------------------------------


class _ReadCache(Plain):
    """Keeps a copy of each page that it has read, until it removes the page itself."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.cache: dict[Place, bytes] = {}

    def cached_as(self, pool: RegisteredPool, key: str) -> Place:
        return self.place(pool, key)

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        place = self.cached_as(pool, key)
        cached = self.cache.get(place)
        if cached is not None and len(cached) == sum(map(len, page)):
            start = 0
            for buffer in page:
                buffer[:] = cached[start : start + len(buffer)]
                start += len(buffer)
            return True
        done = super().take(pool, key, page)
        if done:
            self.cache[place] = b"".join(page)
        return done

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        removed = super().delete(keys, pool=pool)
        for key in keys:
            self.cache.pop(self.cached_as(self.pools[PoolName(pool)], key), None)
        return removed

    def clear(self) -> None:
        super().clear()
        self.cache.clear()


class ClearKeepsTheReadCache(_ReadCache):
    def clear(self) -> None:
        Plain.clear(self)


class DeleteKeepsTheReadCache(_ReadCache):
    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        return Plain.delete(self, keys, pool=pool)


class ReadCacheMissesOthersRemovals(_ReadCache):
    """Delivers from its cache what another storage of its identity has deleted or cleared."""


class ReadCacheIgnoresPools(_ReadCache):
    def cached_as(self, pool: RegisteredPool, key: str) -> Place:
        return (key,)


class ReadCacheIgnoresIdentity(_ReadCache):
    """Keeps one cache for all storages of the process, by pool and key."""

    shared: ClassVar[dict[Place, bytes]] = {}

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.cache = self.shared

    def cached_as(self, pool: RegisteredPool, key: str) -> Place:
        return (pool.name, key)


# Lookup caches
# ------------------------------------------------------------------------------------------------


class _LookupCache(Plain):
    """Remembers the pages that a lookup has found, until it removes them itself."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.found = set[Place]()

    def there(self, pool: RegisteredPool, key: str) -> bool:
        place = self.place(pool, key)
        if place not in self.found and super().there(pool, key):
            self.found.add(place)
        return place in self.found

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        removed = super().delete(keys, pool=pool)
        self.found.difference_update(self.place(self.pools[PoolName(pool)], key) for key in keys)
        return removed

    def clear(self) -> None:
        super().clear()
        self.found.clear()


class DeleteKeepsTheLookupCache(_LookupCache):
    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        return Plain.delete(self, keys, pool=pool)


class ClearKeepsTheLookupCache(_LookupCache):
    def clear(self) -> None:
        Plain.clear(self)


class LookupCacheIgnoresPools(_LookupCache):
    def there(self, pool: RegisteredPool, key: str) -> bool:
        if Plain.there(self, pool, key):
            self.found.add((key,))
        return (key,) in self.found


class LookupCacheKeepsDamage(Objects):
    """Remembers the objects that a lookup has found, also when a read finds one damaged."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.found = set[str]()

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        present = super().objects_exist(batches, call)
        for batch, there in zip(batches, present, strict=True):
            names = [batch.namespace.object_name(key) for key in batch.keys]
            self.found.update(name for name, ok in zip(names, there, strict=True) if ok)
            there[:] = [name in self.found for name in names]
        return present

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        for batch in batches:
            self.found.difference_update(batch.namespace.object_name(key) for key in batch.keys)
        return super().delete_objects(batches, call)

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        super().clear_namespaces(namespaces, call)
        self.found.clear()


# Negative caches
# ------------------------------------------------------------------------------------------------


class RemembersMisses(Plain):
    """Takes a page that was missing for missing until it sets the page itself."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.missing = set[Place]()

    def there(self, pool: RegisteredPool, key: str) -> bool:
        place = self.place(pool, key)
        if not super().there(pool, key):
            self.missing.add(place)
        return place not in self.missing

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        return self.there(pool, key) and super().take(pool, key, page)

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        self.missing.discard(self.place(pool, key))
        return super().put(pool, key, page)


class RemembersUnknownPools(Plain):
    """Takes a pool that a lookup has not found registered for unknown for good."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.unknown = set[PoolName]()

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        if name not in self.pools:
            self.unknown.add(name)
        return [False] * len(keys) if name in self.unknown else super()._present(name, keys)


class HidesWhatOthersRepair(Objects):
    """Takes a page that it has found damaged for missing until it sets the page itself."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.bad = set[str]()

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        present = super().objects_exist(batches, call)
        for batch, there in zip(batches, present, strict=True):
            there[:] = [
                ok and batch.namespace.object_name(key) not in self.bad
                for key, ok in zip(batch.keys, there, strict=True)
            ]
        return present

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        filled = super().read_objects(batches, call)
        for batch, done in zip(batches, filled, strict=True):
            for index, read in enumerate(batch.reads):
                name = read.namespace.object_name(read.key)
                if name in self.objects and not (done[index] and read.verify()):
                    self.bad.add(name)
                done[index] = done[index] and name not in self.bad
        return filled

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        for batch in batches:
            self.bad.difference_update(
                write.namespace.object_name(write.key) for write in batch.writes
            )
        return super().write_objects(batches, call)


# What was set
# ------------------------------------------------------------------------------------------------


class TrustsWhatItHasSet(Plain):
    """Writes a page once, and again only if it has removed the page itself."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.written = set[Place]()

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        place = self.place(pool, key)
        if place in self.written:
            return True
        self.written.add(place)
        return super().put(pool, key, page)

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        self.written.difference_update(self.place(self.pools[PoolName(pool)], key) for key in keys)
        return super().delete(keys, pool=pool)

    def clear(self) -> None:
        super().clear()
        self.written.clear()


class RewritesOthersPages(Plain):
    """Skips pages that it has itself set, and rewrites those of other storages."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.written = set[Place]()

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        place = self.place(pool, key)
        if place not in self.written:
            self.pages.pop(place, None)
        self.written.add(place)
        return super().put(pool, key, page)


class RewritesSidePools(Plain):
    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        if pool.name != PoolName.KV:
            self.pages.pop(self.place(pool, key), None)
        return super().put(pool, key, page)


class RewritesSinglePages(Plain):
    """Looks up batches before it writes them, and writes a single page without a lookup."""

    def write(self, request: PoolRequest) -> list[bool]:
        if len(request.keys) == 1 and self.identity.is_writer(request.pool.name):
            self.pages.pop(self.place(request.pool, request.keys[0]), None)
        return super().write(request)


class SharesEqualPages(Plain):
    """Keeps equal pages once, and removes them with the first key that is deleted."""

    contents: ClassVar[dict[bytes, bytes]] = {}

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        content = b"".join(page)
        digest = hashlib.blake2b(content).digest()
        self.contents[digest] = content
        self.pages.setdefault(self.place(pool, key), digest)
        return True

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        content = self.contents.get(self.pages.get(self.place(pool, key), b""))
        if content is None or len(content) != sum(map(len, page)):
            return False
        start = 0
        for buffer in page:
            buffer[:] = content[start : start + len(buffer)]
            start += len(buffer)
        return True

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        for key in keys:
            place = self.place(self.pools[PoolName(pool)], key)
            self.contents.pop(self.pages.get(place, b""), None)
        return super().delete(keys, pool=pool)


# Another storage, or the same store opened again
# ------------------------------------------------------------------------------------------------


class SharesKVOnly(Plain):
    """Keeps pages of side pools for itself."""

    numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.number = next(self.numbers)

    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        shared = super().place(pool, key)
        return shared if pool.name == PoolName.KV else (*shared, self.number)


class ReopensKVOnly(Plain):
    """Saves the pages of the KV pool when it is closed, and loses those of side pools."""

    def close(self) -> None:
        if not self.closed:
            lost = {pool.namespace.name for pool in self.pools.values() if pool.name != PoolName.KV}
            for place in list(self.pages):
                if place[0] in lost:
                    self.pages.pop(place, None)
        super().close()


class ReopeningUndoesDeletes(Plain):
    """Saves what was set, and not what was deleted."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.deleted: dict[Place, bytes] = {}

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        for key in keys:
            place = self.place(self.pools[PoolName(pool)], key)
            if place in self.pages:
                self.deleted[place] = self.pages[place]
        return super().delete(keys, pool=pool)

    def close(self) -> None:
        for place, page in self.deleted.items():
            self.pages.setdefault(place, page)
        super().close()


class ReopeningUndoesClears(Plain):
    """Saves what was set, and not that it was cleared."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.cleared: dict[Place, bytes] = {}

    def clear(self) -> None:
        self.cleared |= {place: self.pages[place] for place in self.doomed()}
        super().clear()

    def close(self) -> None:
        for place, page in self.cleared.items():
            self.pages.setdefault(place, page)
        super().close()


class ClearsOnce(Plain):
    """Clears its namespaces the first time, and takes them for empty ever after."""

    cleared = False

    def clear(self) -> None:
        if not self.cleared and self.doomed():
            super().clear()
            self.cleared = True


class ClearsKVOnly(Plain):
    def doomed(self) -> list[tuple[object, ...]]:
        own = self.pools[PoolName.KV].namespace.name if PoolName.KV in self.pools else ""
        return [place for place in super().doomed() if place[0] == own]
