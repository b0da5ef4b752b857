"""Stand-ins shared by the unit tests: a host pool in a bytearray, and a driver in a dict."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

from hicache_storage.objects import Call, LookupBatch, Namespace, ObjectStorage, ReadBatch, WriteBatch
from hicache_storage.spec import Capabilities, Durability, PageGeometry, PoolTransfer, Sharing, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A machine that is busy with something else is no fault of what is tested.
settings.register_profile(
    "unhurried", parent=settings(), deadline=None, suppress_health_check={*settings().suppress_health_check, HealthCheck.too_slow}
)
settings.load_profile("unhurried")


class BytesPool:
    """A host pool in one bytearray; its pages are components one after the other."""

    def __init__(self, *, pages: int = 8, page_size: int = 2, components: Sequence[int] = (24, 40), layout: str = "page_first"):
        self.geometry = PageGeometry(layout, "uint8", page_size, pages * page_size, tuple(components))
        self.memory = bytearray(pages * self.geometry.page_bytes)

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        view, pages = memoryview(self.memory), []
        for slot in first_slots:
            start = slot // self.geometry.page_size * self.geometry.page_bytes
            buffers = []
            for length in self.geometry.component_bytes:
                buffers.append(view[start : start + length])
                start += length
            pages.append(buffers)
        return pages

    def page(self, index: int) -> bytes:
        size = self.geometry.page_bytes
        return bytes(self.memory[index * size : (index + 1) * size])

    def fill(self, index: int, seed: int) -> bytes:
        """Give a page bytes that tell it from every other."""
        size = self.geometry.page_bytes
        page = bytes((seed * 31 + offset) % 256 for offset in range(size))
        self.memory[index * size : (index + 1) * size] = page
        return page

    def transfer(self, name: str, keys: Sequence[str], pages: Sequence[int], **fields: object) -> PoolTransfer:
        size = self.geometry.page_size
        slots = [page * size + offset for page in pages for offset in range(size)]
        return PoolTransfer(name, torch.tensor(slots, dtype=torch.int64), keys=list(keys), **fields)


class DictStorage(ObjectStorage):
    """A driver in a dict, with places to break it."""

    def __init__(self, identity: StorageIdentity, objects: dict[str, bytes] | None = None, **options: object):
        capabilities = Capabilities(
            sharing=Sharing.PROCESS, durability=Durability.REOPEN, deletes=True, clears=True, may_hang=False
        )
        super().__init__(identity, **{"driver_name": "dict", "capabilities": capabilities, **options})
        self.objects = {} if objects is None else objects
        self.asked: list[str] = []
        self.before: Callable[[str], None] = lambda operation: None

    def _note(self, operation: str) -> None:
        self.asked.append(operation)
        self.before(operation)

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        self._note("exist")
        return [[batch.namespace.object_name(key) in self.objects for key in batch.keys] for batch in batches]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        self._note("read")
        return [[r.fill(self.objects.get(r.namespace.object_name(r.key))) for r in batch.reads] for batch in batches]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        self._note("write")
        for batch in batches:
            self.objects.update({w.namespace.object_name(w.key): w.tobytes() for w in batch.writes})
        return [[True] * len(batch.writes) for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        self._note("delete")
        return [[self.objects.pop(batch.namespace.object_name(key), None) is not None for key in batch.keys] for batch in batches]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        self._note("clear")
        names = tuple(namespace.name for namespace in namespaces)
        for name in [name for name in self.objects if name.startswith(names)]:
            del self.objects[name]

    def connect(self) -> None:
        self._note("connect")

    def disconnect(self) -> None:
        self._note("disconnect")


def make_identity(**changes: object) -> StorageIdentity:
    fields = {"model": "m", "kv_dtype": "bfloat16", "page_size": 2, "layout": "page_first"}
    return StorageIdentity(**{**fields, **changes})


@dataclass
class Kit:
    """What most tests need, in one place."""

    identity: Callable[..., StorageIdentity] = make_identity
    pool: type[BytesPool] = BytesPool
    storage: type[DictStorage] = DictStorage
    opened: list[ObjectStorage] = field(default_factory=list)

    def dict_storage(self, pools: dict[str, BytesPool] | None = None, **options: object) -> tuple[DictStorage, BytesPool]:
        """A dict storage with its KV pool registered, and that pool."""
        pools = pools or {"kv": BytesPool()}
        storage = DictStorage(options.pop("identity", None) or make_identity(), **options)
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool, name)
        self.opened.append(storage)
        return storage, pools["kv"]


SLOW = (
    "interop/test_server.py",
    "interop/test_server_layouts.py",
    "interop/test_server_hybrid.py",
    "interop/test_server_mla.py",
    "conformance/test_mutants.py",
    "metadata_server/test_page.py",
    "conformance/test_cli.py",
    "conformance/test_author_path.py",
    "backends/mooncake/test_outages.py",
    "conformance/metadata/test_faults.py",
    "hybrid/test_ranks.py",
    "cli/test_new_command.py",
    "backends/hf3fs/test_races.py",
    "conformance/test_interface_runs.py",
    "conformance/test_plugin.py",
    "backends/hf3fs/test_several_servers.py",
    "metadata_server/test_shared_servers.py",
    "metadata_server/test_real_server.py",
    "examples/test_multiturn.py",
    "examples/test_examples.py",
    "examples/test_tiny_hybrid_lm.py",
    "examples/test_two_nodes_mooncake.py",
    "backends/hf3fs/test_several_servers_conform.py",
    "backends/hf3fs/test_killed_server.py",
    "backends/hf3fs/test_driver.py",
    "backends/hf3fs/test_failover.py",
    "hybrid/radix/test_programs.py",
    "hybrid/test_stack.py",
    "conformance/test_repro.py",
    "tools/test_bench.py",
    "tools/test_doctor_examination.py",
    "packaging/test_distribution.py",
    "backends/file/test_processes.py",
    "metadata_server/test_fuzz.py",
    "metadata_server/test_tls.py",
)
"""Files that take long, roughly the longest first: where files are shared out, one that is begun last is waited for by all."""


def pytest_collection_modifyitems(items):
    turns = {Path(__file__).parent / name: turn for turn, name in enumerate(SLOW)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


@pytest.fixture(autouse=True)
def logs_as_before():
    """A test that configures logs does so for itself: what the next ones log would be kept in memory by pytest."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def kit():
    kit = Kit()
    yield kit
    for storage in kit.opened:
        storage.close()
