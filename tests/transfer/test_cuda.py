"""Behaviour of a CUDA device alone, and side effects of copies on it; the rules of copies are in
`test_stream_rules.py`, for both.

Figures are printed (`-s` or `-rA` shows them).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import closing

import pytest
import torch

from hicache_storage.pools import DevicePool, PagedHostPool, host_tensor
from hicache_storage.spec import ConfigError, InvalidPoolError, InvalidTransferError
from hicache_storage.transfer import CudaDevice, CudaStream
from hicache_storage.transfer.plan import WAYS
from tests.support.pools import make_pool
from tests.transfer.rig import (
    BF16,
    FIELDS,
    LAYERS,
    NEEDS_GPU,
    ONE_POOL,
    POISON,
    POOLS,
    Cuda,
    Rig,
    fill,
    moved,
    one_pool,
    page_slots,
    pools_of,
    random_bytes,
    raw,
    same,
)

pytestmark = NEEDS_GPU
MANY_PAGES = 4096
SIZE = {"page_size": 1, "layers": range(16), "head_num": 8, "head_dim": 128, "dtype": BF16}
"""Pages of one token and 64 KiB: rows of 2 KiB."""


@pytest.fixture
def cuda():
    made = Cuda("cuda")
    yield made
    made.close()


def many_pages(device, way, layout="page_first", pages=MANY_PAGES, **fields):
    """An engine between pools with twice as many pages, its model's stream, and pages of which no
    two are adjacent; the first transfers, which load kernels, are over."""
    size = SIZE | fields
    slots = 2 * pages * size["page_size"]
    pools = (
        make_pool(DevicePool, "mha", size=slots, device="cuda", **size),
        make_pool(PagedHostPool, "mha", size=slots, layout=layout, **size),
    )
    compute = device.stream("compute")
    engine = one_pool(device, compute, *pools, way=way)
    engine.host_slots["pool"].alloc(slots)
    on_device, on_host = (
        page_slots(torch.randperm(pages) * 2, size["page_size"]) for _ in range(2)
    )
    engine.write_back(moved(on_device, on_host)).synchronize()
    engine.load(moved(on_device, on_host)).synchronize()
    return engine, compute, on_device, on_host


@pytest.mark.parametrize(("model", "layout"), POOLS)
@pytest.mark.parametrize("way", WAYS)
def test_no_call_waits_for_a_copy(cuda, way, model, layout):
    rig = Rig(cuda, model, layout, way)
    contents, host = [rig.content(seed) for seed in range(3)], rig.alloc(3)
    for page, content in enumerate(contents):
        rig.run_kernel(page, content, at_once=True)
    rig.compute.synchronize()
    cuda.delay(rig.compute)
    acknowledgement = rig.write_back(rig.slots(0, 1, 2), host)
    counter = rig.load(host, rig.slots(4, 3, 5))
    seen = rig.read_pages((4, 3, 5), counter)
    assert not acknowledgement.done()
    assert not counter.done()
    rig.finish()
    assert all(map(same, seen, contents))


@pytest.mark.parametrize(("kind", "layout"), ONE_POOL)
@pytest.mark.parametrize("way", [None, *WAYS])
def test_many_pages_come_back(cuda, kind, layout, way):
    device, host = pools_of(kind, layout, "cuda", 3000)
    engine = one_pool(cuda.device, cuda.device.stream("compute"), device, host, way=way)
    pages = torch.randperm(1500) * 2
    slots, backwards = (page_slots(each, device.page_size) for each in (pages, pages.flip(0)))
    parts = [part for layer in range(LAYERS) for part in device.layer(layer)]
    for part in parts:
        part.copy_(random_bytes(part, torch.Generator().manual_seed(0)))
    before = [part[pages.cuda()].clone() for part in parts]
    torch.cuda.synchronize()
    engine.write_back(moved(slots, backwards)).synchronize()
    for part in parts:
        fill(part, POISON)
    torch.cuda.synchronize()
    engine.load(moved(slots, backwards)).synchronize()
    torch.cuda.synchronize()
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(raw(part[pages.cuda()]), raw(old))


# What copies do to the thread that enqueues them, and to the model
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "layout", "fields"),
    [
        (None, "page_first", {}),
        (None, "layer_first", {}),
        ("dma", "page_first_direct", {}),
        # Pages of 1 MiB, whose halves go by DMA.
        (None, "page_first_direct", {"page_size": 16}),
    ],
)
def test_enqueueing_many_pages_does_not_wait_for_a_full_queue(cuda, way, layout, fields):
    """A stream's launch queue has about 1,000 places; 4,096 separate pages behind a kernel that
    does not end before the calls return."""
    engine, compute, device, host = many_pages(cuda.device, way, layout, **fields)
    cuda.delay(compute)
    began = time.perf_counter()
    acknowledgement = engine.write_back(moved(device, host))
    middle = time.perf_counter()
    counter = engine.load(moved(device, host))
    ended = time.perf_counter()
    print(
        f"{way}, {layout}, {fields}: {MANY_PAGES} pages behind a busy stream, write-back "
        f"{(middle - began) * 1e3:.2f} ms, load {(ended - middle) * 1e3:.2f} ms"
    )
    assert not acknowledgement.done()
    assert not counter.done()
    cuda.release()
    engine.close()


@pytest.mark.parametrize("way", WAYS)
def test_many_small_transfers_do_not_fill_a_queue(cuda, way):
    """As a scheduler enqueues them that is some steps ahead of the GPU."""
    engine, compute, device, host = many_pages(cuda.device, way, "page_first_direct", pages=64)
    cuda.delay(compute)
    for page in range(16):
        acknowledgement = engine.write_back(moved(device[page : page + 1], host[page : page + 1]))
        counter = engine.load(moved(device[page : page + 1], host[page : page + 1]))
    assert not acknowledgement.done()
    assert not counter.done()
    cuda.release()
    engine.close()


def test_copies_stay_out_of_a_graph(cuda):
    """A graph has no events of later loads; its stream waits before each replay, and the capture
    goes on."""
    rig = Rig(cuda, "mha", "page_first", None)
    content = rig.content(0)
    host, layers = rig.filled_host(content), [*map(rig.device["pool"].layer, range(LAYERS))]
    seen = [[torch.zeros_like(part[2]) for part in parts] for parts in layers]
    counter = rig.load(host, rig.slots(2))
    counter.synchronize()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=rig.compute.native):
        with pytest.raises(InvalidTransferError, match="being captured"):
            counter.wait(0, rig.compute)
        with pytest.raises(InvalidTransferError, match="being captured"):
            rig.write_back(rig.slots(2), host)
        for copies, parts in zip(seen, layers, strict=True):
            for copy, part in zip(copies, parts, strict=True):
                copy.copy_(part[2])
    counter = rig.load(host, rig.slots(2))
    counter.wait(LAYERS - 1, rig.compute)
    with torch.cuda.stream(rig.compute.native):
        graph.replay()
    rig.finish()
    assert same(seen, content)


# Devices, streams and memory
# ---------------------------------------------------------------------------------------------


def test_streams_have_priorities():
    lowest, highest = torch.cuda.Stream.priority_range()
    device = CudaDevice()
    assert device.stream("write-back", "lowest").native.priority == lowest
    assert device.stream("load", "highest").native.priority == highest < lowest


def test_the_current_stream_of_a_model_is_taken(cuda):
    device, host = pools_of("mha", "page_first", "cuda")
    compute = CudaStream(torch.cuda.current_stream())
    with closing(one_pool(cuda.device, compute, device, host)) as engine:
        device.layer(0)[0].fill_(3)
        engine.write_back(moved(torch.arange(2), torch.arange(2))).synchronize()
        assert host.layer(0)[0][0].eq(3).all()


def test_memory_that_is_not_page_locked_is_refused(cuda):
    device, _ = pools_of("mha", "page_first", "cuda")
    arguments = dict(FIELDS["mha"], size=device.size, layers=range(LAYERS))
    host = make_pool(PagedHostPool, "mha", **arguments, pin_memory=False)
    with pytest.raises(InvalidPoolError, match="pin_memory=True"):
        one_pool(cuda.device, cuda.device.stream("compute"), device, host)
    assert launches()


def launches():
    """Return True if a kernel can be launched: torch raises an earlier, pending error there."""
    return torch.ones(4, device="cuda").add_(1).tolist() == [2.0] * 4


class Twice:
    """Locks memory that is locked already, which CUDA refuses."""

    def __init__(self, runtime):
        self._runtime = runtime

    def __call__(self):
        return self

    def cudaHostRegister(self, address, size, flags):
        assert not int(self._runtime.cudaHostRegister(address, size, flags))
        error = self._runtime.cudaHostRegister(address, size, flags)
        assert not int(self._runtime.cudaHostUnregister(address))
        return error


def test_a_refusal_is_not_left_to_the_next_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", Twice(torch.cuda.cudart()))
    with pytest.raises(InvalidPoolError, match="CUDA cannot lock"):
        host_tensor((1 << 20,), torch.uint8)
    assert launches()


def test_locked_memory_is_not_a_childs():
    """After a fork, the first write copies a shared page, and the device would use the other
    copy."""
    memory = host_tensor((1 << 20,), torch.uint8)
    memory.fill_(1)
    child = os.fork()
    if not child:
        ctypes.string_at(memory.data_ptr(), 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0


def test_a_device_without_a_number_is_the_one_that_was_current():
    last, streams = torch.cuda.device_count() - 1, []
    with torch.cuda.device(last):
        device = CudaDevice("cuda")
    thread = threading.Thread(target=lambda: streams.append(device.stream("of another thread")))
    thread.start()
    thread.join()
    assert streams[0].native.device == torch.device("cuda", last)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(
        ConfigError, match=r"of which there are \d+, such as 'cuda:0'; got 'cuda:99'"
    ):
        CudaDevice("cuda:99")
    with pytest.raises(ConfigError, match="must be a CUDA device"):
        CudaDevice("cpu")


def test_no_memory_for_staging_is_said_when_the_engine_is_made():
    with pytest.raises(InvalidPoolError, match="staging on cuda:0"):
        CudaDevice("cuda:0").scratch(1 << 50, [])
    assert launches()
