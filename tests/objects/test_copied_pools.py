"""Engines' pools that only copy pages: what a missing page costs, and what becomes of a pool that
raises."""

from __future__ import annotations

import logging

import pytest
import torch

from hicache_storage.pools.engine import StagedPages
from hicache_storage.spec import PoolTransfer
from tests.pools.foreign import AddressPool, FlatPool, P

CUDA_ERROR = "CUDA error: an illegal memory access was encountered"


def transfer(name, keys, pages):
    slots = [page * P + offset for page in pages for offset in range(P)]
    return PoolTransfer(name, torch.tensor(slots), keys=keys)


@pytest.fixture
def both(kit):
    """A storage with a pool that copies, and one that lends its memory beside it."""
    flat, lending = FlatPool(), AddressPool()
    storage, _ = kit.memory_storage(
        {"kv": flat, "mamba": lending},
        identity=kit.identity(page_size=P, layout="layer_first", kv_dtype="float32"),
    )
    flat.kv_buffer.copy_(torch.arange(flat.kv_buffer.numel()).view_as(flat.kv_buffer))
    assert storage.batch_set_v2(
        [transfer("kv", ["a", "b"], [0, 1]), transfer("mamba", ["a"], [0])]
    ) == {
        "kv": [True, True],
        "mamba": [True],
    }
    return storage, flat, lending


def broken(*_arguments, **_options):
    raise RuntimeError(CUDA_ERROR)


def test_a_page_that_is_missing_takes_no_memory(both, monkeypatch):
    """GET-6: a buffer was mapped for each page of a call before anybody knew whether it was there,
    10 s for 70,000."""
    storage, flat, _lending = both
    asked, targets = [], StagedPages.targets
    monkeypatch.setattr(
        StagedPages, "targets", lambda access, slots: asked.extend(slots) or targets(access, slots)
    )
    page = flat.get_data_page(P).clone()
    keys = ["none", "b", "nowhere", "a", "nothing"]
    assert storage.batch_get_v2([transfer("kv", keys, [1, 2, 3, 4, 5])]) == {
        "kv": [False, True, False, True, False]
    }
    assert len(asked) == 2
    assert torch.equal(flat.get_data_page(2 * P), page)


@pytest.mark.parametrize("pool", ["kv", "mamba"])
def test_a_pool_that_raises_while_pages_are_read_is_a_miss(both, monkeypatch, caplog, pool):
    """FT-1: an engine's pool is not ours either, and a bare `RuntimeError` must not reach the
    engine's thread."""
    storage, flat, lending = both
    asked = [transfer("kv", ["a"], [4]), transfer("mamba", ["a"], [4])]
    with caplog.at_level(logging.INFO):
        with monkeypatch.context() as patched:
            patched.setattr(
                flat if pool == "kv" else lending,
                "set_from_flat_data_page" if pool == "kv" else "get_page_buffer_meta",
                broken,
                raising=False,
            )
            for _ in range(2):
                assert storage.batch_get_v2(asked) == {
                    "kv": [pool != "kv"],
                    "mamba": [pool != "mamba"],
                }
        stats = storage.get_stats()
        assert (stats.faults, stats.pools[pool].pages_missed, stats.pools[pool].pages_read) == (
            2,
            2,
            0,
        )
        assert caplog.text.count(f"answering misses: {CUDA_ERROR}") == 1
        assert storage.batch_get_v2(asked) == {"kv": [True], "mamba": [True]}
        assert caplog.text.count("serving again") == 1
