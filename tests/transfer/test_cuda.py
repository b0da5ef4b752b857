"""Behaviour of a CUDA device alone; the rules of copies are in `test_stream_rules.py`, for both."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch
from transfer_bench import POOLS, Bench, Cuda, same

from hicache_storage.pools import host_tensor
from hicache_storage.pools.cuda_runtime import cuda_runtime
from hicache_storage.spec import ConfigError, InvalidPoolError
from hicache_storage.transfer import BACKENDS, CudaDevice, recorded
from hicache_storage.transfer.cuda.runtime import copy_with_gaps
from hicache_storage.transfer.streams import StreamFailedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG_CYCLES = 4_000_000_000
"""Some seconds: no enqueueing takes a part of that."""


@pytest.fixture
def cuda():
    made = Cuda("cuda")
    yield made
    made.close()


@pytest.mark.parametrize(("kind", "layout"), POOLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_waits_for_a_copy(cuda, backend, kind, layout):
    bench = Bench(cuda, kind, layout, backend)
    contents = [bench.content(seed) for seed in range(3)]
    host = bench.engine.host_slots.alloc(3 * bench.kind.page_size)
    # The first transfer loads the kernels and allocates their arguments, the second one is judged.
    for page, content in enumerate(contents):
        bench.run_kernel(page, content)
    bench.engine.load(host, bench.slots(3, 4, 5)).synchronize()
    bench.engine.write_back(bench.slots(0, 1, 2), host).wait()
    with torch.cuda.stream(bench.compute.native):
        torch.cuda._sleep(LONG_CYCLES)
    acknowledgement = bench.engine.write_back(bench.slots(0, 1, 2), host)
    counter = bench.engine.load(host, bench.slots(4, 3, 5))
    assert not acknowledgement.done()
    assert counter.arrived() == 0
    seen = bench.read_pages((4, 3, 5), counter)
    bench.finish()
    assert all(map(same, seen, contents))


def test_events_are_as_the_simulator_has_them():
    device = CudaDevice()
    stream, event = device.stream("a"), device.event()
    assert event.query()
    event.synchronize()
    stream.wait_event(event)
    event = recorded(device, stream)
    stream.synchronize()
    assert event.query()
    with pytest.raises(TypeError, match="CUDA events"):
        stream.wait_event(object())


def test_the_runtime_is_the_one_that_torch_uses():
    version = ctypes.c_int()
    assert cuda_runtime().cudaRuntimeGetVersion(ctypes.byref(version)) == 0
    major, minor = map(int, torch.version.cuda.split("."))
    assert (version.value // 1000, version.value % 1000 // 10) >= (major, minor)


def test_mapped_memory_is_the_same_memory():
    memory = host_tensor((4, 6), torch.int16)
    memory.zero_()
    mapped = CudaDevice().mapped(memory[2:])
    assert (mapped.shape, mapped.dtype, mapped.device.type) == ((2, 6), torch.int16, "cuda")
    mapped.fill_(7)
    torch.cuda.synchronize()
    assert memory.tolist() == [[0] * 6] * 2 + [[7] * 6] * 2
    memory.fill_(9)
    del memory
    assert mapped.cpu().tolist() == [[9] * 6] * 2


def test_memory_that_is_not_page_locked_is_refused():
    with pytest.raises(InvalidPoolError, match="pin_memory=True"):
        CudaDevice().mapped(torch.zeros(1 << 20))


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
    with pytest.raises(InvalidPoolError, match="kernels cannot reach"):
        CudaDevice().mapped(torch.zeros(1 << 20))
    assert launches()
    monkeypatch.setattr(torch.cuda, "cudart", Twice(torch.cuda.cudart()))
    with pytest.raises(InvalidPoolError, match="CUDA cannot lock"):
        host_tensor((1 << 20,), torch.uint8)
    assert launches()


def test_a_copy_that_cuda_refuses_is_named(monkeypatch):
    monkeypatch.setattr(
        "hicache_storage.transfer.cuda.runtime.rectangles",
        lambda to, source: [(to.data_ptr(), 1, source.data_ptr(), 1, 64, 2)],
    )
    device = torch.zeros(128, dtype=torch.uint8, device="cuda")
    with pytest.raises(StreamFailedError, match="2 rows of 64 bytes failed with CUDA error"):
        copy_with_gaps(device, host_tensor((128,), torch.uint8), torch.cuda.current_stream())
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
    with pytest.raises(ConfigError, match=r"device is 'cuda:99', and there are \d+ CUDA devices"):
        CudaDevice("cuda:99")
    with pytest.raises(ConfigError, match="must be a CUDA device"):
        CudaDevice("cpu")


def test_no_memory_for_staging_is_said_when_the_engine_is_made():
    with pytest.raises(InvalidPoolError, match="staging on cuda:0"):
        CudaDevice("cuda:0").scratch(1 << 50, [])
    assert launches()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", BACKENDS)
def test_pools_of_a_device_that_is_not_the_current_one(backend):
    """Memory is locked while the first device is current, and copied to and from the second."""
    place = Cuda("cuda")
    place.where, place.device = "cuda:1", CudaDevice("cuda:1")
    bench = Bench(place, "mha", "page_first", backend)
    content = bench.content(0)
    torch.cuda.synchronize(1)
    host = bench.engine.host_slots.alloc(bench.kind.page_size)
    bench.run_kernel(0, content, at_once=True)
    bench.engine.write_back(bench.slots(0), host).wait()
    counter = bench.engine.load(host, bench.slots(3))
    counter.synchronize()
    seen = [
        [part[3] for part in bench.device_pool.layer(layer)]
        for layer in range(bench.device_pool.layer_num)
    ]
    bench.finish()
    assert same(seen, content)
