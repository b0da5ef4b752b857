"""A file storage with a host pool, and pages that identify themselves."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hicache_backends.file.config import FileConfig
from hicache_backends.file.driver import FileStorage
from hicache_storage.spec import (
    HiCacheStorageExtraInfo,
    PageGeometry,
    PoolTransfer,
    StorageIdentity,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_backends.file.store import Store

COMPONENTS = (1000, 3096)
"""Odd on purpose: no component is aligned to anything."""

OVERHEAD_BYTES = 64 + 65
"""What a page with a key of 64 characters takes beside its bytes."""


def identity(**changes: object) -> StorageIdentity:
    return StorageIdentity(
        **{"model": "m", "kv_dtype": "bfloat16", "page_size": 4, "layout": "page_first", **changes}
    )


def chain(name: str, pages: int) -> list[str]:
    """Keys of a chain, as an engine makes them."""
    return [hashlib.sha256(f"{name}/{page}".encode()).hexdigest() for page in range(pages)]


def content(key: str, version: int, size: int) -> bytes:
    """The bytes that a page has in these tests: no two keys or versions agree anywhere for long."""
    return hashlib.shake_128(f"{version}/{key}".encode()).digest(size)


class ScratchPool:
    """A host pool in a bytearray, page after page."""

    def __init__(
        self,
        pages: int,
        components: Sequence[int],
        layout: str = "page_first",
        dtype: str = "bfloat16",
    ):
        self.geometry = PageGeometry(layout, dtype, 4, pages * 4, tuple(components))
        self.memory = bytearray(pages * sum(components))

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        view, size, pages = memoryview(self.memory), self.geometry.page_bytes, []
        for slot in first_slots:
            at, buffers = slot // 4 * size, []
            for length in self.geometry.component_bytes:
                buffers.append(view[at : at + length])
                at += length
            pages.append(buffers)
        return pages

    def page(self, number: int) -> memoryview:
        size = self.geometry.page_bytes
        return memoryview(self.memory)[number * size : (number + 1) * size]


class Rig:
    """A storage on a directory, driven by keys and versions instead of slots and buffers."""

    def __init__(
        self,
        path: Path,
        *,
        pages: int = 64,
        components: Sequence[int] = COMPONENTS,
        layout: str = "page_first",
        dtype: str = "bfloat16",
        who: StorageIdentity | None = None,
        **options: object,
    ):
        self.path = path
        self.pool = ScratchPool(pages, components, layout, dtype)
        self.storage = FileStorage(who or identity(), FileConfig(path=str(path), **options))
        self.storage.register_mem_host_pool_v2(self.pool, "kv")
        self.page_bytes = self.pool.geometry.page_bytes

    @property
    def store(self) -> Store:
        self.storage.open()
        return self.storage.store

    @property
    def namespace(self) -> str:
        return self.storage.pools["kv"].namespace.name

    @property
    def bundles_path(self) -> Path:
        return Path(self.store.paths.bundles(self.namespace))

    def bundles(self) -> list[Path]:
        return sorted(self.bundles_path.glob("*.bundle"))

    def put(
        self,
        keys: Sequence[str],
        *,
        version: int = 0,
        prefix: Sequence[str] = (),
        seconds: float | None = None,
    ) -> list[bool]:
        for number, key in enumerate(keys):
            self.pool.page(number)[:] = content(key, version, self.page_bytes)
        answer = self.storage.batch_set_v2([self._transfer(keys)], self._info(prefix, seconds))
        return answer["kv"]

    def get(self, keys: Sequence[str], *, seconds: float | None = None) -> list[bytes | None]:
        """Each page's bytes, None where it was not delivered."""
        self.pool.memory[:] = bytes(len(self.pool.memory))
        answer = self.storage.batch_get_v2([self._transfer(keys)], self._info((), seconds))["kv"]
        assert len(answer) == len(keys)
        return [bytes(self.pool.page(number)) if ok else None for number, ok in enumerate(answer)]

    def versions(self, keys: Sequence[str], versions: Iterable[int] = (0,)) -> list[int | None]:
        """The version of each page; None where it was not delivered. Any other bytes are a
        failure."""
        known, found = list(versions), list[int | None]()
        for key, page in zip(keys, self.get(keys), strict=True):
            if page is None:
                found.append(None)
                continue
            matching = [
                version for version in known if content(key, version, self.page_bytes) == page
            ]
            assert matching, f"a get answered True with other bytes for {key}"
            found.append(matching[0])
        return found

    def holds(self, keys: Sequence[str], *, version: int = 0) -> bool:
        """Return whether all pages are there, with the bytes of that version."""
        return self.versions(keys, (version,)) == [version] * len(keys)

    def hit(self, keys: Sequence[str], *, prefix: Sequence[str] = ()) -> int:
        return self.storage.batch_exists_v2(keys, None, self._info(prefix, None)).kv_hit_pages

    def present(self, keys: Sequence[str]) -> list[bool]:
        return [bool(self.hit([key])) for key in keys]

    def stats(self):
        return self.storage.get_stats().pools["kv"]

    def bundle_bytes(self, pages: int) -> int:
        """Length of a bundle with so many pages whose keys have 64 characters."""
        return pages * (self.page_bytes + OVERHEAD_BYTES) - 1 + 64

    def _transfer(self, keys: Sequence[str]) -> PoolTransfer:
        return PoolTransfer("kv", torch.arange(len(keys) * 4), keys=list(keys))

    def _info(self, prefix: Sequence[str], seconds: float | None) -> HiCacheStorageExtraInfo:
        return HiCacheStorageExtraInfo(prefix_keys=list(prefix) or None, deadline_seconds=seconds)
