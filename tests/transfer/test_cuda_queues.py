"""Side effects of copies on a GPU machine: on the enqueueing thread, multiprocessors, events and
graphs.

Each case answers a question that only a CUDA device can; figures are printed (`-s` or `-rA` shows
them).
"""

from __future__ import annotations

import time

import pytest
import torch
from transfer_bench import KINDS, LAYERS, POOLS, STAGED, Bench, Cuda, fill, random_bytes, raw, same

from hicache_storage.pools import MHADevicePool, MHAHostPool, host_tensor
from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer import BACKENDS, CudaDevice, PageTransfers, fences
from hicache_storage.transfer.cuda import device as cuda_module
from hicache_storage.transfer.cuda import runtime as cuda_runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG_CYCLES = 4_000_000_000
"""Some seconds: no enqueueing takes a part of that."""
MANY_PAGES = 4096
SIZE = {"page_size": 1, "layer_num": 16, "head_num": 8, "head_dim": 128, "dtype": torch.bfloat16}
"""Pages of one token and 64 KiB: rows of 2 KiB."""


@pytest.fixture
def cuda():
    made = Cuda("cuda")
    yield made
    made.close()


def many_pages(device, backend, layout="page_first", pages=MANY_PAGES):
    """An engine between pools with twice as many pages, and pages of which no two are adjacent."""
    pools = (
        MHADevicePool(size=2 * pages, device="cuda", **SIZE),
        MHAHostPool(size=2 * pages, layout=layout, **SIZE),
    )
    engine = PageTransfers.between(device, device.stream("compute"), *pools, backend=backend)
    engine.host_slots.alloc(2 * pages)
    return engine, torch.randperm(pages) * 2, torch.randperm(pages) * 2


def run_alone(engine, device, host):
    """The first transfer compiles kernels and takes memory; the next ones are judged."""
    engine.write_back(device, host).wait()
    engine.load(host, device).synchronize()


@pytest.mark.parametrize(("kind", "layout"), POOLS)
@pytest.mark.parametrize("backend", ["direct", "kernel"])
def test_batches_of_addresses_move_the_right_bytes(cuda, monkeypatch, kind, layout, backend):
    """`cudaMemcpyBatchAsync` from CUDA 12.8 on, single copies before."""
    monkeypatch.setattr(cuda_runtime, "FEW_CALLS", 0)
    device, host = KINDS[kind].pair(layout, "cuda", 48)
    engine = PageTransfers.between(
        cuda.device, cuda.device.stream("compute"), device, host, backend=backend
    )
    size, pages = KINDS[kind].page_size, torch.randperm(24) * 2
    slots, backwards = (
        (each.unsqueeze(1) * size + torch.arange(size)).view(-1) for each in (pages, pages.flip(0))
    )
    parts, generator = (
        [part for layer in range(LAYERS) for part in device.layer(layer)],
        torch.Generator().manual_seed(0),
    )
    for part in parts:
        part.copy_(random_bytes(part, generator))
    before = [part[pages.cuda()].clone() for part in parts]
    torch.cuda.synchronize()
    engine.write_back(slots, backwards).wait()
    for part in parts:
        fill(part, 0xA5)
    torch.cuda.synchronize()
    engine.load(backwards, slots).synchronize()
    torch.cuda.synchronize()
    assert all(
        torch.equal(raw(part[pages.cuda()]), raw(old))
        for part, old in zip(parts, before, strict=True)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_enqueueing_many_pages_does_not_wait_for_a_full_queue(cuda, backend, layout):
    """G1: a stream's launch queue has about 1,000 entries; 4,096 separate pages behind a kernel of
    some seconds."""
    engine, device, host = many_pages(cuda.device, backend, layout)
    run_alone(engine, device, host)
    with torch.cuda.stream(engine._compute.native):
        torch.cuda._sleep(LONG_CYCLES)
    began = time.perf_counter()
    acknowledgement = engine.write_back(device, host)
    counter = engine.load(host, device)
    seconds = time.perf_counter() - began
    print(
        f"{backend}, {layout}: {seconds * 1e3:.1f} ms for a write-back and a load of {MANY_PAGES} "
        f"pages"
    )
    assert not acknowledgement.done()
    assert counter.arrived() == 0
    assert seconds < 0.5
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_small_transfers_do_not_fill_a_queue(cuda, backend):
    """G1: as a scheduler enqueues them that is some steps ahead of the GPU."""
    engine, device, host = many_pages(cuda.device, backend, pages=64)
    run_alone(engine, device, host)
    with torch.cuda.stream(engine._compute.native):
        torch.cuda._sleep(LONG_CYCLES)
    for number in range(16):
        acknowledgement = engine.write_back(device[number : number + 1], host[number : number + 1])
        counter = engine.load(host[number : number + 1], device[number : number + 1])
    assert not acknowledgement.done()
    assert counter.arrived() == 0
    engine.close()


@pytest.mark.parametrize("backend", ["kernel", "mapped"])
def test_no_transfer_locks_memory(cuda, monkeypatch, backend):
    """G2: `cudaHostAlloc` in flight is an implicit synchronization."""
    engine, device, host = many_pages(cuda.device, backend, pages=64)
    run_alone(engine, device, host)
    locked, pinned = [], cuda_module._pinned
    monkeypatch.setattr(cuda_module, "_pinned", lambda rows: locked.append(rows) or pinned(rows))
    for _ in range(20):
        engine.write_back(device, host).wait()
        engine.load(host, device).synchronize()
    assert not locked


def test_kernels_of_copies_leave_multiprocessors_to_the_model(cuda):
    """G3: products of matrices beside `mapped` loads take about as long as alone."""
    assert cuda.device.moves_rows, "no kernel of Triton on this machine"
    engine, device, host = many_pages(cuda.device, "mapped")
    run_alone(engine, device, host)
    matrix, compute = (
        torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda"),
        torch.cuda.Stream(priority=-1),
    )
    result = torch.empty_like(matrix)
    torch.cuda.synchronize()

    def multiply():
        began = time.perf_counter()
        with torch.cuda.stream(compute):
            for _ in range(40):
                torch.mm(matrix, matrix, out=result)
        compute.synchronize()
        return time.perf_counter() - began

    multiply()
    alone = min(multiply() for _ in range(5))
    beside = []
    for _ in range(5):
        counters = [engine.load(host, device) for _ in range(3)]
        beside.append(multiply())
        counters[-1].synchronize()
    print(f"products alone {alone * 1e3:.1f} ms, beside loads {min(beside) * 1e3:.1f} ms")
    assert min(beside) < 1.5 * alone


@pytest.mark.parametrize("separate", [False, True])
def test_some_backend_is_fast_for_rows_with_gaps(cuda, separate):
    """G4: `page_first` loads are rows of 2 KiB; which backend comes near one pinned copy?"""
    size = MANY_PAGES << 16
    memory, target = (
        host_tensor((size,), torch.uint8, populate=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    stream = cuda.device.stream("pinned")
    torch.cuda.synchronize()

    def best(action):
        action()
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def pinned():
        stream.copy(target, memory, "pinned")
        stream.synchronize()

    whole, shares = best(pinned), {}
    for backend in BACKENDS:
        engine, device, host = many_pages(cuda.device, backend)
        if not separate:
            device = host = torch.arange(MANY_PAGES)
        engine.write_back(device, host).wait()
        shares[backend] = whole / best(lambda: engine.load(host, device).synchronize())  # noqa: B023
        engine.close()
    print(f"one pinned copy {size / whole / 1e9:.1f} GB/s; shares of it: {shares}")
    assert max(shares.values()) >= 0.8


def test_events_are_used_again(cuda, monkeypatch):
    """G5: making an event for each layer of each load is a call of CUDA that nobody needs."""
    engine, device, host = many_pages(cuda.device, "direct", pages=64)
    monkeypatch.setattr(fences, "SWEEP_EVENTS", 8)
    for _ in range(300):
        run_alone(engine, device, host)
    made, event = [], torch.cuda.Event
    monkeypatch.setattr(torch.cuda, "Event", lambda: made.append(True) or event())
    for _ in range(50):
        run_alone(engine, device, host)
    assert not made


def test_copies_stay_out_of_a_graph(cuda):
    """G6: a graph has no events of later loads; its stream waits before each replay, and the
    capture goes on."""
    bench = Bench(cuda, "mha", "page_first", "direct")
    content, host = bench.content(0), bench.engine.host_slots.alloc(bench.kind.page_size)
    bench.write_host(int(host[0]) // bench.kind.page_size, content)
    seen = [
        [torch.zeros_like(part[2]) for part in bench.device_pool.layer(layer)]
        for layer in range(LAYERS)
    ]
    counter = bench.engine.load(host, bench.slots(2))
    counter.synchronize()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=bench.compute.native):
        with pytest.raises(InvalidTransferError, match="being captured"):
            counter.wait(0, bench.compute)
        with pytest.raises(InvalidTransferError, match="being captured"):
            bench.engine.write_back(bench.slots(2), host)
        for layer in range(LAYERS):
            for copy, part in zip(seen[layer], bench.device_pool.layer(layer), strict=True):
                copy.copy_(part[2])
    counter = bench.engine.load(host, bench.slots(2))
    counter.wait(LAYERS - 1, bench.compute)
    with torch.cuda.stream(bench.compute.native):
        graph.replay()
    bench.finish()
    assert same(seen, content)


def test_without_triton_there_are_two_kernels(cuda):
    bench = Bench(cuda, "mha", "page_first", STAGED)
    assert not cuda.device.moves_rows
    assert bench.engine._copies._in is not None


def test_triton_compiles_here():
    """It comes with torch for CUDA; where it does not compile, `mapped` is slower, and the log says
    why."""
    assert CudaDevice().moves_rows
