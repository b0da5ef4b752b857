"""A 3FS storage with a host pool, and pages whose bytes identify key and version."""

from __future__ import annotations

import os

from hicache_backends.hf3fs.config import Hf3fsConfig
from hicache_backends.hf3fs.driver import Hf3fsStorage
from hicache_metadata_server import protocol as p
from hicache_storage.objects import Call
from tests.backends.file.harness import COMPONENTS, chain, content, identity, interrupted
from tests.backends.file.harness import Rig as FileRig
from tests.support.waiting import eventually

__all__ = ["Rig", "ScopeClient", "chain", "content", "interrupted", "recycle"]

PATIENCE_SECONDS = 60.0
LEASE_SECONDS = 300.0
"""No test waits for its end."""


class Rig(FileRig):
    """A storage driven by keys and versions instead of slots and buffers."""

    def __init__(self, path, *, pages=64, components=COMPONENTS, who=None, **options):
        storage = Hf3fsStorage(who or identity(), Hf3fsConfig(path=str(path), **options))
        super().__init__(path, storage=storage, pages=pages, components=components)

    @property
    def file(self):
        return self.store.files([self.kv])[0]

    def overwrite(self, slot, data, at=0):
        """Other bytes in a slot, below the driver."""
        with open(self.file.path, "r+b") as file:
            file.seek(self.file.offset(slot) + at)
            file.write(data)

    def slot(self, key):
        asked = [p.LookupScope(scope=self.file.scope, keys=[key])]
        return self.store.metadata.lookup(asked, Call(5), touch=False)[0].slots[0]


class ScopeClient:
    """A metadata client, for one scope."""

    def __init__(self, metadata, scope="0:kv-test"):
        self.metadata = metadata
        self.scope = scope
        self.geometry = p.ScopeGeometry(scope=scope, slots=16, slot_bytes=8192)
        metadata.declare(self.geometry)

    def lookup(self, keys=("a",), seconds=PATIENCE_SECONDS):
        asked = [p.LookupScope(scope=self.scope, keys=list(keys))]
        return self.metadata.lookup(asked, Call(seconds))[0]

    def reserve(self, keys, seconds=PATIENCE_SECONDS):
        asked = [p.ReserveScope(scope=self.scope, keys=list(keys))]
        return self.metadata.reserve(asked, Call(seconds), lease_seconds=LEASE_SECONDS).scopes[0]

    def store(self, keys):
        leases = self.reserve(keys).leases
        ones = [1] * len(leases)
        part = p.CommitScope(scope=self.scope, leases=leases, lengths=ones, checksums=ones)
        assert self.metadata.commit([part], Call(PATIENCE_SECONDS)) == [[True] * len(leases)]

    def close(self):
        self.metadata.close()


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
