"""Drivers over `ObjectStorage` with one planted fault each: of pages in shards of KV heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from drivers_objects import Objects

from hicache_storage.objects import Namespace, ObjectWrite, RegisteredPool
from hicache_storage.pools import page_access
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drivers_plain import PlainConfig

    from hicache_storage.objects import Call, LookupBatch, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity


class _Rearranges(Objects):
    """Rearranges the shards of a pool when it is registered."""

    def rearranged(
        self, pool: RegisteredPool, shards: Sequence[RegisteredPool]
    ) -> Sequence[RegisteredPool]:
        raise NotImplementedError

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        pool = self._pools[PoolName(host_pool_name)]
        if pool.shards:
            shards = tuple(self.rearranged(pool, pool.shards))
            self._pools = {**self._pools, pool.name: replace(pool, shards=shards)}


class SwapsShards(_Rearranges):
    """Stores the shards of a rank in the opposite order."""

    def rearranged(
        self, pool: RegisteredPool, shards: Sequence[RegisteredPool]
    ) -> Sequence[RegisteredPool]:
        return [
            replace(shard, namespace=other.namespace)
            for shard, other in zip(shards, reversed(shards), strict=True)
        ]


class NumbersShardsByRank(_Rearranges):
    """Numbers the shards of a rank from its own number on, whatever the TP size."""

    def rearranged(
        self, pool: RegisteredPool, shards: Sequence[RegisteredPool]
    ) -> Sequence[RegisteredPool]:
        first = self.identity.tp_rank
        base = replace(self.identity, tp_rank=0, tp_size=1, head_start=0, head_end=0)
        return [
            replace(
                shard,
                namespace=Namespace(base, pool.name, shard.namespace.geometry, first + number),
            )
            for number, shard in enumerate(shards)
        ]


class NamesShardsByRank(_Rearranges):
    """Has the rank in the names of shards."""

    def rearranged(
        self, pool: RegisteredPool, shards: Sequence[RegisteredPool]
    ) -> Sequence[RegisteredPool]:
        mark = f"{self.identity.salt}/{self.identity.tp_rank}"
        base = replace(self.identity, salt=mark)
        return [
            replace(
                shard,
                namespace=Namespace(
                    base, pool.name, shard.namespace.geometry, shard.namespace.shard
                ),
            )
            for shard in shards
        ]


class ForgetsShards(_Rearranges):
    """Stores four shards of a rank at most."""

    def rearranged(
        self, pool: RegisteredPool, shards: Sequence[RegisteredPool]
    ) -> Sequence[RegisteredPool]:
        return shards[:4] if len(shards) == 8 else shards


class StoresRanks(Objects):
    """Stores what a rank holds as one object."""

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name, access = PoolName(host_pool_name), page_access(host_pool)
        pool = RegisteredPool(name, access, Namespace(self.identity, name, access.geometry))
        self._pools = {**self._pools, name: pool}


class BindsAllPools(Objects):
    """Binds the pools beside KV to the rank, those too that all ranks hold."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(replace(identity, tp_replicated_pools=frozenset()), config)
        self.given = identity

    @property
    def identity(self) -> StorageIdentity:
        return self.given

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        if host_pool_name in self.given.tp_replicated_pools:
            bound = self._identity.tp_sharded_pools | {host_pool_name}
            self._identity = replace(self._identity, tp_sharded_pools=bound)
        super().register_mem_host_pool_v2(host_pool, host_pool_name)


class EveryHolderWrites(Objects):
    """Writes a shard from every rank that holds it."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        holders = identity.tp_size // (identity.store_tp_size or identity.tp_size)
        first = identity.tp_rank - identity.tp_rank % max(1, holders)
        super().__init__(replace(identity, tp_rank=first), config)
        self.given = identity

    @property
    def identity(self) -> StorageIdentity:
        return self.given


class OneWriterForAll(Objects):
    """Lets rank 0 alone write what several ranks hold."""

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        identity = self.identity
        if identity.tp_rank and 0 < identity.store_tp_size < identity.tp_size:
            return [[False] * len(batch.writes) for batch in batches]
        return super().write_objects(batches, call)


class LooksAtTheFirstShard(Objects):
    """Takes a page for stored if the first shard of the rank is."""

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        found = super().objects_exist(batches, call)
        first = dict[str, list[bool]]()
        return [
            answer
            if batch.namespace.shard is None
            else first.setdefault(str(batch.namespace.pool), answer)
            for batch, answer in zip(batches, found, strict=True)
        ]


class RewritesIncompletePages(Objects):
    """Takes no shard of a page for stored, unless all of them are."""

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        found = super().objects_exist(batches, call)
        if any(batch.namespace.shard is None for batch in batches):
            return found
        whole = list(map(all, zip(*found, strict=True)))
        return [whole for _ in found]


class FillsHoles(Objects):
    """Makes up what is missing of a page, where some of it is there."""

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        filled = super().read_objects(batches, call)
        for batch, done in zip(batches, filled, strict=True):
            for index, read in enumerate(batch.reads):
                if batch.namespace.shard is None or done[index] or not filled[0][index]:
                    continue
                for buffer in read.buffers:
                    buffer[:] = bytes(len(buffer))
                read.envelope = ObjectWrite(read.namespace, read.key, read.buffers).envelope
                done[index] = True
        return filled


class DiscardsWholePages(Objects):
    """Removes all shards of a page of which one is damaged."""

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        for batch in batches:
            for read in batch.reads:
                ending = batch.namespace.object_name(read.key).partition("-")[2]
                for name in [name for name in self.objects if name.endswith(ending)]:
                    self.objects.pop(name, None)
        return True
