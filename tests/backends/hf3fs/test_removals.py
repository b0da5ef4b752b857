"""Removals: what others have removed, and what is asked again."""

from __future__ import annotations

import pytest
from msgspec import structs

from hicache_metadata_server.client.errors import MetadataError
from hicache_storage.objects import Call, LookupBatch, this_process
from hicache_storage.spec import RemovalReason
from hicache_storage.testing import BytePool
from tests.backends.hf3fs.harness import recycle

pytestmark = pytest.mark.slow(seconds=10)

REASON = RemovalReason
KEYS = ["", "~", "~tilde", "plain"]
"""Some of which have other names on the server."""


class Listener:
    """Collects what has been removed, by pool, since the last call."""

    def __init__(self, storage):
        self.storage = storage
        self.cursor = storage.removals().cursor

    def removed(self, *, lost=False):
        answer = self.storage.removals(self.cursor)
        assert answer.lost == lost
        self.cursor = answer.cursor
        return answer.removed


def test_evictions_name_the_process_that_needed_room(rig):
    one, other = rig(file_size="64KiB"), rig(file_size="64KiB")
    assert all(one.put(["first"]))
    listener = Listener(one.storage)
    recycle(other, ["first"])
    gone = listener.removed()
    assert gone[0].key == "first"
    expected = ("kv", REASON.EVICTED, this_process())
    assert {(page.pool, page.reason, page.by) for page in gone} == {expected}
    assert min(page.seconds for page in gone) > 1e9
    assert max(one.slot(page.key) for page in gone) < 0


def test_what_a_failed_call_has_read_comes_with_the_next(rig, monkeypatch):
    """Scopes are asked for one by one, and the second request fails."""
    one = rig()
    one.storage.register_mem_host_pool_v2(BytePool(), "mamba")
    assert all(one.put(["a", "b"]))
    listener, metadata = Listener(one.storage), one.store.metadata
    send, about, sent, failing = metadata.send, metadata.about, [], {2}
    limits = structs.replace(about.limits, scopes=1)
    monkeypatch.setattr(
        type(metadata), "about", property(lambda self: structs.replace(about, limits=limits))
    )

    def sending(path, *arguments):
        sent.append(path)
        if path == "/v2/removals" and sent.count(path) in failing:
            raise MetadataError("the network is gone")
        return send(path, *arguments)

    monkeypatch.setattr(metadata, "send", sending)
    assert one.storage.delete(["a"]) == [True]
    assert listener.removed() == []
    assert one.storage.get_stats().faults == 1
    assert one.storage.delete(["b"]) == [True]
    assert [page.key for page in listener.removed()] == ["a", "b"]
    assert sent.count("/v2/removals") == 4


def recalled(rig, keys):
    namespace = rig.storage.pools["kv"].namespace
    found = rig.storage.recall_removals([LookupBatch(namespace, keys)], Call(5))
    assert {page.namespace for page in found} <= {namespace.name}
    return [(page.key, page.reason) for page in found]


def test_the_store_remembers_removals_of_before(rig):
    one = rig()
    assert all(one.put(KEYS))
    assert all(one.storage.delete(KEYS[:2]))
    assert all(one.put(KEYS[:1]))
    one.storage.clear()
    late = rig()
    late.storage.open()
    expected = [("", REASON.DELETED), ("", REASON.CLEARED)]
    assert recalled(late, ["", "none"]) == expected
    assert recalled(late, ["plain"]) == [("plain", REASON.CLEARED)]
