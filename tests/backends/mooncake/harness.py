"""A Mooncake storage with a host pool, and pages whose bytes identify key and version."""

from __future__ import annotations

import ctypes

import torch

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.config import MooncakeConfig
from hicache_backends.mooncake.driver import MooncakeStorage
from hicache_backends.mooncake.names import object_name
from hicache_storage.layers import StorageOptions
from hicache_storage.layers.stack import wrap
from hicache_storage.spec import HiCacheStorageExtraInfo, PoolTransfer
from tests.backends.file.harness import COMPONENTS, ScratchPool, chain, content, identity

__all__ = ["COMPONENTS", "Rig", "StrangersClient", "chain", "content", "identity"]

UNTOUCHED = 0xEE


class Rig:
    """A storage driven by keys and versions instead of slots and buffers.

    Args:
        deadline: of each call, kept by the SDK's layer; None for the bare driver.
    """

    def __init__(
        self,
        options,
        *,
        pages=64,
        components=COMPONENTS,
        dtype="bfloat16",
        who=None,
        deadline=None,
        **more,
    ):
        self.pool = ScratchPool(pages, components, dtype=dtype)
        self.driver = MooncakeStorage(who or identity(), MooncakeConfig(**{**options, **more}))
        self.storage = self.driver
        if deadline is not None:
            self.storage = wrap(
                self.driver, StorageOptions(deadline_seconds=deadline, breaker_threshold=0)
            )
        self.storage.register_mem_host_pool_v2(self.pool, "kv")
        self.page_bytes = self.pool.geometry.page_bytes

    def put(self, keys, *, version=0, seconds=None):
        for number, key in enumerate(keys):
            self.pool.page(number)[:] = content(key, version, self.page_bytes)
        return self.storage.batch_set_v2([self._transfer(keys)], self._info(seconds))["kv"]

    def get(self, keys, *, seconds=None):
        """Each page's bytes, None where it was not delivered."""
        self.pool.memory[:] = bytes([UNTOUCHED]) * len(self.pool.memory)
        answer = self.storage.batch_get_v2([self._transfer(keys)], self._info(seconds))["kv"]
        return [bytes(self.pool.page(number)) if ok else None for number, ok in enumerate(answer)]

    def expect(self, keys, version=0):
        """All pages are there with the bytes of that version."""
        for key, page in zip(keys, self.get(keys), strict=True):
            assert page == content(key, version, self.page_bytes), (
                f"{key} is {'a miss' if page is None else 'other bytes'}"
            )

    def hits(self, keys, *, seconds=None):
        return self.storage.batch_exists_v2(keys, None, self._info(seconds)).kv_hit_pages

    def name(self, key):
        return object_name(self.driver.pools["kv"].namespace, key)

    @property
    def connection(self):
        """The connection that calls use at present."""
        with self.driver.handle as connection:
            return connection

    @property
    def lent_buffers(self):
        """How many buffers gets have, also those that were left at their deadline."""
        return self.driver._reader._target._buffers._lent

    @property
    def unrevoked(self):
        """Names of objects that were begun, and could not be given up."""
        return self.connection._unrevoked

    @property
    def stats(self):
        return self.storage.get_stats().pools["kv"]

    def _transfer(self, keys):
        return PoolTransfer(
            "kv", keys=list(keys), host_indices=torch.arange(len(keys) * 4, dtype=torch.int64)
        )

    def _info(self, seconds):
        return HiCacheStorageExtraInfo(deadline_seconds=seconds)


class StrangersClient:
    """The library itself, for objects that no driver of ours would store."""

    def __init__(self, options, tenant="default"):
        self.store = library.new_store()
        code = self.store.setup(
            "127.0.0.1",
            "P2PHANDSHAKE",
            0,
            0,
            "tcp",
            "",
            options["master_server_address"],
            tenant_id=tenant,
        )
        assert code == 0

    def put(self, name, data):
        buffer = bytearray(data)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        codes = self.store.batch_put_from_multi_buffers(
            [name], [[address]], [[len(buffer)]], library.replicate_config(1)
        )
        assert codes == [0]

    def size(self, name):
        return self.store.get_size(name)

    def remove(self, name):
        return self.store.batch_remove([name], True)

    def close(self):
        self.store.close()
