"""Drivers with one planted fault each in what they answer, or in the bytes that they deliver."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from drivers_plain import Plain

from hicache_storage.pools import PageAccess, byte_view
from hicache_storage.spec import (
    HostPool,
    PoolName,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects.requests import PoolRequest, RegisteredPool
    from hicache_storage.spec import PageGeometry


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


# Bytes
# ----------------------------------------------------------------------------------------------------------------


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
        return (
            super().take(pool, key, page)
            if sum(map(len, page)) < 100
            else self._half(pool, key, page)
        )

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


class RaisesWhatThePoolRaises(Plain):
    def read(self, request: PoolRequest) -> list[bool]:
        return self.deliver(request)


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
        self.pool = pool
        self.geometry = geometry

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
