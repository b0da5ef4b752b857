"""Attaching, detaching, and what is refused on the way: cleanly, with a message that says what to
change."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.group import PoolEntry
from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment

from hicache_storage.plugins import create_storage
from hicache_storage.spec import (
    ConfigError,
    DriverNotFoundError,
    InvalidPoolError,
    StorageClosedError,
    StorageUnavailableError,
)
from tests.interop.drivers import raise_os_error
from tests.interop.engine import PAGE_SIZE, mha_pools, tokens, with_mamba
from tests.support.waiting import PATIENCE_SECONDS, eventually

pytestmark = pytest.mark.interop


def threads():
    return set(threading.enumerate())


def until_only(before):
    """Wait until there are no other threads; one that has been told to end may need a moment for
    it."""
    eventually(lambda: threads() <= before, "there are more threads than before")


@pytest.fixture
def created(monkeypatch):
    """The storages that the bridge creates."""
    storages = []

    def create(*arguments, **options):
        storages.append(create_storage(*arguments, **options))
        return storages[-1]

    monkeypatch.setattr("hicache_storage.engines.bridge_storage.create_storage", create)
    return storages


PLAIN = partial(mha_pools, "page_first")
REFUSED = {
    "interface": (PLAIN, {"interface_v1": None}, ConfigError, r'set "interface_v1": 1'),
    "key": (
        PLAIN,
        {"tennant": "x"},
        ConfigError,
        r"unknown option 'tennant'; did you mean 'tenant'",
    ),
    "driver": (PLAIN, {"driver": "flie"}, DriverNotFoundError, r"no driver named 'flie'"),
    "option": (PLAIN, {"driver_config": {"stor": "x"}}, ConfigError, r"did you mean 'store'"),
    "model": (PLAIN, {"model": None}, ConfigError, r"no model name"),
    "dtype": (PLAIN, {"kv_dtype": "float16"}, ConfigError, r"the KV host pool holds 'bfloat16'"),
    "fp8": (
        partial(PLAIN, dtype=torch.float8_e5m2),
        {},
        InvalidPoolError,
        r"does not tell fp8_e4m3 from fp8_e5m2",
    ),
    "layout": (
        partial(mha_pools, "page_unified"),
        {},
        InvalidPoolError,
        r"can neither lend its pages nor copy them",
    ),
    "memory": (lambda: without_memory(PLAIN()), {}, InvalidPoolError, r"no memory of its own"),
}
"""Pools, options, and the error that an attach ends with."""


def without_memory(pools):
    pools.kv.destroy()
    return pools


@pytest.mark.parametrize(("make_pools", "extra", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_of_an_attach_that_must_fail_nothing_is_left(
    ranks, trouble, created, make_pools, extra, error, match
):
    """And a right one still works."""
    rank, before = ranks(make_pools()), threads()
    with pytest.raises(error, match=match):
        rank.attach(**{"driver": "sample", **extra})
    until_only(before)
    assert not rank.controller.enable_storage
    assert rank.controller.storage_backend is None
    for storage in created:
        with pytest.raises(StorageClosedError):
            storage.batch_exists_v2(["a"])
    if error is not InvalidPoolError:
        rank.attach("sample")
        assert rank.backup(tokens(2)).completed_tokens == 2 * PAGE_SIZE


def test_detach_and_attach_again_leave_no_thread_behind(ranks, storage):
    rank = ranks(with_mamba(mha_pools("page_first")))
    before = threads()
    for _ in range(3):
        rank.attach(*storage)
        assert rank.restores(rank.backup(tokens(3), checkpoints={"mamba": 1}), mamba=1)
        rank.wipe()
        rank.detach()
        until_only(before)


@pytest.mark.parametrize("operation", ["exists", "set"])
def test_detach_while_the_store_hangs(ranks, trouble, operation):
    rank = ranks(mha_pools("page_first"))
    before = threads()
    rank.attach("sample", deadline_seconds=2.0)
    rank.backup(tokens(2))
    stuck, released, back = threading.Event(), threading.Event(), list[bool]()
    trouble.at(
        operation, answer=lambda _: stuck.set() or back.append(released.wait(2 * PATIENCE_SECONDS))
    )
    if operation == "set":
        hashes = rank.hashes(tokens(2, start=50))
        rank.controller.write_storage(
            rank.pools.kv.alloc(2 * PAGE_SIZE), tokens(2, start=50), hash_value=hashes
        )
    else:
        rank.controller.prefetch("request", tokens(2))
    assert stuck.wait(PATIENCE_SECONDS)
    rank.detach()
    assert not back
    released.set()
    # What hung is closed when it comes back, by the thread that it hung in.
    until_only(before)


def test_a_store_that_is_away_at_first_is_found_later(ranks, trouble, monkeypatch, caplog):
    monkeypatch.setattr("hicache_storage.objects.lifecycle.OPEN_RETRY_SECONDS", 0)
    trouble.at("connect", answer=raise_os_error)
    rank = ranks(mha_pools("page_first"))
    rank.attach("sample")
    assert "cannot be opened yet" in caplog.text
    assert rank.backup(tokens(2)).completed_tokens == 0
    trouble.clear()
    assert rank.restores(rank.backup(tokens(2, start=50)))


def test_after_a_clear_that_failed_nothing_is_served_until_one_has_happened(
    sample, trouble, caplog
):
    """SGLang answers its own caller with success all the same, and logs the error: its scheduler
    does not look at the answer (`clear_hicache_storage_wrapped`). What should be gone must be no
    hit."""
    sample.backup(tokens(2))
    bridge, keys = sample.bridge, sample.hashes(tokens(2))
    assert bridge.batch_exists(keys) == 2
    trouble.at("clear", answer=raise_os_error)
    with pytest.raises(StorageUnavailableError, match="Input/output error"):
        bridge.clear()
    assert "nothing is served until a clear has succeeded" in caplog.text
    assert bridge.batch_exists(keys) == 0
    assert bridge.refused_calls == 1
    engine = SimpleNamespace(cache_controller=SimpleNamespace(clear_storage_backend=bridge.clear))
    assert StorageAttachment(engine).clear() is False
    assert "Failed to clear" in caplog.text
    trouble.clear()
    bridge.clear()
    assert bridge.batch_exists(keys) == 0
    sample.backup(tokens(2))
    assert bridge.batch_exists(keys) == 2


def test_the_oldest_interface_is_refused(plain, caplog):
    plain.backup(tokens(2))
    bridge, key = plain.bridge, plain.hashes(tokens(2))[0]
    page = plain.pools.kv.get_dummy_flat_data_page()
    assert bridge.exists(key)
    assert not bridge.exists("nothing")
    assert bridge.get(key, page) is None
    assert bridge.batch_get([key, key], [page, page]) == [None, None]
    assert bridge.set("new", page) is False
    assert bridge.batch_set(["new"], [page]) is False
    assert not bridge.exists("new")
    assert bridge.refused_calls == 4
    assert "does not serve copies" in caplog.text


def test_sglangs_own_failure_injector_can_stand_between(ranks, storage):
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.0):
        rank = ranks(mha_pools("page_first"))
        rank.attach(*storage)
        assert type(rank.bridge).__name__ == "HiCacheStorageFailureInjector"
        assert rank.restores(rank.backup(tokens(3)))
        rank.detach()


def test_side_pools_may_come_later(hybrid):
    """SGLang registers dynamic sidecars one by one, long after the attach."""
    draft = mha_pools("page_first")
    entry = PoolEntry(PoolName.DRAFT, draft.kv, draft.device, lambda layer: layer)
    hybrid.controller.register_host_pool_entry(entry)
    hybrid.pools.side["draft"] = draft.kv
    backup = hybrid.backup(tokens(4), checkpoints={"mamba": 1, "draft": 4})
    assert hybrid.restores(backup, mamba=1, draft=4)
