"""`ObjectStorage` beside the suite: ranks that do not write, counters that cost nothing, logs."""

from __future__ import annotations

import logging
import sys

from hicache_storage.objects import recorder
from hicache_storage.spec import Capabilities, HiCacheStorageExtraInfo, PoolStats
from tests.objects.storing import stored
from tests.support.failing import kept_calls


def test_a_rank_that_does_not_write_asks_what_is_there(kit, monkeypatch):
    """Also a driver that leaves out by itself what exists; tests/backends/hf3fs has one."""
    monkeypatch.setattr(kit.storage, "writes_find_existing", True)
    storage, pool = kit.memory_storage(
        identity=kit.identity(kv_replicated=True, tp_rank=1, tp_size=2)
    )
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
    assert storage.operations == ["connect", "exist"]


def test_a_registered_pool_tells_its_namespace_and_is_counted_from_0(kit, caplog):
    with caplog.at_level(logging.INFO):
        storage, _ = kit.memory_storage()
    # Prometheus sees no growth in a series that begins with a value.
    assert storage.get_stats().pools == {"kv": PoolStats()}
    [line] = [
        record.getMessage() for record in caplog.records if "namespace" in record.getMessage()
    ]
    assert line.endswith(storage.pools["kv"].namespace.name)
    assert f"pool kv of model {storage.identity.model!r}" in line


def test_a_call_is_counted_once_however_many_pages_it_has(kit):
    def counted(pages):
        storage, pool = kit.memory_storage()
        keys, entered = [f"key {page}" for page in range(pages)], []

        def note(frame, event, argument):
            if event == "call" and frame.f_code.co_filename == recorder.__file__:
                entered.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            stored(storage, pool, keys, range(pages))
            storage.batch_exists_v2(keys)
            storage.batch_get_v2([pool.transfer("kv", keys, range(pages))])
        finally:
            sys.setprofile(None)
        return entered

    assert counted(4) == counted(1) != []


def test_pages_over_the_limit_are_refused(kit):
    storage, pool = kit.memory_storage(capabilities=Capabilities(max_page_bytes=10))
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
    assert storage.get_stats().pools["kv"].pages_refused == 1


def test_the_deadline_reaches_the_driver(kit):
    storage, _pool = kit.memory_storage()
    seen = kept_calls(storage, "objects_exist")
    storage.batch_exists_v2(
        ["a"],
        extra_info=HiCacheStorageExtraInfo(
            deadline_seconds=60.0, prefix_keys=["p"], request_id="r"
        ),
    )
    storage.batch_exists_v2(["a"])
    assert (seen[0].expired(), seen[0].prefix_keys, seen[0].request_id) == (False, ["p"], "r")
    assert 0.0 < seen[0].remaining() <= 60.0
    assert (seen[1].expired(), seen[1].remaining()) == (False, None)
