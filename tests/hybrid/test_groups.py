"""Pools as one: atomic allocation in a fixed order, derived slots, and entries that do not fit each
other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.hybrid import HostPoolGroup, HybridIndices, PoolEntry, SingleRank
from hicache_storage.hybrid.pools import PoolTier
from hicache_storage.pools import SlotAllocator
from hicache_storage.spec import (
    InvalidPoolError,
    InvalidTransferError,
    PoolHitPolicy,
    PoolName,
    SlotError,
)
from hicache_storage.transfer import HostSlots
from tests.hybrid.stack import INDEXER, KV, MAMBA, PAGE

SIZES = {"kv": (32, 4), "mamba": (3, 1), "swa": (8, 2)}


class Recorded:
    """Slots that note who is asked, in which order."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls
        self.slots = SlotAllocator(*SIZES[name])

    def alloc(self, count):
        self.calls.append(("alloc", self.name, count))
        return self.slots.alloc(count)

    def free(self, indices):
        self.calls.append(("free", self.name, indices.numel()))
        return self.slots.free(indices)

    def available_size(self):
        return self.slots.available_size()


@pytest.fixture
def calls():
    return []


@pytest.fixture
def tier(calls):
    return PoolTier({PoolName(name): Recorded(name, calls) for name in ("swa", "kv", "mamba")})


def free(tier):
    return list(tier.available(SIZES).values())


def make_room(tier, **needs):
    return tier.make_room(needs, SingleRank())[0]


def test_pools_are_asked_in_the_order_of_their_names(tier, calls):
    taken = tier.alloc({"swa": 2, "mamba": 1, "kv": 8})
    assert {name: slots.numel() for name, slots in taken.items()} == {"kv": 8, "mamba": 1, "swa": 2}
    assert calls == [("alloc", "kv", 8), ("alloc", "mamba", 1), ("alloc", "swa", 2)]


def test_a_refused_number_gives_all_back(tier):
    with pytest.raises(SlotError, match="multiple of 2"):
        tier.alloc({"kv": 4, "mamba": 1, "swa": 3})
    assert free(tier) == [32, 3, 8]


def test_an_error_of_one_pool_does_not_keep_the_others(tier):
    taken = tier.alloc({"kv": 4, "mamba": 1, "swa": 2})
    with pytest.raises(SlotError):
        tier.free({**taken, "mamba": torch.tensor([2])})
    assert free(tier) == [32, 2, 8]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 5)), max_size=12))
def test_all_or_none(requests):
    tier = PoolTier({PoolName(name): Recorded(name, []) for name in SIZES})
    held = []
    for kv, mamba, swa in requests:
        before = free(tier)
        needs = {"kv": kv * 4, "mamba": mamba, "swa": swa * 2}
        taken = tier.alloc(needs)
        fits = all(needs[name] <= free for name, free in zip(sorted(SIZES), before, strict=True))
        assert (taken is not None) is fits
        if taken is None:
            assert free(tier) == before
        else:
            assert all(slots.dtype == torch.int64 for slots in taken.values())
            held.append(taken)
    for name, (size, _) in SIZES.items():
        slots = torch.cat([taken[name] for taken in held] or [torch.empty(0, dtype=torch.int64)])
        assert slots.unique().numel() == slots.numel()
        assert tier.available([name]) == {name: size - slots.numel()}


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


def test_derived_pools_use_their_sources_slots(stack):
    span = stack.take("host", 3, ends=(1, 3))
    group = stack.group
    assert group.slots(span, INDEXER) is span.anchor
    assert group.endpoints(span, INDEXER) == group.endpoints(span, KV) == (1, 2, 3)
    assert group.endpoints(span, MAMBA) == (1, 3)
    assert list(group.owned(span)) == [KV, MAMBA]
    assert group.needs(3) == {KV: 12, MAMBA: 1}
    stack.give("host", span)
    assert stack.free() == stack.total()


def side(slots, ends, name=MAMBA):
    return HybridIndices(torch.arange(2 * PAGE), {name: torch.tensor(slots)}, {name: ends})


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (HybridIndices(torch.arange(PAGE + 1)), "anchor: indices must be whole pages"),
        (HybridIndices(torch.arange(1, PAGE + 1)), "anchor: indices must be whole pages"),
        (HybridIndices(torch.tensor([0, 1, 3, 2])), "anchor: indices must be whole pages"),
        (side([0, 1, 2, 3], (1,), INDEXER), "'indexer' is no pool with slots of its own"),
        (side([0, 1], (1,)), "'mamba' must have 1 slots for each of 1 endpoints"),
        (side([0], (3,)), "'mamba' has an endpoint at page 3 of 2"),
    ],
)
def test_spans_that_do_not_fit_are_refused(stack, span, message):
    with pytest.raises(InvalidTransferError, match=message):
        stack.group.check(span)


# Spans
# -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_joined_spans_are_one(lengths, data):
    """With their states, which may also be moved alone, behind the span that they belong to."""
    parts, first, states, ends, before = [], 0, 0, [], 0
    for pages in lengths:
        own = sorted(data.draw(st.sets(st.integers(0, pages))))
        side = ({MAMBA: torch.arange(states, states + len(own))}, {MAMBA: tuple(own)})
        parts.append(
            HybridIndices(torch.arange(first, first + pages * PAGE), *(side if own else ({}, {})))
        )
        ends += [before + end for end in own]
        first, states, before = first + pages * PAGE, states + len(own), before + pages
    whole = HybridIndices.concat(parts, PAGE)
    assert whole.anchor.tolist() == list(range(first))
    assert whole.side.get(MAMBA, whole.anchor[:0]).tolist() == list(range(states))
    assert whole.endpoints.get(MAMBA, ()) == tuple(ends)
    assert len(parts) > 1 or whole is parts[0]


def test_nothing_is_false():
    rows = torch.arange(PAGE)
    assert not HybridIndices.empty()
    assert HybridIndices(rows)
    assert HybridIndices(rows[:0], {MAMBA: rows[:1]}, {MAMBA: (0,)})


@pytest.mark.parametrize(
    ("anchor", "states", "ends", "message"),
    [
        (torch.arange(4, dtype=torch.int32), None, None, "anchor: slots must be one row of int64"),
        (torch.zeros(2, 2).long(), None, None, "anchor: slots must be one row of int64"),
        (torch.arange(4), 1, None, "give both"),
        (torch.arange(4), None, (1,), "give both"),
        (torch.arange(4), 3, (1, 2), "3 slots do not fit"),
        (torch.arange(4), 2, (2, 1), "do not fit the endpoints"),
        (torch.arange(4), 1, (-1,), "do not fit the endpoints"),
        (torch.arange(4), 1, (), "do not fit the endpoints"),
    ],
)
def test_spans_that_contradict_themselves_are_refused(anchor, states, ends, message):
    side = {} if states is None else {MAMBA: torch.arange(states)}
    with pytest.raises(InvalidTransferError, match=message):
        HybridIndices(anchor, side, {} if ends is None else {MAMBA: ends})


# Entries
# -------------------------------------------------------------------------------------------------


class Pool:
    def __init__(self, size=32, page_size=4):
        self.size, self.page_size = size, page_size


def entry(name, pool=None, **fields):
    pool = pool or Pool()
    fields.setdefault(
        "device_pool", None if "indices_from_pool" in fields else SlotAllocator(64, pool.page_size)
    )
    slots = HostSlots(SlotAllocator(pool.size, pool.page_size))
    return PoolEntry(name=name, host_pool=pool, host_slots=slots, **fields)


KV_ENTRY = {"name": "kv"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "one of the pools must be 'kv'"),
        ([{"name": "swa"}], "one of the pools must be 'kv'"),
        ([KV_ENTRY, {"name": "kv"}], "names must differ"),
        ([KV_ENTRY, {"name": "swa", "device_pool": None}], "'swa': device_pool is missing"),
        ([KV_ENTRY, {"name": "swa", "hit_policy": "block_groups"}], "'swa': hit_policy must be"),
        (
            [KV_ENTRY, {"name": "swa", "hit_policy": "trailing_pages", "window_pages": 0}],
            "'swa': hit_policy must be",
        ),
        ([{**KV_ENTRY, "hit_policy": "trailing_pages"}], "'kv' must have slots of its own"),
        (
            [KV_ENTRY, {"name": "indexer", "indices_from_pool": "swa"}],
            "'indexer': indices_from_pool names 'swa'",
        ),
        (
            [
                KV_ENTRY,
                {"name": "a", "indices_from_pool": "kv"},
                {"name": "b", "indices_from_pool": "a"},
            ],
            "'b': indices_from_pool names 'a'",
        ),
        (
            [
                KV_ENTRY,
                {"name": "indexer", "indices_from_pool": "kv", "hit_policy": "trailing_pages"},
            ],
            "'indexer': hit_policy and window_pages must be those of 'kv'",
        ),
        (
            [KV_ENTRY, {"name": "indexer", "indices_from_pool": "kv", "pool": Pool(page_size=2)}],
            "'indexer': host_pool must have",
        ),
        (
            [KV_ENTRY, {"name": "indexer", "indices_from_pool": "kv", "pool": Pool(size=28)}],
            "'indexer': host_pool must have",
        ),
    ],
)
def test_entries_that_do_not_fit_are_refused(entries, message):
    with pytest.raises(InvalidPoolError, match=message):
        HostPoolGroup([entry(**fields) for fields in entries])


@pytest.mark.parametrize(
    ("policy", "window", "endpoint", "ends"),
    [
        ("all_pages", 1, 3, (1, 2, 3)),
        ("all_pages", 1, 0, ()),
        ("trailing_pages", 1, 3, (3,)),
        ("trailing_pages", 2, 3, (2, 3)),
        ("trailing_pages", 2, 1, (1,)),
        ("trailing_pages", 2, 0, ()),
    ],
)
def test_the_pages_that_a_prefix_needs(policy, window, endpoint, ends):
    assert (
        entry("swa", hit_policy=PoolHitPolicy(policy), window_pages=window).window(endpoint) == ends
    )
