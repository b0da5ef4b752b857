"""Attaching, detaching, and what is refused on the way: cleanly, with a message that says what to
change."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.group import PoolEntry
from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment

from hicache_storage.plugins import create_storage
from hicache_storage.spec import (
    ConfigError,
    DriverNotFoundError,
    InvalidPoolError,
    StorageClosedError,
    StorageUnavailableError,
    UnsupportedOperationError,
)
from tests.interop.drivers import raise_os_error
from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens, with_mamba

pytestmark = pytest.mark.interop


PATIENCE_SECONDS = 60.0


def threads():
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def until_only(before):
    """Wait until there are no other threads; one that has been told to end may need a moment for
    it."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not threads() <= before:
        assert time.monotonic() < until, threads() - before
        time.sleep(0.01)


@pytest.fixture
def created(monkeypatch):
    """The storages that the bridge creates."""
    storages = []

    def create(*arguments, **options):
        storages.append(create_storage(*arguments, **options))
        return storages[-1]

    monkeypatch.setattr("hicache_storage.engines.bridge_storage.create_storage", create)
    return storages


@pytest.mark.parametrize(
    ("extra", "error", "match"),
    [
        ({"interface_v1": None}, ConfigError, r'set "interface_v1": 1'),
        ({"tennant": "x"}, ConfigError, r"unknown key 'tennant'.*did you mean 'tenant'"),
        ({"driver": "flie"}, DriverNotFoundError, r"no driver named 'flie'"),
        ({"driver": None}, ConfigError, r"driver"),
        (
            {"driver_config": {"stor": "x"}},
            ConfigError,
            r"unknown option 'stor'; did you mean 'store'",
        ),
        ({"model": None}, ConfigError, r"no model name"),
        (
            {"kv_dtype": "float16"},
            ConfigError,
            r"kv_dtype is 'float16', and the KV host pool holds 'bfloat16'",
        ),
    ],
    ids=lambda value: "" if isinstance(value, (type, str)) else next(iter(value)),
)
def test_a_configuration_that_cannot_be(ranks, trouble, created, extra, error, match):
    refused(ranks(mha_pools("page_first")), created, error, match, **extra)


@pytest.mark.parametrize(
    ("make_pools", "match"),
    [
        (
            lambda: mha_pools("page_first", dtype=torch.float8_e5m2),
            r"does not tell fp8_e4m3 from fp8_e5m2",
        ),
        (lambda: mha_pools("page_unified"), r"can neither lend its pages nor copy them"),
        (lambda: mla_pools("page_unified"), r"can neither lend its pages nor copy them"),
        (lambda: without_memory(mha_pools("page_first")), r"no memory of its own"),
    ],
    ids=["fp8", "layout-mha", "layout-mla", "gone"],
)
def test_a_kv_pool_that_cannot_be_served(ranks, trouble, created, make_pools, match):
    refused(ranks(make_pools()), created, InvalidPoolError, match, again=False)


def without_memory(pools):
    pools.kv.destroy()
    return pools


def refused(rank, created, error, match, *, again=True, driver="sample", **extra):
    """Attach where it must fail; nothing is left of it, and a right attach still works."""
    before = threads()
    with pytest.raises(error, match=match):
        rank.attach(driver, **extra)
    until_only(before)
    assert not rank.controller.enable_storage
    assert rank.controller.storage_backend is None
    for storage in created:
        with pytest.raises(StorageClosedError):
            storage.batch_exists_v2(["a"])
    if again:
        rank.attach("sample")
        assert rank.backup(tokens(2)).completed_tokens == 2 * PAGE_SIZE
    elif "fp8" not in match:
        assert created


def test_the_engines_own_keys_are_accepted(ranks, storage):
    """What SGLang's parser knows, whether it takes it out or leaves it in."""
    name, driver_config = storage
    text = (
        '{"backend_name": "hicache", "module_path": "hicache_storage.engines.sglang", '
        '"class_name": "SGLangBridge",'
        ' "interface_v1": 1, "prefetch_threshold": 64, "prefetch_timeout_base": 2, '
        '"prefetch_timeout_per_ki_token": 0.5,'
        ' "hicache_storage_pass_prefix_keys": true, "tenant": "t", "revision": "r", "salt": "s", '
        '"deadline_seconds": 5}'
    )
    parsed, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    unparsed = {
        "prefetch_threshold": 64,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_timeout_base": 2,
    }
    for config in (parsed, {**parsed, **unparsed}):
        rank = ranks(mha_pools("page_first"))
        rank.attach_config({**config, "driver": name, "driver_config": driver_config})
        identity = rank.bridge.storage.identity
        assert (identity.tenant, identity.revision, identity.salt) == ("t", "r", "s")


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
    rank.attach("sample", deadline_seconds=0.2)
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


def test_a_driver_that_cannot_clear_says_so(ranks, trouble):
    rank = ranks(mha_pools("page_first"))
    rank.attach("sealed")
    with pytest.raises(UnsupportedOperationError, match="clears"):
        rank.bridge.clear()


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


def test_a_controller_reset_keeps_the_storage(plain):
    backup = plain.backup(tokens(3))
    plain.wipe()
    plain.controller.reset()
    assert plain.restores(backup)


def test_side_pools_may_come_later(hybrid):
    """SGLang registers dynamic sidecars one by one, long after the attach."""
    draft = mha_pools("page_first")
    entry = PoolEntry(PoolName.DRAFT, draft.kv, draft.device, lambda layer: layer)
    hybrid.controller.register_host_pool_entry(entry)
    hybrid.pools.side["draft"] = draft.kv
    backup = hybrid.backup(tokens(4), checkpoints={"mamba": 1, "draft": 4})
    assert hybrid.restores(backup, mamba=1, draft=4)
