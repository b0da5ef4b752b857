"""Pools as one: atomic allocation in a fixed order, and derived slots."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.hybrid import HybridIndices, SingleRank
from hicache_storage.hybrid.pools import PoolTier
from hicache_storage.pools import SlotAllocator
from hicache_storage.spec import InvalidTransferError, PoolName, SlotError
from tests.hybrid.stack import PAGE

SIZES = {"kv": (32, 4), "mamba": (3, 1), "swa": (8, 2)}


@pytest.fixture
def tier():
    return PoolTier({PoolName(name): SlotAllocator(*SIZES[name]) for name in SIZES})


def free(tier):
    return list(tier.available(SIZES).values())


def make_room(tier, **needs):
    return tier.make_room(needs, SingleRank())[0]


def test_all_or_none_is_taken(tier):
    with pytest.raises(SlotError, match="multiple of 2"):
        tier.alloc({"kv": 4, "mamba": 1, "swa": 3})
    assert tier.alloc({"kv": 4, "mamba": 1, "swa": 10}) is None
    assert free(tier) == [32, 3, 8]
    taken = tier.alloc({"kv": 8, "mamba": 3, "swa": 0})
    assert {name: slots.numel() for name, slots in taken.items()} == {"kv": 8, "mamba": 3, "swa": 0}
    assert all(slots.dtype == torch.int64 for slots in taken.values())
    assert free(tier) == [24, 0, 8]


def test_an_error_of_one_pool_does_not_keep_the_others(tier):
    taken = tier.alloc({"kv": 4, "mamba": 1, "swa": 2})
    with pytest.raises(SlotError):
        tier.free({**taken, "mamba": torch.tensor([2])})
    assert free(tier) == [32, 2, 8]


def test_room_is_made_once_by_what_is_missing(tier):
    held = tier.alloc({"kv": 24, "mamba": 3, "swa": 0})
    asked = []

    def evict(name, slots):
        asked.append((name, slots))
        tier.free({name: held[name][:slots]})

    tier.on_shortage(PoolName("kv"), lambda slots: evict("kv", slots))
    tier.on_shortage(PoolName("mamba"), lambda slots: evict("mamba", slots))
    assert make_room(tier, kv=16, mamba=1, swa=2)
    assert asked == [("kv", 8), ("mamba", 1)]
    assert not make_room(tier, swa=10)
    assert free(tier) == [16, 1, 8]


def test_nobody_evicts_where_one_pool_cannot(tier):
    tier.alloc({"kv": 32, "mamba": 3})
    asked = []
    tier.on_shortage(PoolName("kv"), asked.append)
    assert not make_room(tier, kv=4, mamba=1)
    assert asked == []


def test_an_eviction_that_fails_leaves_what_is_free(tier, caplog):
    def fail(slots):
        raise RuntimeError("bug")

    tier.alloc({"kv": 32})
    tier.on_shortage(PoolName("kv"), fail)
    assert not make_room(tier, kv=4)
    assert "eviction failed" in caplog.text


# Groups
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (HybridIndices(torch.arange(PAGE + 1)), "indices must be whole pages"),
        (HybridIndices(torch.arange(1, PAGE + 1)), "indices must be whole pages"),
        (HybridIndices(torch.tensor([0, 1, 3, 2])), "indices must be whole pages"),
        (HybridIndices(torch.arange(2 * PAGE), torch.arange(1), (3,)), "endpoint at page 3 of 2"),
    ],
)
def test_spans_that_do_not_fit_are_refused(stack, span, message):
    with pytest.raises(InvalidTransferError, match=message):
        stack.group.check(span)


def test_states_of_a_model_without_them_are_refused(make_stack):
    with pytest.raises(InvalidTransferError, match="no pool of them"):
        make_stack(states=0).group.check(HybridIndices(states=torch.arange(1), endpoints=(0,)))


# Spans
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "states", "ends", "message"),
    [
        (torch.arange(4, dtype=torch.int32), 0, (), "kv: slots must be one row of int64"),
        (torch.zeros(2, 2).long(), 0, (), "kv: slots must be one row of int64"),
        (torch.arange(4), 1, (), "1 states do not fit the endpoints"),
        (torch.arange(4), 0, (1,), "0 states do not fit the endpoints"),
        (torch.arange(4), 2, (2, 1), "do not fit the endpoints"),
        (torch.arange(4), 1, (-1,), "do not fit the endpoints"),
    ],
)
def test_spans_that_contradict_themselves_are_refused(kv, states, ends, message):
    with pytest.raises(InvalidTransferError, match=message):
        HybridIndices(kv, torch.arange(states), ends)
