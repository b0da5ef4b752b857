"""Drivers with one planted fault each in the form of what they answer, and in their counters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
from drivers_objects import Objects
from drivers_plain import Plain, PlainConfig

from hicache_storage.objects import Call, LookupBatch
from hicache_storage.spec import PoolName, PoolStats, PoolTransferResult, StorageStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import ReadBatch
    from hicache_storage.objects.requests import PoolRequest
    from hicache_storage.spec import HiCacheStorageExtraInfo, PoolTransfer, StorageIdentity


# Of gets and sets
# ------------------------------------------------------------------------------------------------


class AnswersTuples(Plain):
    def read(self, request: PoolRequest) -> Any:
        return tuple(super().read(request))


class AnswersNumpyBools(Plain):
    def read(self, request: PoolRequest) -> Any:
        return list(numpy.array(super().read(request), dtype=bool))


class AnswersNoneForMisses(Plain):
    def read(self, request: PoolRequest) -> Any:
        return [done or None for done in super().read(request)]


class PadsAnswers(Plain):
    """Answers with as many entries as its largest batch has had."""

    longest = 0

    def read(self, request: PoolRequest) -> list[bool]:
        self.longest = max(self.longest, len(request.keys))
        return [*super().read(request), *[False] * (self.longest - len(request.keys))]


class OmitsPoolsWithoutKeys(Plain):
    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answers = super().batch_get_v2(transfers, extra_info)
        return {pool: answer for pool, answer in answers.items() if answer}


class OmitsPoolsOfMisses(Plain):
    """Leaves a pool out of which no page was delivered."""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answers = super().batch_get_v2(transfers, extra_info)
        return {pool: answer for pool, answer in answers.items() if any(answer) or not answer}


class AnswersForEveryPool(Plain):
    """Answers for each registered pool, asked or not."""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return {**{name: [] for name in self.pools}, **super().batch_get_v2(transfers, extra_info)}


class ReusesAnswers(Plain):
    """Answers each get with the same list, which the next one fills anew."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.answers: dict[PoolName, list[bool]] = {}

    def read(self, request: PoolRequest) -> list[bool]:
        answer = self.answers.setdefault(request.pool.name, [])
        answer[:] = super().read(request)
        return answer


class OneAnswerForAllPools(Plain):
    """Answers for all pools with one list, that of the last."""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answers = super().batch_get_v2(transfers, extra_info)
        last = next(reversed(answers.values()), [])
        return {
            pool: last if len(last) == len(answer) else answer for pool, answer in answers.items()
        }


class DeleteAnswersNothing(Plain):
    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> Any:
        super().delete(keys, pool=pool)


# Of lookups
# ------------------------------------------------------------------------------------------------


class ReusesEndpoints(Plain):
    """Answers each exists with the same list of endpoints, which the next one fills anew."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.endpoints: list[int] = []

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        answer = super().batch_exists_v2(keys, pool_transfers, extra_info)
        self.endpoints[:] = answer.restorable_prefix_pages
        return replace(answer, restorable_prefix_pages=self.endpoints)


class _Reshaped(Plain):
    def reshape(self, answer: PoolTransferResult) -> PoolTransferResult:
        return answer

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return self.reshape(super().batch_exists_v2(keys, pool_transfers, extra_info))


class HitsAreFloats(_Reshaped):
    def reshape(self, answer: PoolTransferResult) -> PoolTransferResult:
        return replace(answer, kv_hit_pages=float(answer.kv_hit_pages))


class EndpointsAreAnIterator(_Reshaped):
    """Hands over the endpoints in a form that can be read once."""

    def reshape(self, answer: PoolTransferResult) -> PoolTransferResult:
        # An empty list stays one.
        endpoints: Any = answer.restorable_prefix_pages
        return replace(answer, restorable_prefix_pages=iter(endpoints) if endpoints else endpoints)


class EndpointsAreATuple(_Reshaped):
    def reshape(self, answer: PoolTransferResult) -> PoolTransferResult:
        endpoints: Any = answer.restorable_prefix_pages
        return replace(answer, restorable_prefix_pages=tuple(endpoints) if endpoints else endpoints)


class VerdictsAreNumpyNumbers(_Reshaped):
    def reshape(self, answer: PoolTransferResult) -> PoolTransferResult:
        verdicts: Any = {
            pool: numpy.int64(pages) for pool, pages in answer.extra_pool_hit_pages.items()
        }
        return replace(answer, extra_pool_hit_pages=verdicts)


class ListsThirtyTwoEndpoints(_Reshaped):
    """Lists the last endpoints only, because messages between ranks have a limit."""

    def reshape(self, answer: PoolTransferResult) -> PoolTransferResult:
        return replace(answer, restorable_prefix_pages=answer.restorable_prefix_pages[-32:])


class NoKeysRepeatTheLastHit(_Reshaped):
    last: PoolTransferResult | None = None

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        if keys or self.last is None:
            self.last = super().batch_exists_v2(keys, pool_transfers, extra_info)
        return self.last


class UnknownPoolsHideTheOthers(Plain):
    """Answers for a pool that is not registered, and for no other pool of the call."""

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        unknown = {
            transfer.name: 0 for transfer in pool_transfers or () if transfer.name not in self.pools
        }
        if unknown:
            return PoolTransferResult(0, unknown, [])
        return super().batch_exists_v2(keys, pool_transfers, extra_info)


class NeedsKV(Plain):
    """Looks up the KV pool, registered or not."""

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        pool = self.pools[name] if name == PoolName.KV else self.pools.get(name)
        return [pool is not None and self.there(pool, key) for key in keys]


class CapsWindows(Plain):
    """Looks at sixteen pages of a window at most."""

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        capped = [replace(one, keys=list(one.keys or ())[:16]) for one in pool_transfers or ()]
        return super().batch_exists_v2(keys, capped, extra_info)


class LooksUpSixtyFour(Plain):
    """Looks up the first 64 keys, and takes the others for missing."""

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        return [*super()._present(name, keys[:64]), *[False] * len(keys[64:])]


# Presence of each page
# ------------------------------------------------------------------------------------------------


class _Present(Objects):
    """A driver with a batch_present of its own."""

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self.presence(keys, pool)

    def right(self, keys: Sequence[str], pool: str) -> list[bool]:
        return super().batch_present(keys, pool=pool)

    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        return self.right(keys, pool)


class PresenceEndsAtAHole(_Present):
    """Takes what is asked for for a chain."""

    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        found = self.right(keys, pool)
        leading = ([*found, False]).index(False)
        return [True] * leading + [False] * (len(keys) - leading)


class PresenceOfEachOnce(_Present):
    """Answers for each key once, however often it is asked for."""

    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        return self.right(list(dict.fromkeys(keys)), pool)


class PresenceInOrderOfKeys(_Present):
    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        return self.right(sorted(keys), pool)


class PresenceOfKV(_Present):
    """Looks into the KV pool, whichever is asked about."""

    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        return self.right(keys, PoolName.KV)


class PresenceIsASet(_Present):
    """Answers with the keys that exist."""

    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        found: Any = {key for key, there in zip(keys, self.right(keys, pool), strict=True) if there}
        return found


class PresenceRemembersMisses(_Present):
    """Takes a page that was missing once for missing ever since."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.missing = set[tuple[str, str]]()

    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        found = [
            there and (pool, key) not in self.missing
            for key, there in zip(keys, self.right(keys, pool), strict=True)
        ]
        self.missing |= {(pool, key) for key, there in zip(keys, found, strict=True) if not there}
        return found


class PresenceOfUnknownPoolsRaises(_Present):
    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        self.pools[PoolName(pool)]
        return self.right(keys, pool)


class PresenceOfDamage(_Present):
    """Answers with what lies in the store, also where a read has found it damaged."""

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        return False

    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        registered = self.pools.get(PoolName(pool))
        if registered is None or not keys:
            return self.right(keys, pool)
        return self.objects_exist([LookupBatch(registered.namespace, keys)], Call())[0]


# Counters
# ------------------------------------------------------------------------------------------------


class LendsItsCounters(Objects):
    """Answers get_stats() with the counters themselves."""

    lent: StorageStats | None = None

    def get_stats(self) -> StorageStats:
        current = super().get_stats()
        if self.lent is None:
            self.lent = current
        for name, pool in current.pools.items():
            lent = self.lent.pools.setdefault(name, PoolStats())
            for counter in PoolStats.__slots__:
                setattr(lent, counter, getattr(pool, counter))
        return self.lent

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answer = super().batch_get_v2(transfers, extra_info)
        self.get_stats()
        return answer


class DrainsItsCounters(Objects):
    """Counts from 0 again after get_stats()."""

    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        for name, pool in stats.pools.items():
            self.recorder.count(name, pages_read=-pool.pages_read)
        return stats


class ForgetsCountersWhenClosed(Objects):
    ended = False

    def close(self) -> None:
        super().close()
        self.ended = True

    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        return replace(stats, pools={}) if self.ended else stats


class CountsLookupsAsMisses(Objects):
    """Counts pages that an exists has not found as pages that a get has missed."""

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        answer = super().batch_exists_v2(keys, pool_transfers, extra_info)
        self.recorder.count(PoolName.KV, pages_missed=len(keys) - answer.kv_hit_pages)
        return answer


class CountsEverythingAsKV(Objects):
    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        kv = stats.pools.get(PoolName.KV, PoolStats())
        for name, pool in stats.pools.items():
            if name != PoolName.KV:
                kv.pages_read += pool.pages_read
                kv.bytes_read += pool.bytes_read
                pool.pages_read = pool.bytes_read = 0
        return stats


class CountsTransfersTwice(Objects):
    """Counts a get once for each of the transfers of a pool."""

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answer = super().batch_get_v2(transfers, extra_info)
        for name, delivered in answer.items():
            more = sum(transfer.name == name for transfer in transfers) - 1
            self.recorder.count(name, pages_read=more * sum(delivered))
        return answer


class CountsDamageOncePerCall(Objects):
    """Counts one damaged page of a get, however many there are."""

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        filled = super().read_objects(batches, call)
        seen = False
        for batch, done in zip(batches, filled, strict=True):
            for index, read in enumerate(batch.reads):
                done[index] = done[index] and read.verify()
                if read.damaged and seen:
                    read.damaged = False
                    self.objects.pop(read.namespace.object_name(read.key), None)
                seen = seen or read.damaged
        return filled
