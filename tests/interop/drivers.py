"""Drivers for the tests: one that keeps pages in a dict and can be broken, and one that breaks the
contract itself."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING

from hicache_storage import plugins
from hicache_storage.hookspecs import DriverSpec
from hicache_storage.layers import StorageLayer
from hicache_storage.objects import ObjectStorage
from hicache_storage.spec import Capabilities, DriverConfig, Durability, Sharing
from hicache_storage.testing import MemoryStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_storage.objects import Call
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


def raise_os_error(operation: str) -> object:
    """As a store fails."""
    raise OSError(5, "Input/output error")


SEEN: list[tuple[str, list[str], str | None]] = []
"""What the driver was told about each of its calls: operation, prefix keys, request."""


class SampleConfig(DriverConfig):
    store: str = "default"


class SampleStorage(MemoryStorage):
    """Keeps pages in a dict of the process."""

    def __init__(self, identity: StorageIdentity, config: SampleConfig) -> None:
        objects = STORES[config.store]
        super().__init__(identity, objects, driver_name="sample", capabilities=CAPABILITIES)

    def objects_exist(self, batches, call):
        return _or_right(_struck("exists", call), super().objects_exist, batches, call)

    def read_objects(self, batches, call):
        return _or_right(_struck("get", call), super().read_objects, batches, call)

    def write_objects(self, batches, call):
        return _or_right(_struck("set", call), super().write_objects, batches, call)

    def clear_namespaces(self, namespaces, call):
        TROUBLE.strike("clear")
        super().clear_namespaces(namespaces, call)

    def connect(self):
        TROUBLE.strike("connect")

    delete_objects = ObjectStorage.delete_objects
    discard_objects = ObjectStorage.discard_objects


def _struck(operation: str, call: Call) -> object:
    SEEN.append((operation, list(call.prefix_keys), call.request_id))
    return TROUBLE.strike(operation)


def _or_right(
    instead: object, right: Callable[..., object], *arguments: object, **named: object
) -> object:
    return right(*arguments, **named) if instead is None else instead


class UnrulyStorage(StorageLayer):
    """A storage that does not keep the contract: it raises where it must not, and answers what
    nobody asked."""

    def __init__(self, identity: StorageIdentity, config: SampleConfig) -> None:
        super().__init__(SampleStorage(identity, config))

    def on_host_pools_registered(self):
        TROUBLE.strike("registered")

    def batch_present(self, *asked, **named):
        return _or_right(TROUBLE.strike("exists"), super().batch_present, *asked, **named)

    def batch_exists_v2(self, *asked, **named):
        return _or_right(TROUBLE.strike("exists"), super().batch_exists_v2, *asked, **named)

    def batch_get_v2(self, *asked, **named):
        return _or_right(TROUBLE.strike("get"), super().batch_get_v2, *asked, **named)

    def batch_set_v2(self, *asked, **named):
        return _or_right(TROUBLE.strike("set"), super().batch_set_v2, *asked, **named)


_SPECS = [
    DriverSpec(
        name=name,
        target=f"{__name__}:{storage.__name__}",
        config=f"{__name__}:{SampleConfig.__name__}",
        capabilities=CAPABILITIES,
    )
    for name, storage in (("sample", SampleStorage), ("unruly", UnrulyStorage))
]


@contextlib.contextmanager
def installed() -> Generator[Trouble]:
    """The drivers count as installed until the end of a block, where what they have done is forgotten."""
    registry = plugins.registry()
    for spec in _SPECS:
        registry.add(spec, owner="tests")
    try:
        yield TROUBLE
    finally:
        TROUBLE.clear()
        STORES.clear()
        SEEN.clear()
        for spec in _SPECS:
            del registry.drivers[spec.name], registry.owners[spec.name]
