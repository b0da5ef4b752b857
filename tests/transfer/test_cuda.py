"""The same copies on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from hicache_storage.pools import MHAHostPool
from hicache_storage.transfer import CudaDevice, DevicePages, HostPages, PageTransfers, recorded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def slots(*pages):
    return torch.tensor([page * 16 + offset for page in pages for offset in range(16)])


@pytest.mark.parametrize("layout", MHAHostPool.LAYOUTS)
def test_pages_come_back_as_they_went(layout):
    pool = MHAHostPool(size=128, page_size=16, layer_num=4, head_num=8, head_dim=64, dtype=torch.bfloat16, layout=layout)
    layers = [[torch.randn(128, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in "KV"] for _ in range(4)]
    before = [[tensor.clone() for tensor in tensors] for tensors in layers]
    device = CudaDevice()
    compute = device.stream("compute")
    torch.cuda.synchronize()
    engine = PageTransfers(device, compute, DevicePages(layers, 16), HostPages(pool), pool)
    host = engine.host_slots.alloc(32)
    acknowledgement = engine.write_back(slots(7, 1), host)
    engine.before_overwrite(slots(7, 1))
    for tensors in layers:
        for tensor in tensors:
            compute.copy(tensor[112:128], torch.zeros_like(tensor[112:128]), "kernel")
    counter = engine.load(host, slots(0, 2))
    counter.wait(3, compute)
    compute.synchronize()
    assert acknowledgement.done()
    assert counter.arrived() == 4
    for tensors, old in zip(layers, before, strict=True):
        for tensor, was in zip(tensors, old, strict=True):
            assert torch.equal(tensor[slots(0, 2)], was[slots(7, 1)])
            assert not tensor[112:128].any()


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
