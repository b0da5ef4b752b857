"""A Mooncake storage with a host pool, and pages whose bytes identify key and version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hicache_backends.mooncake.config import MooncakeConfig
from hicache_backends.mooncake.driver import MooncakeStorage
from hicache_backends.mooncake.memory import BLOCK_BYTES
from hicache_backends.mooncake.names import object_name
from hicache_backends.mooncake.reader import PageReader
from hicache_backends.posix.buffers import Buffers
from hicache_storage.layers import StorageOptions
from hicache_storage.layers.stack import wrap
from hicache_storage.spec import HungReads
from tests.backends.file.harness import COMPONENTS, identity
from tests.backends.file.harness import Rig as FileRig


class DirectStorage(MooncakeStorage):
    """Reads by name and straight to host memory, as over RDMA."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._capabilities = replace(self._capabilities, hung_reads=HungReads.WAIT)

    def connect(self):
        super().connect()
        self._reader = PageReader(
            Buffers(BLOCK_BYTES), self._thread_pools[0], self.handle, direct=True
        )


class Rig(FileRig):
    """A storage driven by keys and versions instead of slots and buffers.

    Args:
        direct: read as over RDMA.
        deadline: of each call, kept by the SDK's layer; None for the bare driver.
    """

    UNTOUCHED = 0xEE

    def __init__(
        self,
        options,
        *,
        pages=64,
        components=COMPONENTS,
        who=None,
        deadline=None,
        direct=False,
        **more,
    ):
        self.driver = storage = (DirectStorage if direct else MooncakeStorage)(
            who or identity(), MooncakeConfig(**{**options, **more})
        )
        if deadline is not None:
            settings = StorageOptions(deadline_seconds=deadline, breaker_threshold=0)
            storage = wrap(self.driver, settings)
        super().__init__(Path(), storage=storage, pages=pages, components=components)

    def name(self, key):
        return object_name(self.driver.pools["kv"].namespace, key)

    @property
    def connection(self):
        """The connection that calls use at present."""
        with self.driver.handle as connection:
            return connection
