"""CUDA calls of copies, with the driver replaced: their arguments, executed by the CPU, and that
their number does not grow with the pages."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from hicache_storage.spec import ConfigError, InvalidTransferError
from hicache_storage.transfer import CudaStream, StreamFailedError, copies, host_slots, plan
from hicache_storage.transfer.cuda import device as cuda_module
from hicache_storage.transfer.cuda import driver as driver_module
from hicache_storage.transfer.cuda import kernel as kernel_module
from hicache_storage.transfer.plan import WAYS
from tests.transfer.rig import (
    FIELDS,
    LAYERS,
    ONE_POOL,
    PAGE,
    PAGES,
    POISON,
    fill,
    launch,
    moved,
    one_pool,
    page_slots,
    poison,
    pools_of,
    random_bytes,
    raw,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from stubbed_cuda import CurrentDevice, StubbedDevice, stubbed


def engine(kind, layout, way, pages=PAGES, staging_bytes=1, device=None):
    """An engine, and its two pools."""
    device = device or StubbedDevice()
    pools = pools_of(kind, layout, pages=pages)
    compute = device.stream("compute")
    with patch.object(copies, "STAGING_BYTES", staging_bytes):
        return one_pool(device, compute, *pools, way=way), *pools


def parts(pool):
    return [part for layer in range(LAYERS) for part in pool.layer(layer)]


@pytest.mark.parametrize(("kind", "layout"), ONE_POOL)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("max_pieces", "load_groups"),
    [(copies.MAX_PIECES, LAYERS), (2 * LAYERS, LAYERS), (copies.MAX_PIECES, 2)],
)
def test_every_address_is_right(monkeypatch, kind, layout, way, max_pieces, load_groups):
    """Pages go out and come back elsewhere, moved by the CPU at the addresses that CUDA is given."""
    monkeypatch.setattr(copies, "MAX_PIECES", max_pieces)
    monkeypatch.setattr(plan, "LOAD_GROUPS", load_groups)
    size, generator = FIELDS[kind]["page_size"], torch.Generator().manual_seed(1)
    out, host, back = [5, 0, 3, 1], [1, 2, 5, 4], [0, 2, 3, 4]
    with stubbed(launch) as calls:
        made, on_device, on_host = engine(kind, layout, way)
        poison(on_device, on_host)
        for part in parts(on_device):
            part.copy_(random_bytes(part, generator))
        before = [part.clone() for part in parts(on_device)]
        made.write_back(moved(page_slots(out, size), page_slots(host, size)))
        for part in parts(on_device):
            fill(part, POISON)
        made.load(moved(page_slots(back, size), page_slots(host, size)))
    assert bool(calls["DMA"]) == (way == "dma")
    for part, old in zip(parts(on_device), before, strict=True):
        assert torch.equal(raw(part[back]), raw(old[out]))
    for pool, used in ((on_device, back), (on_host, host)):
        for part in parts(pool):
            assert all(raw(part[page]).eq(POISON).all() for page in set(range(PAGES)) - set(used))


@pytest.mark.parametrize("layout", [layout for kind, layout in ONE_POOL if kind == "mha"])
@pytest.mark.parametrize("way", WAYS)
def test_the_number_of_calls_does_not_grow_with_the_pages(way, layout):
    """Pages of which no two are adjacent on either side."""
    counts = []
    for pages in (64, 512):
        with stubbed() as calls:
            made, *_ = engine("mha", layout, way, 2 * pages, staging_bytes=1 << 20)
            separate = page_slots(range(0, 2 * pages, 2), PAGE)
            made.write_back(moved(separate, separate))
            made.load(moved(separate, separate))
        counts.append(calls)
    if way == "kernel":
        assert counts[0] == counts[1] == {"upload": 2, "kernel": 2 * (1 + LAYERS)}
    # K and V have other lengths here; and the kernel takes what DMA leaves.
    assert counts[1].total() <= 2 + 2 * 2 * LAYERS * 2


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_transfer_leaves_a_bounded_number_of_pieces_to_dma(monkeypatch, layout):
    """A stream's queue has no more places, and a call that finds none waits."""
    pieces, pages = [], page_slots(range(0, 32, 2), PAGE)

    def count(to, origin, number, size, stream):
        pieces.append(number)
        return 0

    monkeypatch.setattr(copies, "MAX_PIECES", 24)
    with stubbed():
        made, *_ = engine("mla", layout, "dma", 32)
        monkeypatch.setattr(cuda_module, "copy_pieces", count)
        made.write_back(moved(pages, pages))
        assert 0 < sum(pieces) <= 24
        pieces.clear()
        made.load(moved(pages, pages))
        assert sum(pieces) <= 24


@pytest.mark.parametrize(
    ("stub", "call", "message"),
    [
        ((kernel_module, "launch"), "load", "load of layer 0 failed with CUDA error 1"),
        ((cuda_module, "copy_pieces"), "write_back", "write-back of 3 layers failed"),
        ((cuda_module, "memcpy"), "load", "upload failed with CUDA error 1"),
    ],
)
def test_what_cuda_refuses_is_named(stub, call, message):
    pages = page_slots([1, 4], PAGE)
    with stubbed():
        made, *_ = engine("mla", "page_first", "dma")
        transfer = getattr(made, call)
        with (
            patch.object(*stub, lambda *arguments: 1),
            pytest.raises(StreamFailedError, match=message),
        ):
            transfer(moved(pages, pages))


def test_kernels_are_launched_in_the_context_of_their_device(monkeypatch):
    """CUDA launches in the calling thread's current device, and refuses a stream of another."""
    pages, used = page_slots([1, 4], PAGE), []
    with stubbed():
        made, *_ = engine("mla", "page_first", "dma", device=StubbedDevice(1))
        monkeypatch.setattr(
            kernel_module, "launch", lambda *arguments: used.append(CurrentDevice.number) or 0
        )
        made.write_back(moved(pages, pages))
        made.load(moved(pages, pages))
    assert len(used) > 2
    assert set(used) == {1}
    assert CurrentDevice.number == 0


class Driver:
    """As much of NVIDIA's bindings as copies by DMA need; notes what CUDA is called with."""

    def __init__(self, knows_batches):
        self.calls, self._knows_batches = [], knows_batches
        array, size = ctypes.c_void_p, ctypes.c_size_t

        @ctypes.CFUNCTYPE(ctypes.c_int, *[array] * 3, size, array, array, size, array, array)
        def batch(*arguments):
            self.calls.append(arguments)
            self.attributes = list((ctypes.c_int * 6).from_address(arguments[4]))
            self.first = ctypes.c_size_t.from_address(arguments[5]).value
            return 0

        self._batch = batch

    def cuGetProcAddress(self, name, version, flags):
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
        address = ctypes.cast(self._batch, ctypes.c_void_p).value
        return (0, address, 0) if self._knows_batches else (1, 0, 0)

    def use(self, monkeypatch):
        monkeypatch.setattr(driver_module, "driver", lambda: self)
        uncached = driver_module.memcpy_batch.__wrapped__
        monkeypatch.setattr(driver_module, "memcpy_batch", uncached)


def test_batches_are_called_as_cuda_declares_them(monkeypatch):
    driver = Driver(knows_batches=True)
    driver.use(monkeypatch)
    assert driver_module.copy_pieces(11, 12, 4, 9, 15) == 0
    (arguments,) = driver.calls
    assert (*arguments[:2], arguments[3], arguments[6], arguments[8]) == (11, 12, 4, 1, 15)
    assert list((ctypes.c_size_t * 4).from_address(arguments[2])) == [9] * 4
    # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, no hints, no flags, for all copies from the first on.
    assert (driver.attributes, driver.first) == ([1, 0, 0, 0, 0, 0], 0)


def test_a_driver_without_batches_is_refused(monkeypatch):
    Driver(knows_batches=False).use(monkeypatch)
    monkeypatch.setattr(kernel_module, "memcpy_batch", driver_module.memcpy_batch)
    with pytest.raises(ConfigError, match=r"CUDA 12\.8 or later"):
        kernel_module.kernel("sm_90", 16)


# What is used again
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_no_transfer_locks_memory_or_makes_events(monkeypatch, way):
    """Either may wait for the device, or costs as much as a small copy."""
    monkeypatch.setattr(host_slots, "KEPT_EVENTS", 8)
    with stubbed():
        made, *_ = engine("mha", "page_first_direct", way, 32)
        pages = page_slots(range(0, 32, 2), PAGE)

        def transfers(times):
            for _ in range(times):
                made.write_back(moved(pages, pages))
                made.load(moved(pages, pages))
                made.host_slots["pool"].available_size()

        # Fences keep the last events.
        transfers(10)
        with (
            patch.object(cuda_module, "_pinned") as pinned,
            patch.object(torch.cuda, "Event") as native,
        ):
            transfers(20)
        assert not pinned.called
        assert not native.called


def test_a_buffer_is_used_again_when_its_upload_is_over():
    numbers = np.array([[5, 7], [1, 2]])
    with stubbed():
        device = StubbedDevice()
        table, stream = device.page_table(8), device.stream("a")
        for _ in range(cuda_module.PREPARED_UPLOADS):
            stream.upload(table, numbers)
        (buffer, uploaded), *_ = table.used
        assert buffer[:4].tolist() == [5, 7, 1, 2]
        assert table.rows[1] - table.rows[0] == 16
        with patch.object(uploaded, "query", lambda: False):
            assert table.fill(numbers) is not buffer
        assert table.fill(numbers) is buffer


def test_nothing_goes_into_a_graph_that_is_being_captured():
    with stubbed():
        device = StubbedDevice()
        stream = device.stream("compute")
        event = stream.record()
        with patch.object(cuda_module, "is_capturing", lambda stream: True):
            for call in (lambda: stream.wait_event(event), stream.record):
                with pytest.raises(InvalidTransferError, match="being captured"):
                    call()


class Failed:
    """A stream of torch after a kernel has failed, and its events."""

    cuda_stream = 1

    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    synchronize = query


def test_a_failed_kernel_is_a_failed_stream():
    with stubbed():
        stream = CudaStream(Failed())
        with patch.object(torch.cuda, "Event") as made:
            made.return_value.query = made.return_value.synchronize = Failed().query
            event = stream.record()
    for call in (event.query, event.synchronize, stream.synchronize):
        with pytest.raises(StreamFailedError, match="illegal memory access"):
            call()
