"""A 3FS storage with a host pool, and pages whose bytes identify key and version."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch

from hicache_backends.hf3fs.config import Hf3fsConfig
from hicache_backends.hf3fs.driver import Hf3fsStorage
from hicache_storage.spec import HiCacheStorageExtraInfo, PoolTransfer
from tests.backends.file.harness import COMPONENTS, ScratchPool, chain, content, identity
from tests.support.waiting import eventually

__all__ = ["Rig", "chain", "content", "interrupted", "recycle"]


class Rig:
    """A storage driven by keys and versions instead of slots and buffers."""

    def __init__(self, path, *, pages=64, components=COMPONENTS, who=None, **options):
        self.pool = ScratchPool(pages, components)
        self.storage = Hf3fsStorage(who or identity(), Hf3fsConfig(path=str(path), **options))
        self.storage.register_mem_host_pool_v2(self.pool, "kv")
        self.page_bytes = self.pool.geometry.page_bytes

    @property
    def store(self):
        self.storage.open()
        return self.storage.store

    @property
    def scope(self):
        return self.store.scopes([self.storage.pools["kv"].namespace])[0]

    def put(self, keys, *, version=0, prefix=(), seconds=None):
        for number, key in enumerate(keys):
            self.pool.page(number)[:] = content(key, version, self.page_bytes)
        return self.storage.batch_set_v2([self.transfer(keys)], self._info(prefix, seconds))["kv"]

    def get(self, keys, *, seconds=None):
        """Each page's bytes, None where it was not delivered."""
        self.pool.memory[:] = bytes(len(self.pool.memory))
        answer = self.storage.batch_get_v2([self.transfer(keys)], self._info((), seconds))["kv"]
        return [bytes(self.pool.page(number)) if ok else None for number, ok in enumerate(answer)]

    def expect(self, keys, versions=None, version=0):
        """All pages are there with the bytes of that version."""
        wanted = [content(key, version, self.page_bytes) for key in keys]
        assert self.get(keys) == wanted

    def hits(self, keys, *, seconds=None):
        return self.storage.batch_exists_v2(keys, None, self._info((), seconds)).kv_hit_pages

    def overwrite(self, slot, data, at=0):
        """Other bytes in a slot, below the driver."""
        with open(self.scope.file.path, "r+b") as file:
            file.seek(self.scope.file.offset(slot) + at)
            file.write(data)

    def slot(self, key):
        from hicache_metadata_server.protocol import LookupScope
        from hicache_storage.objects import Call

        found = self.store.metadata.lookup(
            [LookupScope(scope=self.scope.name, keys=[key])], Call(5), touch=False
        )
        return found.scopes[0].slots[0]

    def transfer(self, keys):
        return PoolTransfer(
            "kv", keys=list(keys), host_indices=torch.arange(len(keys) * 4, dtype=torch.int64)
        )

    def _info(self, prefix, seconds):
        return HiCacheStorageExtraInfo(prefix_keys=list(prefix), deadline_seconds=seconds)


def recycle(writer, keys):
    """Let a writer take every slot that some pages have, and write other pages into all of them."""
    taken = {writer.slot(key) for key in keys}

    def all_are_taken():
        others = chain(f"other-{os.urandom(4).hex()}", 8)
        writer.put(others)
        taken.difference_update([writer.slot(key) for key in others])
        return not taken

    eventually(all_are_taken)
    assert all(writer.slot(key) < 0 for key in keys)


@contextmanager
def interrupted(thing, name, act, *, times=1, after=0, late=False):
    """Let something else happen just before a call is done, some times, once some calls have
    passed.

    Args:
        late: just after it is done.
    """
    real, calls = getattr(thing, name), []

    def stand_in(*arguments, **named):
        calls.append(1)
        acts = after < len(calls) <= after + times
        if acts and not late:
            act()
        answer = real(*arguments, **named)
        if acts and late:
            act()
        return answer

    setattr(thing, name, stand_in)
    try:
        yield calls
    finally:
        setattr(thing, name, real)
