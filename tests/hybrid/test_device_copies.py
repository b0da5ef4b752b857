"""Write-back and load of all pools as one operation, on the stream simulator."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.hybrid import HybridIndices
from hicache_storage.spec import InvalidTransferError
from tests.hybrid.stack import KV, MAMBA, PAGE, hashes
from tests.support.waiting import eventually

KEYS = hashes(16)


def written(stack, pages, ends=(), node=1):
    """Filled device pages, and the host pages that they were copied to."""
    device = stack.take("device", pages, ends)
    stack.fill("device", device, KEYS)
    host = stack.controller.write(device, node)
    stack.controller.start_writing()
    assert eventually(stack.controller.completed_writes) == [node]
    return device, host


def test_operations_of_a_step_are_one_and_told_once(stack):
    spans = [stack.take("device", pages, ends) for pages, ends in ((2, (2,)), (1, ()), (3, (1, 3)))]
    hosts = [stack.controller.write(span, node) for node, span in enumerate(spans)]
    assert stack.controller.completed_writes() == []
    assert stack.controller.start_writing() == 6 * PAGE
    assert stack.controller.start_writing() == 0
    assert eventually(stack.controller.completed_writes) == [0, 1, 2]
    assert stack.controller.completed_writes() == []
    for node, host in enumerate(hosts):
        assert stack.controller.load(host, node) is not None
    assert stack.controller.start_loading().events
    assert eventually(stack.controller.completed_loads) == [0, 1, 2]
    stack.controller.start_loading().wait(0, stack.compute)
    assert stack.controller.start_loading().done()
    stats = stack.controller.stats()
    assert stats.tokens_written_back == stats.tokens_loaded == 6 * PAGE


def test_a_layer_is_waited_for_in_the_pools_that_have_it(stack):
    """Attention layers 0 and 2 are KV's and the indexer's, 1 and 3 are Mamba's."""
    _, host = written(stack, 2, ends=(2,))
    stack.controller.load(host, 1)
    stack.simulator.is_held = True
    counter = stack.controller.start_loading()
    for layer in (0, 1):
        stream = stack.simulator.stream(f"model {layer}")
        counter.wait(layer, stream)
        stream.synchronize()
    assert not counter.done()
    assert stack.controller.completed_loads() == []
    late = stack.simulator.stream("model 2")
    counter.wait(2, late)
    event = late.record()
    assert not event.query()
    late.synchronize()
    assert not counter.done()
    counter.synchronize()
    assert event.query()
    assert counter.done()


def test_a_step_waits_for_earlier_loads_too(stack):
    """A request whose prefix is being loaded for another one, which may have been given up, loads
    nothing itself."""
    _, host = written(stack, 2, ends=(2,))
    device = stack.controller.load(host, 1)
    stack.simulator.is_held = True
    first = stack.controller.start_loading()
    assert stack.controller.completed_loads() == []
    assert stack.controller.start_loading() is first
    more = HybridIndices(host.kv[PAGE:], host.states, (1,))
    stack.controller.load(more, 2)
    second = stack.controller.start_loading()
    first.synchronize()
    assert not second.done(), "a step waits for no load of a later one"
    second.synchronize()
    assert second.done()
    assert stack.holds("device", device, KEYS)
    assert eventually(stack.controller.completed_loads) == [1, 2]
    assert stack.controller.start_loading().done()


def test_a_state_is_loaded_alone(stack):
    """Into another slot than that of the node, which is loaded in the same step."""
    _, host = written(stack, 3, ends=(3,))
    alone = HybridIndices(states=host.states, endpoints=(0,))
    node, request = (stack.controller.load(span, 1) for span in (host, alone))
    assert request.states.tolist() != node.states.tolist()
    stack.controller.start_loading().synchronize()
    assert stack.holds("device", node, KEYS)
    assert stack.holds("device", request, KEYS, KEYS[:3])


def test_what_is_freed_in_flight_is_not_handed_out(stack):
    device = stack.take("device", 16, ends=(4, 8))
    host = stack.controller.write(device, 1)
    stack.controller.free_host(host)
    assert stack.free() == {KV: 0, MAMBA: 6}, "queued, not started"
    stack.simulator.is_held = True
    stack.controller.start_writing()
    stack.compute.synchronize()
    assert stack.controller.write(stack.take("device", 1), 2) is None, (
        "the indexer's copy uses KV's slots"
    )
    stack.simulator.is_held = False
    eventually(lambda: stack.free() == stack.total())
    assert stack.controller.stats().writes_without_room == 1


def test_without_room_nothing_is_taken(make_stack):
    stack = make_stack(pages=4, states=1)
    assert stack.controller.write(stack.take("device", 2, ends=(1, 2)), 1) is None
    assert stack.free() == stack.total()
    host = stack.take("host", 2, ends=(2,))
    stack.take("device", 5)
    before = stack.free("device")
    assert stack.controller.load(host, 1) is None
    assert stack.free("device") == before
    assert stack.controller.start_writing() == 0
    assert stack.controller.start_loading().done()
    assert (
        stack.controller.stats().writes_without_room,
        stack.controller.stats().loads_without_room,
    ) == (1, 1)


def test_refused_spans_take_nothing(stack):
    device = stack.take("device", 2, ends=(2,))
    host = stack.take("host", 2, ends=(2,))
    free = stack.free(), stack.free("device")
    with pytest.raises(InvalidTransferError, match="whole pages"):
        stack.controller.write(HybridIndices(device.kv[1:]), 1)
    with pytest.raises(InvalidTransferError, match="whole pages"):
        stack.controller.load(HybridIndices(host.kv[1:]), 1)
    assert (stack.free(), stack.free("device")) == free


def test_overwriting_waits_for_the_copies_of_every_pool(stack):
    """ST-1: without the fence, the simulator tells a race."""
    device = stack.take("device", 2, ends=(2,))
    stack.fill("device", device, KEYS)
    host = stack.controller.write(device, 1)
    stack.controller.start_writing()
    stack.controller.before_overwrite(device)
    for pages in stack.device.values():
        for tensors in pages.layers:
            for tensor in tensors:
                stack.compute.copy(tensor, torch.full_like(tensor, 99), "kernel")
    stack.compute.synchronize()
    assert eventually(stack.controller.completed_writes) == [1]
    assert stack.holds("host", host, KEYS)
