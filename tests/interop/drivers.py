"""Drivers for the tests: one that keeps pages in a dict and can be broken, and one that breaks the
contract itself."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hicache_storage.hookspecs import DriverSpec
from hicache_storage.layers import StorageLayer
from hicache_storage.objects import (
    Call,
    LookupBatch,
    Namespace,
    ObjectStorage,
    ReadBatch,
    WriteBatch,
)
from hicache_storage.spec import Capabilities, DriverConfig, Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.spec import StorageIdentity

CAPABILITIES = Capabilities(sharing=Sharing.PROCESS, durability=Durability.REOPEN, clears=True)

STORES: dict[str, dict[str, bytes]] = defaultdict(dict)
"""What is stored, by the name of the store."""


class Trouble:
    """What goes wrong, at which of the driver's operations; shared by all storages of the
    process."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.answer: Callable[[str], object] = lambda operation: None
        self.operations: tuple[str, ...] = ()
        self.happened = 0

    def at(self, *operations: str, answer: Callable[[str], object]) -> None:
        """From now on `answer` is called at these operations; it raises, or returns what to answer
        instead."""
        self.operations, self.answer = operations, answer

    def strike(self, operation: str) -> object:
        if operation not in self.operations:
            return None
        self.happened += 1
        return self.answer(operation)


TROUBLE = Trouble()

SEEN: list[tuple[str, list[str], str | None]] = []
"""What the driver was told about each of its calls: operation, prefix keys, request."""


class SampleConfig(DriverConfig):
    store: str = "default"


class SampleStorage(ObjectStorage):
    """Keeps pages in a dict of the process."""

    def __init__(self, identity: StorageIdentity, config: SampleConfig) -> None:
        super().__init__(identity, driver_name="sample", capabilities=CAPABILITIES)
        self.objects = STORES[config.store]

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        SEEN.append(("exists", list(call.prefix_keys), call.request_id))
        instead = TROUBLE.strike("exists")
        if instead is not None:
            return instead
        return [
            [batch.namespace.object_name(key) in self.objects for key in batch.keys]
            for batch in batches
        ]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        SEEN.append(("get", list(call.prefix_keys), call.request_id))
        instead = TROUBLE.strike("get")
        if instead is not None:
            return instead
        return [
            [
                read.fill(self.objects.get(read.namespace.object_name(read.key)))
                for read in batch.reads
            ]
            for batch in batches
        ]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        SEEN.append(("set", list(call.prefix_keys), call.request_id))
        instead = TROUBLE.strike("set")
        if instead is not None:
            return instead
        for batch in batches:
            self.objects.update(
                {write.namespace.object_name(write.key): write.tobytes() for write in batch.writes}
            )
        return [[True] * len(batch.writes) for batch in batches]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        TROUBLE.strike("clear")
        for namespace in namespaces:
            for name in [name for name in self.objects if name.startswith(namespace.name)]:
                del self.objects[name]

    def connect(self) -> None:
        TROUBLE.strike("connect")


class UnrulyStorage(StorageLayer):
    """A storage that does not keep the contract: it raises where it must not, and answers what
    nobody asked."""

    def __init__(self, identity: StorageIdentity, config: SampleConfig) -> None:
        super().__init__(SampleStorage(identity, config))
        self.announced = 0

    def on_host_pools_registered(self):
        self.announced += 1
        TROUBLE.strike("registered")

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        instead = TROUBLE.strike("exists")
        return (
            super().batch_exists_v2(keys, pool_transfers, extra_info)
            if instead is None
            else instead
        )

    def batch_get_v2(self, transfers, extra_info=None):
        instead = TROUBLE.strike("get")
        return super().batch_get_v2(transfers, extra_info) if instead is None else instead

    def batch_set_v2(self, transfers, extra_info=None):
        instead = TROUBLE.strike("set")
        return super().batch_set_v2(transfers, extra_info) if instead is None else instead


class SealedStorage(SampleStorage):
    """Cannot be cleared."""

    def __init__(self, identity: StorageIdentity, config: SampleConfig) -> None:
        super().__init__(identity, config)
        self._capabilities = Capabilities(sharing=Sharing.PROCESS, durability=Durability.REOPEN)


SPECS = [
    DriverSpec(
        name=name,
        target=f"{__name__}:{storage.__name__}",
        config=f"{__name__}:{SampleConfig.__name__}",
        capabilities=CAPABILITIES,
    )
    for name, storage in (
        ("sample", SampleStorage),
        ("unruly", UnrulyStorage),
        ("sealed", SealedStorage),
    )
]
