"""Fixtures shared by the unit tests."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from hicache_storage.spec import StorageIdentity
from hicache_storage.testing import BytePool, MemoryStorage

if TYPE_CHECKING:
    from collections.abc import Callable

# A machine that is busy with something else is no fault of what is tested.
settings.register_profile(
    "unhurried",
    parent=settings(),
    deadline=None,
    suppress_health_check={*settings().suppress_health_check, HealthCheck.too_slow},
)
settings.load_profile("unhurried")


def make_identity(**changes: object) -> StorageIdentity:
    fields = {"model": "m", "kv_dtype": "bfloat16", "page_size": 2, "layout": "page_first"}
    return StorageIdentity(**{**fields, **changes})


@dataclass
class Kit:
    """Makers of identities, pools and storages."""

    identity: Callable[..., StorageIdentity] = make_identity
    pool: type[BytePool] = BytePool
    storage: type[MemoryStorage] = MemoryStorage
    opened: list[MemoryStorage] = field(default_factory=list)

    def memory_storage(
        self, pools: dict[str, BytePool] | None = None, **options: object
    ) -> tuple[MemoryStorage, BytePool]:
        """Make a storage in memory with its pools registered; return it and the KV pool."""
        pools = pools or {"kv": BytePool()}
        storage = MemoryStorage(options.pop("identity", None) or make_identity(), **options)
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
    "metadata_server/test_dashboard.py",
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
"""Files that take long, roughly the longest first: where files are shared out, one that is begun
last is waited for by all."""


def pytest_collection_modifyitems(items):
    turns = {Path(__file__).parent / name: turn for turn, name in enumerate(SLOW)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


@pytest.fixture(autouse=True)
def logs_as_before():
    """A test that configures logs does so for itself: what the next ones log would be kept in
    memory by pytest."""
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
