"""Drivers that cost too much: requests, memory, time for metrics."""

from __future__ import annotations

import copy
import json
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from drivers_networked import ACROSS, Networked
from drivers_objects import Objects
from drivers_plain import Plain
from drivers_server import receive, send

from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import PoolName, PoolStats, StorageStats

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from drivers_plain import PlainConfig

    from hicache_storage.objects import Call, LookupBatch, ReadBatch, WriteBatch
    from hicache_storage.objects.requests import RegisteredPool
    from hicache_storage.spec import HiCacheStorageExtraInfo, PoolTransfer, StorageIdentity


# Calls
# ----------------------------------------------------------------------------------------------------------------


class AsksForEachPool(Objects):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        whole = self._lookup
        # On the instance: no subclass may define it.
        self._lookup = lambda lookups, call: [whole([lookup], call)[0] for lookup in lookups]


class AsksForEachKey(Objects):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        whole = self._lookup
        self._lookup = lambda lookups, call: [
            [whole([(pool, [key])], call)[0][0] for key in keys] for pool, keys in lookups
        ]


def page_by_page(
    call: Callable[[list[PoolTransfer], Any], dict[PoolName, list[bool]]],
    transfers: Sequence[PoolTransfer],
    extra_info: HiCacheStorageExtraInfo | None,
) -> dict[PoolName, list[bool]]:
    """Take a batch apart before it reaches the store."""
    answers: dict[PoolName, list[bool]] = {transfer.name: [] for transfer in transfers}
    for transfer in transfers:
        keys, slots = transfer.keys or [], transfer.host_indices
        for index, key in enumerate(keys):
            size = len(slots) // len(keys)
            page = copy.copy(transfer)
            page.keys = [key]
            page.host_indices = slots[index * size : (index + 1) * size]
            answers[transfer.name] += call([page], extra_info)[transfer.name]
    return answers


class ReadsPageByPage(Objects):
    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return page_by_page(super().batch_get_v2, transfers, extra_info)


class WritesPageByPage(Objects):
    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return page_by_page(super().batch_set_v2, transfers, extra_info)


class AsksTheServerForEachPool(Networked):
    """Is asked once, and makes three requests of it."""

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [
            super(AsksTheServerForEachPool, self).objects_exist([batch], call)[0]
            for batch in batches
        ]


class OneRequestAPage(Networked):
    """Stands before a store of one request for each page, with 32 of them in flight; right."""

    promises = replace(ACROSS, requests_in_flight=32)
    in_flight: ClassVar[int] = 32

    def connect(self) -> None:
        self.pool = ThreadPool("sample-requests", max_threads=self.in_flight - 1)
        super().connect()

    def disconnect(self) -> None:
        self.pool.close(1.0)
        super().disconnect()

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        answers = [[False] * len(batch.keys) for batch in batches]

        def look(number: int, index: int) -> None:
            batch = batches[number]
            answers[number][index] = self.look_up(
                self.name(batch.namespace, batch.keys[index]), call
            )

        self.pool.run(
            [
                partial(look, number, index)
                for number, batch in enumerate(batches)
                for index in range(len(batch.keys))
            ]
        )
        return answers

    def look_up(self, name: str, call: Call) -> bool:
        return self.asked(call, "exists", [name])[0]


class OneRequestInFlight(OneRequestAPage):
    """Declares 32, and waits for each answer before it asks again."""

    in_flight = 1


class DeclaresFewInFlight(OneRequestAPage):
    """Keeps what it declares, which is too little."""

    promises = replace(ACROSS, requests_in_flight=4)
    in_flight = 4


class AsksTwiceForEachPage(OneRequestAPage):
    """Makes two requests for each page, and more at a time than it declares."""

    in_flight = 64

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return super().objects_exist([*batches, *batches], call)[: len(batches)]


class Pipelines(Networked):
    """Sends what it asks in 24 packets, and takes the answers meanwhile; right."""

    def asked(self, call: Call, *request: Any) -> Any:
        if request[0] != "exists" or len(request[1]) < 2:
            return super().asked(call, *request)
        names, size = request[1], -(-len(request[1]) // 24)
        return self.packets(call, [names[at : at + size] for at in range(0, len(names), size)])

    def packets(self, call: Call, packets: list[list[str]]) -> list[bool]:
        connection = self.fresh(call)
        with connection:
            # One thread writes on while this one reads what has been answered.
            writer = threading.Thread(target=self.write, args=(connection, packets))
            writer.start()
            try:
                return [answer for _ in packets for answer in receive(connection) or ()]
            finally:
                writer.join()

    def write(self, connection: socket.socket, packets: list[list[str]]) -> None:
        for packet in packets:
            send(connection, ("exists", packet))
            # The server answers meanwhile: a new turn of the connection, and no wait.
            time.sleep(0.001)


class WaitsForEachPacket(Pipelines):
    """Sends a packet when the one before it is answered."""

    def packets(self, call: Call, packets: list[list[str]]) -> list[bool]:
        with self.fresh(call) as connection:
            answers = list[bool]()
            for packet in packets:
                send(connection, ("exists", packet))
                answers += receive(connection) or ()
            return answers


# Many keys
# ------------------------------------------------------------------------------------------------------------


class ChokesOnManyKeys(Objects):
    """Has a largest request, and takes no second one."""

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        if sum(len(batch.keys) for batch in batches) > 200_000:
            raise OSError("request entity too large")
        return super().objects_exist(batches, call)


class LooksThroughLists(Objects):
    """Finds the place of each key by going through all of them."""

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        found = super().objects_exist(batches, call)
        return [
            [answer[list(batch.keys).index(key)] for key in batch.keys]
            for batch, answer in zip(batches, found, strict=True)
        ]


# Memory
# ---------------------------------------------------------------------------------------------------------------


class StagesReads(Objects):
    """Copies every page of a batch aside before the first one goes into the host pool."""

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        staged = [
            [self._copy(batch, key) for key in (read.key for read in batch.reads)]
            for batch in batches
        ]
        return [
            [read.fill(payload) for read, payload in zip(batch.reads, payloads, strict=True)]
            for batch, payloads in zip(batches, staged, strict=True)
        ]

    def _copy(self, batch: ReadBatch, key: str) -> bytearray | None:
        stored = self.objects.get(batch.namespace.object_name(key))
        return None if stored is None else bytearray(stored)


class JoinsComponents(Objects):
    """Joins the components of all pages before it stores the first one."""

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        open_capped = [[b"".join(write.buffers) for write in batch.writes] for batch in batches]
        answers = super().write_objects(batches, call)
        assert open_capped
        return answers


class StagesInMappings(Objects):
    """As `StagesReads`, in memory that Python does not see."""

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        import mmap

        staged = []
        for batch in batches:
            for read in batch.reads:
                stored = self.objects.get(batch.namespace.object_name(read.key), b"")
                mapping = mmap.mmap(-1, len(stored) or 1)
                mapping[: len(stored)] = stored
                staged.append(mapping)
        answers = super().read_objects(batches, call)
        for mapping in staged:
            mapping.close()
        return answers


# Metrics
# --------------------------------------------------------------------------------------------------------------


class SerialisesMetrics(Objects):
    """Writes all counters down after each call."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        count = self.recorder.count

        def count_and_write(pool: PoolName, **increments: int) -> None:
            count(pool, **increments)
            if self.recorder.enabled:
                for _ in range(20):
                    json.dumps(asdict(self.recorder.snapshot()))

        self.recorder.count = count_and_write  # type: ignore[method-assign]


class HashesForMetrics(Objects):
    """Takes a digest of each page that is read, where metrics are on."""

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        import hashlib

        filled = super().read_objects(batches, call)
        if self.recorder.enabled:
            for batch, done in zip(batches, filled, strict=True):
                for read, ok in zip(batch.reads, done, strict=True):
                    if ok:
                        hashlib.sha3_512(b"".join(read.buffers)).digest()
        return filled


class CannotBeSwitchedOff(Plain):
    """Counts for itself, whatever the options say."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.expect_message = StorageStats("sample", pools={PoolName.KV: PoolStats()})

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        self.expect_message.pools[PoolName.KV].pages_read += 1
        return super().take(pool, key, page)

    def get_stats(self) -> StorageStats:
        return self.expect_message


class HidesFaults(Objects):
    """With metrics off, counts no faults either."""

    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        if not self.recorder.enabled:
            stats.faults = 0
        return stats
