"""Removals: what a failed call has read, and what is asked again."""

from __future__ import annotations

from msgspec import structs

from hicache_metadata_server.client.errors import MetadataError
from hicache_storage.objects import Call, LookupBatch, this_process
from hicache_storage.spec import RemovalReason
from hicache_storage.testing import BytePool

REASON = RemovalReason
KEYS = ["", "~", "~tilde", "plain"]
"""Some of which have other names on the server."""


def test_what_a_failed_call_has_read_comes_with_the_next(rig, monkeypatch):
    """Scopes are asked for one by one, and the second request fails."""
    one = rig()
    one.storage.register_mem_host_pool_v2(BytePool(), "mamba")
    assert all(one.put(["a", "b"]))
    cursor, metadata = one.storage.removals().cursor, one.store.metadata
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
    answer = one.storage.removals(cursor)
    assert (answer.removed, answer.lost) == ([], False)
    assert one.storage.get_stats().faults == 1
    assert one.storage.delete(["b"]) == [True]
    answer = one.storage.removals(answer.cursor)
    assert ([page.key for page in answer.removed], answer.lost) == (["a", "b"], False)
    assert sent.count("/v2/removals") == 4


def recalled(rig, keys):
    namespace = rig.storage.pools["kv"].namespace
    found = rig.storage.recall_removals([LookupBatch(namespace, keys)], Call(5))
    assert {page.namespace for page in found} <= {namespace.name}
    return [(page.key, page.reason, page.by) for page in found]


def test_the_store_remembers_removals_of_before(rig):
    one, me = rig(), this_process()
    assert all(one.put(KEYS))
    assert all(one.storage.delete(KEYS[:2]))
    assert all(one.put(KEYS[:1]))
    one.storage.clear()
    late = rig()
    late.storage.open()
    expected = [("", REASON.DELETED, me), ("", REASON.CLEARED, me)]
    assert recalled(late, ["", "none"]) == expected
    assert recalled(late, ["plain"]) == [("plain", REASON.CLEARED, me)]
