"""CUDA code that needs no GPU: aliases of memory, and error types."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hicache_storage.pools import host_tensor
from hicache_storage.transfer import CudaEvent, CudaStream, StreamFailedError
from hicache_storage.transfer.cuda.runtime import relabelled

DL_CPU = 1


def test_memory_under_another_name_is_the_same_memory():
    memory = torch.arange(64, dtype=torch.uint8)
    other = relabelled(memory, memory.data_ptr(), DL_CPU, 0)
    assert (other.shape, other.dtype, other.device.type) == ((64,), torch.uint8, "cpu")
    other[3] = 200
    assert memory[3] == 200


def test_it_lies_where_it_is_said_to():
    """As mapped memory may, where a device has an address of its own for it."""
    memory = torch.arange(64, dtype=torch.uint8)
    shifted = relabelled(memory[:32], memory.data_ptr() + 16, DL_CPU, 0)
    assert torch.equal(shifted, memory[16:48])


def test_it_keeps_the_memory_and_no_longer_than_itself():
    memory = host_tensor((4096,), torch.uint8)
    alive = weakref.ref(memory.untyped_storage())
    other = relabelled(memory, memory.data_ptr(), DL_CPU, 0)
    memory.fill_(7)
    view = other[10:20]
    del memory, other
    gc.collect()
    assert view.tolist() == [7] * 10
    del view
    gc.collect()
    assert alive() is None


class Failed:
    """An event or a stream after a kernel has failed."""

    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    synchronize = query


@pytest.mark.parametrize(
    ("kind", "call"),
    [(CudaEvent, "query"), (CudaEvent, "synchronize"), (CudaStream, "synchronize")],
)
def test_a_failed_kernel_is_a_failed_stream(kind, call):
    made = kind.__new__(kind)
    made.native, made._is_recorded = Failed(), True
    with pytest.raises(StreamFailedError, match="illegal memory access"):
        getattr(made, call)()
