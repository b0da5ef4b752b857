"""Drivers with one planted fault each in the names under which they keep pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivers_plain import FileControlConfig, Plain, PlainConfig

from hicache_storage.spec import (
    PoolName,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects.requests import PoolRequest, RegisteredPool
    from hicache_storage.spec import HiCacheStorageExtraInfo, PoolTransfer, StorageIdentity


class IgnoresIdentity(Plain):
    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        # The salt's middle tells one case from another; without it each case would find the one
        # before.
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


class IgnoresDtypeAndDeniesPages(IgnoresDtype):
    """Reports the last page of a set as refused besides, although it is stored."""

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answers = super().batch_set_v2(transfers, extra_info)
        return {pool: [*pages[:-1], False] for pool, pages in answers.items()}


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
        return [
            self.put(request.pool, key, page)
            for key, page in zip(request.keys, sources, strict=True)
        ]


class OneStateForAllRanks(Plain):
    """Takes Mamba state beside replicated KV for replicated too."""

    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        if not self.identity.kv_replicated:
            return super().place(pool, key)
        return (
            replace(self.identity, tp_rank=0, tp_size=1).fingerprint(PoolName.KV),
            str(pool.name),
            key,
        )


class SetLooksElsewhere(Plain):
    """Sets of a single page go by another name than batches."""

    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return super().place(pool, key.strip())

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        self.pages.setdefault(super().place(pool, key.strip("/")), b"".join(page))
        return True
