"""What the cache does in one situation after the other."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.hybrid.policies import WritePolicy
from hicache_storage.hybrid.radix import (
    HiMambaRadixCache,
    StalePrefixError,
)
from hicache_storage.hybrid.radix.tree import SlotKind
from hicache_storage.spec import ConfigError, InvalidTransferError
from tests.hybrid.radix.serving import LONG, fetch, served
from tests.hybrid.radix.world import KV, MAMBA, kv_values, value


def computed(world, tokens, *ends):
    """Rows and states that a model has computed for whole pages of tokens."""
    rows, states = world.cache.alloc_kv(len(tokens)), {}
    world.device[KV][rows] = kv_values(tokens)
    for end in ends:
        state = world.cache.alloc_state()
        world.device[MAMBA][state] = value("state", tokens[:end])
        states[end] = int(state)
    return rows, states


def test_a_namespace_that_nobody_uses_is_forgotten(world):
    """There may be one for each request."""
    for number in range(20):
        seed = f"{number:064x}"
        world.cache.insert(LONG[:4], *computed(world, LONG[:4], 4), namespace=seed)
        world.inserted[LONG[:4]] = {"kv", "state"}
        assert world.cache.match(LONG[:4], namespace=seed).length == 4
        world.settle()
        world.cache.evict(100, 100)
        world.cache.evict_host(100, 100)
    assert not world.tree._roots


def test_a_state_can_go_alone_and_its_kv_stays(world):
    served(world, LONG, 8)
    world.cache.evict_host(100, 100)
    world.cache.evict(states=1)
    usage = world.cache.usage()
    assert (usage.device_tokens, usage.device_states) == (16, 1)
    assert world.cache.match(LONG).length == 16
    world.cache.evict(states=1)
    assert world.cache.match(LONG).length == 0
    usage = world.cache.usage()
    assert (usage.device_tokens, usage.device_states) == (16, 0)
    # A request that computes the prefix again uses the KV that stayed, and gives the state back to
    # it.
    request = world.start(LONG)
    assert world.cache.usage().device_tokens == 16
    assert world.cache.match(LONG).length == 16
    world.drop(request)
    world.running.clear()


def test_kv_goes_from_the_leaves_and_the_oldest_first(make_world):
    world = make_world(device_kv=64, device_states=8)
    first, second = LONG[:9], (*LONG[:4], *range(70, 75))
    served(world, first, 4)
    served(world, second)
    served(world, first)
    world.cache.evict_host(100, 100)
    world.cache.evict(tokens=1)
    assert [world.cache.match(tokens).length for tokens in (first, second)] == [8, 4]
    world.cache.evict(tokens=1)
    assert [world.cache.match(tokens).length for tokens in (first, second)] == [4, 4]
    world.cache.evict(tokens=1)
    assert world.cache.match(first).length == 0
    assert world.cache.usage().device_tokens == 0


def test_a_prefix_that_changed_since_it_was_matched_is_refused(world):
    served(world, LONG)
    match = world.cache.match(LONG)
    world.cache.evict(100, 100)
    with pytest.raises(StalePrefixError, match="match again"):
        world.cache.lock(match)
    match = world.cache.match(LONG)
    assert match.host_length == 16
    world.cache.evict_host(100, 100)
    with pytest.raises(StalePrefixError):
        world.cache.lock(match)


def test_a_split_between_match_and_lock_is_no_change(world):
    served(world, LONG)
    match = world.cache.match(LONG)
    served(world, (*LONG[:8], 99))
    lock = world.cache.lock(match)
    world.cache.evict(100, 100)
    assert world.cache.match(LONG, device_only=True).length == 16
    world.cache.unlock(lock)


def test_two_requests_load_one_prefix(world):
    served(world, LONG)
    world.cache.evict(100, 100)
    match = world.cache.match(LONG)
    locks = [world.cache.lock(match), world.cache.lock(match)]
    results = [world.cache.load(lock) for lock in locks]
    world.controller.wait_for_loads(world.cache.start_loading())
    assert torch.equal(results[0].device_indices, results[1].device_indices)
    assert results[0].state_slot != results[1].state_slot
    for lock, result in zip(locks, results, strict=True):
        world.check_hit(LONG[:16], result.device_indices, torch.tensor([result.state_slot]))
        world.cache.unlock(lock)
        world.state_slots.free(torch.tensor([result.state_slot]))
    world.settle()


@pytest.mark.parametrize(
    ("policy", "after_first", "after_hit", "after_eviction"),
    [
        ("write_through", 16, 16, 16),
        ("write_through_selective", 0, 16, 16),
        ("write_back", 0, 0, 16),
    ],
)
def test_write_policies(make_world, policy, after_first, after_hit, after_eviction):
    world = make_world(policy=WritePolicy(policy))
    served(world, LONG)
    found = [world.cache.usage().host_tokens]
    lock = world.cache.lock(world.cache.match(LONG))
    world.cache.unlock(lock)
    found.append(world.cache.usage().host_tokens)
    world.cache.evict(100, 100)
    found.append(world.cache.usage().host_tokens)
    assert found == [after_first, after_hit, after_eviction]
    world.settle()
    assert world.cache.match(LONG).host_length == 16
    assert world.cache.usage().host_states == 1


def test_what_finds_no_room_on_the_host_is_counted_and_stays_on_the_device(make_world):
    world = make_world(host_kv=4)
    served(world, LONG)
    assert world.cache.usage().host_tokens == 0
    assert world.cache.usage().declined_writes
    assert world.cache.match(LONG).length == 16


def test_a_state_that_comes_later_is_written_later(world):
    rows, _ = computed(world, LONG[:8])
    world.insert(LONG[:8], rows, {})
    world.settle()
    assert world.cache.usage().host_tokens == 8
    state = world.cache.alloc_state()
    world.device[MAMBA][state] = value("state", LONG[:8])
    world.insert(LONG[:8], rows, {8: int(state)})
    assert world.cache.usage().device_states == 1
    world.settle()
    assert world.cache.usage().host_states == 1
    world.cache.evict(100, 100)
    world.cache.evict_host(100, 100)
    fetch(world, LONG)
    assert world.cache.match(LONG).host_length == 8


def host_states(world):
    return sorted(node.end for node in world.ownership.host[SlotKind.STATE])


def test_old_states_do_not_take_the_host_from_a_new_one(make_world):
    """The KV of a long conversation has left the host: it is copied again for what follows, the
    states on the way are not."""
    world = make_world(host_states=2, device_kv=64, device_states=8)
    for end in (5, 9, 13, 17):
        served(world, LONG[:end])
    world.cache.evict_host(100, 100)
    request = world.start((*LONG[:16], *range(90, 95)))
    assert host_states(world) == [16, 20], "the state that was hit, and the new one"
    assert world.cache.usage().host_tokens == 20
    assert not world.cache.usage().declined_writes
    world.drop(request)
    world.running.clear()
    world.settle()
    world.cache.evict(100, 100)
    world.cache.evict_host(100, 100)
    fetch(world, (*LONG[:16], *range(90, 94)))
    assert world.cache.match((*LONG[:16], *range(90, 94))).host_length == 20


def test_states_that_come_together_are_copied_from_the_last_one_on(make_world):
    world = make_world(host_states=2, device_kv=64, device_states=8)
    world.inserted = {LONG[:end]: {"kv", "state"} for end in range(2, 17, 2)}
    world.cache.insert(LONG[:16], *computed(world, LONG[:16], 4, 8, 12, 16))
    assert host_states(world) == [12, 16]
    world.settle()


@pytest.mark.parametrize(
    ("rows", "states", "message"),
    [
        (torch.arange(6), {}, "kv_indices must be 8 slots"),
        (torch.arange(8, dtype=torch.int32), {}, "of int64"),
        (torch.arange(8), {6: 0}, "multiples of 4 tokens up to 8"),
        (torch.arange(8), {12: 0}, "multiples of 4 tokens up to 8"),
        (torch.arange(8), {0: 0}, "multiples of 4"),
        (torch.arange(8), {4: 1, 8: 1}, "a slot each"),
        (torch.arange(1, 9), {}, "whole pages of 2"),
        (torch.tensor([0, 1, 2, 4, 6, 7, 8, 9]), {}, "whole pages of 2"),
    ],
)
def test_wrong_insertions_are_refused_before_anything_changes(world, rows, states, message):
    with pytest.raises(InvalidTransferError, match=message):
        world.cache.insert(LONG[:9], rows, states)
    assert world.cache.usage().device_tokens == 0


def test_states_of_a_model_without_them_are_refused(make_world):
    world = make_world(grid=None)
    with pytest.raises(InvalidTransferError, match="model without them"):
        world.cache.insert(LONG[:8], torch.arange(8), {8: 0})


@pytest.mark.parametrize(("states", "grid"), [(8, None), (0, 8), (8, 6), (8, 0)])
def test_a_grid_that_does_not_fit_the_model_is_refused(make_stack, states, grid):
    stack = make_stack(states=states)
    with pytest.raises(ConfigError, match=f"checkpoint_grid .* {grid}"):
        HiMambaRadixCache(stack.controller, checkpoint_grid=grid)


@pytest.mark.parametrize(
    ("grid", "lengths"),
    [(4, {0: 0, 1: 0, 4: 0, 5: 4, 20: 16}), (None, {2: 0, 3: 2, 20: 18})],
)
def test_the_last_sampled_token_is_not_committed(make_world, grid, lengths):
    cache = make_world(grid=grid).cache
    assert {length: cache.committed_length(length) for length in lengths} == lengths
