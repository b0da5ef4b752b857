"""Copies of pages between device and host on the simulator: every layout, held host pages, refused arguments."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.pools import MHAHostPool, MLAHostPool, SlotAllocator
from hicache_storage.spec import InvalidPoolError, InvalidTransferError, SlotError
from hicache_storage.transfer import DevicePages, HostPages, HostSlots, PageTransfers, recorded
from hicache_storage.transfer.simulator import StreamSimulator

LAYERS, PAGE, PAGES = 3, 4, 4


@pytest.fixture
def simulator():
    with StreamSimulator("engine") as made:
        yield made


def mha(layout):
    return MHAHostPool(
        size=PAGE * PAGES, page_size=PAGE, layer_num=LAYERS, head_num=2, head_dim=6, v_head_dim=4, dtype=torch.int16,
        layout=layout, pin_memory=False,
    )  # fmt: skip


def mla(layout):
    return MLAHostPool(
        size=PAGE * PAGES, page_size=PAGE, layer_num=LAYERS, kv_cache_dim=5, dtype=torch.int16, layout=layout, pin_memory=False
    )


POOLS = [(mha, layout) for layout in MHAHostPool.LAYOUTS] + [(mla, layout) for layout in MLAHostPool.LAYOUTS]


def rows(pool):
    return [(2, 6), (2, 4)] if isinstance(pool, MHAHostPool) else [(1, 5)]


def device_layers(pool):
    return [[torch.randint(-999, 999, (PAGE * PAGES, *row), dtype=torch.int16) for row in rows(pool)] for _ in range(LAYERS)]


def slots(*pages):
    return torch.tensor([page * PAGE + offset for page in pages for offset in range(PAGE)])


@pytest.mark.parametrize(("make", "layout"), POOLS)
def test_pages_come_back_as_they_went(simulator, make, layout):
    pool = make(layout)
    layers = device_layers(pool)
    before = [[tensor.clone() for tensor in tensors] for tensors in layers]
    compute = simulator.stream("compute")
    engine = PageTransfers(simulator, compute, DevicePages(layers, PAGE), HostPages(pool), pool)
    host = engine.host_slots.alloc(2 * PAGE)
    acknowledgement = engine.write_back(slots(3, 1), host)
    engine.load(host, slots(0, 2)).wait(LAYERS - 1, compute)
    compute.synchronize()
    assert acknowledgement.done()
    assert not simulator.races
    for tensors, old in zip(layers, before, strict=True):
        for tensor, was in zip(tensors, old, strict=True):
            assert torch.equal(tensor[slots(0, 2)], was[slots(3, 1)])
            assert torch.equal(tensor[slots(1, 3)], was[slots(1, 3)])


@pytest.mark.parametrize(("make", "layout"), POOLS)
def test_layers_of_a_host_page_are_its_bytes(make, layout):
    pool = make(layout)
    host = HostPages(pool)
    for page in range(PAGES):
        for layer in range(LAYERS):
            for tensor in host.page_layer(page * PAGE, layer):
                assert tensor.shape[0] == PAGE
                tensor.fill_(page + 1)
    for page, components in enumerate(pool.page_buffers([page * PAGE for page in range(PAGES)])):
        assert all(set(buffer.cast("h")) == {page + 1} for buffer in components)


def test_the_counter_tells_what_has_arrived(simulator):
    pool = mha("page_first_direct")
    layers = device_layers(pool)
    engine = PageTransfers(simulator, simulator.stream("compute"), DevicePages(layers, PAGE), HostPages(pool), pool)
    hold = simulator.hold([tensor[slots(0)] for tensor in layers[1]], 30)
    counter = engine.load(engine.host_slots.alloc(PAGE), slots(0))
    compute = simulator.stream("layer 0")
    counter.wait(0, compute)
    compute.synchronize()
    assert counter.arrived() == 1
    hold.release()
    counter.synchronize()
    assert counter.arrived() == LAYERS


def test_a_busy_host_page_waits_for_its_copy(simulator):
    stream, memory = simulator.stream("a"), torch.zeros(8)
    host = HostSlots(SlotAllocator(4, 2))
    first, second = host.alloc(2), host.alloc(2)
    hold = simulator.hold([memory], 30)
    stream.copy(memory, torch.ones(8), "copy")
    event = recorded(simulator, stream)
    host.hold(first, event)
    assert host.free(torch.cat([first, second])) == 4
    assert host.available_size() == 2
    assert host.alloc(4) is None
    with pytest.raises(SlotError, match="given back twice"):
        host.free(first)
    taken = host.alloc(2)
    assert taken.tolist() == second.tolist()
    hold.release()
    event.synchronize()
    assert host.available_size() == 2
    assert host.alloc(2).tolist() == first.tolist()


def test_a_page_of_two_copies_waits_for_both(simulator):
    streams, memories = [simulator.stream(name) for name in "ab"], [torch.zeros(8) for _ in "ab"]
    host = HostSlots(SlotAllocator(2, 2))
    slots_held = host.alloc(2)
    holds, events = [], []
    for stream, memory in zip(streams, memories, strict=True):
        holds.append(simulator.hold([memory], 30))
        stream.copy(memory, torch.ones(8), "copy")
        events.append(recorded(simulator, stream))
        host.hold(slots_held, events[-1])
    host.free(slots_held)
    holds[1].release()
    events[1].synchronize()
    assert host.alloc(2) is None
    holds[0].release()
    events[0].synchronize()
    assert host.alloc(2) is not None


def test_what_does_not_fit_is_refused(simulator):
    pool = mha("page_first")
    engine = PageTransfers(simulator, simulator.stream("compute"), DevicePages(device_layers(pool), PAGE), HostPages(pool), pool)
    host = engine.host_slots.alloc(2 * PAGE)
    for device_indices in (slots(0), slots(0, 1)[1:], torch.arange(1, 9), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(InvalidTransferError):
            engine.write_back(device_indices, host)
    with pytest.raises(InvalidTransferError, match="differ in layers or page size"):
        PageTransfers(simulator, simulator.stream("c"), DevicePages(device_layers(pool)[1:], PAGE), HostPages(pool), pool)
    with pytest.raises(InvalidPoolError, match="same number of slots"):
        DevicePages([[torch.zeros(4, 1)], [torch.zeros(6, 1)]], 2)
    with pytest.raises(InvalidPoolError, match="MHAHostPool and MLAHostPool"):
        HostPages(object())
