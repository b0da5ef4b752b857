"""Write-back and load of all pools as one operation, on the stream simulator."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.hybrid import HybridIndices
from hicache_storage.spec import InvalidTransferError
from tests.hybrid.stack import KV, MAMBA, PAGE, hashes
from tests.support.waiting import eventually


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
    keys, device = hashes(16), stack.take("device", 2, ends=(2,))
    stack.fill("device", device, keys)
    host = stack.controller.write(device, 1)
    stack.controller.start_writing()
    stack.controller.before_overwrite(device)
    for pages in stack.device.values():
        for tensors in pages.layers:
            for tensor in tensors:
                stack.compute.copy(tensor, torch.full_like(tensor, 99), "kernel")
    stack.compute.synchronize()
    assert eventually(stack.controller.completed_writes) == [1]
    assert stack.holds("host", host, keys)
