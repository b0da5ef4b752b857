"""Stacks built from a config: bytes go through all tiers, storages come and go, and nothing is left
at the end."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from itertools import product

import pytest
import torch

from hicache_storage.hybrid import ParallelConfig, StorageAttachedError
from hicache_storage.spec import ConfigError, InvalidPoolError, PoolName
from hicache_storage.testing import MemoryStorage
from hicache_storage.transfer import StreamSimulator
from tests.hybrid.stack import GRID, LATENT, PAGE, Session, build, dsa_config, mamba_config
from tests.hybrid.storages import is_closed
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow(seconds=25)

CONFIGS = {
    "mamba": mamba_config,
    "mamba-mla": lambda **changes: mamba_config(attention=LATENT, **changes),
    "dsa": dsa_config,
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(threading.enumerate())
    yield
    # One that has been told to end may need a moment for it.
    eventually(lambda: set(threading.enumerate()) <= before)


def in_dict(config, objects=None):
    return MemoryStorage(config.identity("m"), objects)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        *product(CONFIGS.values(), ["layer_first", "page_first", "page_first_direct"]),
        # States have no heads, and come along in another layout.
        (mamba_config, "page_head"),
    ],
)
def test_bytes_come_back_from_every_tier(config, layout):
    settings = config(layout=layout)
    with closing(StreamSimulator(7)) as simulator:
        streams = simulator, simulator.stream("compute")
        with build(settings, storage=in_dict(settings), streams=streams) as stack:
            assert stack.host_pools[PoolName.KV].layout == layout
            session = Session(stack)
            session.insert()
            assert stack.drain(60)
            assert session.restore() == (Session.LENGTH, 0)
            stack.cache.evict(10**6, 10**6)
            assert session.restore() == (Session.LENGTH, Session.LENGTH)
            assert stack.drain(60)
            stack.cache.reset()
            assert session.restore() == (0, 0)
            session.fetch()
            assert session.restore() == (Session.LENGTH, Session.LENGTH)
            assert stack.drain(60)
        assert not simulator.races


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bytes_come_back_to_a_gpu(config):
    settings = config(device="cuda")
    with build(settings, storage=in_dict(settings)) as stack:
        Session(stack).comes_back()


def test_what_is_kept_goes_to_a_storage_that_comes_later(config):
    settings, objects = config(), {}
    with build(settings) as stack:
        session = Session(stack)
        session.insert()
        assert stack.drain(60)
        assert not stack.controller.attached
        storage = in_dict(settings, objects)
        stack.attach(storage)
        with pytest.raises(StorageAttachedError):
            stack.attach(in_dict(settings))
        session.restore()
        assert stack.drain(60)
        states = Session.LENGTH // GRID if settings.checkpoint_grid else 0
        side = states if settings.checkpoint_grid else Session.LENGTH // PAGE
        assert len(objects) == Session.LENGTH // PAGE + side
        stack.detach()
        assert is_closed(storage)
        assert not stack.controller.attached
        stack.detach()
        assert session.restore() == (Session.LENGTH, 0)
        again = {}
        stack.attach(in_dict(settings, again))
        session.restore()
        assert stack.drain(60)
        assert again.keys() == objects.keys()


def test_what_a_prefetch_has_brought_outlives_its_storage(config):
    settings, objects = config(), {}
    with build(settings, storage=in_dict(settings, objects)) as first:
        Session(first).insert()
        assert first.drain(60)
    with build(settings, storage=in_dict(settings, objects)) as stack:
        session = Session(stack)
        assert stack.cache.prefetch_from_storage("session", session.tokens)
        eventually(lambda: stack.cache.poll() or stack.cache.idle())
        stack.detach()
        assert session.restore() == (Session.LENGTH, Session.LENGTH)
        assert stack.drain(60)


def test_close_ends_the_threads_and_the_storage_once(config):
    settings = config()
    storage = in_dict(settings)
    stack = build(settings, storage=storage)
    Session(stack).insert()
    stack.cache.poll()
    stack.close()
    assert storage.operations.count("disconnect") == 1
    assert is_closed(storage)
    stack.close()
    assert storage.operations.count("disconnect") == 1


def test_close_waits_for_copies_that_run(config):
    """Nothing else lets the copy go on, and close does not come back before it is over."""
    with closing(StreamSimulator()) as simulator:
        stack = build(config(), streams=(simulator, simulator.stream("compute")))
        simulator.is_held = True
        Session(stack).insert()
        stack.cache.poll()
        host = stack.host_pools[PoolName.KV].buffers[0]
        assert not host.any()
        stack.close()
        assert host.any()


def test_drain_waits_for_a_backup_that_was_running_at_a_reset(config, gate):
    """It still reads host memory, which nobody can take meanwhile."""
    settings, writes = config(), gate("write")
    storage = in_dict(settings)
    storage.before = writes
    with build(settings, storage=storage) as stack:
        Session(stack).insert()
        eventually(lambda: stack.cache.poll() or writes.holds)
        stack.cache.reset()
        assert not stack.cache.idle()
        assert not stack.drain(0.05)
        writes.open()
        assert stack.drain(60)
        slots = stack.controller.group.entries[PoolName.KV].host_slots
        assert slots.available_size() == stack.host_pools[PoolName.KV].size


FAULTY = {
    "memory": ({"device_tokens": 1 << 50}, "cannot allocate"),
    "device": (
        {"device": "cuda:1"},
        "device is 'cuda:1', and CUDA is not available here; pass 'cpu'",
    ),
    "no group": (
        {"parallel": ParallelConfig(tp_rank=0, tp_size=2)},
        "parallel has 2 ranks .* torch.distributed is not initialized",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_build_that_fails_leaves_nothing(config, monkeypatch, fault):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fields, message = FAULTY[fault]
    with pytest.raises((ConfigError, InvalidPoolError), match=message):
        build(config(**fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [("page_size", 8), ("layout", "layer_first"), ("kv_replicated", None), ("tp_size", 2)],
)
def test_a_storage_of_other_bytes_is_refused(config, field, value):
    settings = config()
    own = settings.identity("m")
    value = not own.kv_replicated if value is None else value
    storage = MemoryStorage(replace(own, **{field: value}))
    with build(settings) as stack:
        with pytest.raises(ConfigError, match=f"the storage's identity has {field}="):
            stack.attach(storage)
        assert storage.operations == []


def test_a_prefetch_that_is_over_keeps_nothing_waiting(config):
    """Its request has not asked for it, and may never."""
    settings, objects = config(), {}
    with build(settings, storage=in_dict(settings, objects)) as stack:
        session = Session(stack)
        session.insert()
        assert stack.drain(60)
        stack.cache.reset()
        assert stack.cache.prefetch_from_storage("nobody asks", session.tokens)
        assert not stack.cache.idle()
        assert stack.drain(60)
        assert stack.cache.idle()
        assert stack.cache.end_prefetch("nobody asks") == Session.LENGTH
