"""What only a CUDA device shows; the rules that copies keep are in `test_stream_rules.py`, on both."""

from __future__ import annotations

import ctypes

import pytest
import torch
from transfer_bench import POOLS, Bench, Cuda, same

from hicache_storage.pools import host_tensor
from hicache_storage.spec import InvalidPoolError
from hicache_storage.transfer import BACKENDS, CudaDevice, recorded

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
    # The first transfer allocates staging, the second one is judged.
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
    from hicache_storage.transfer.cuda_runtime import _loaded_runtime

    torch.cuda.init()
    version = ctypes.c_int()
    assert _loaded_runtime().cudaRuntimeGetVersion(ctypes.byref(version)) == 0
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
