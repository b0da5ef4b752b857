"""CUDA calls of copies, with the runtime replaced: their arguments, and that their number does not
grow with the pages."""

from __future__ import annotations

import ctypes
import sys
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transfer_bench import KINDS, LAYERS, PAGES, POOLS, fill, random_bytes, raw

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer import PageTransfers, StreamFailedError, fences
from hicache_storage.transfer.cuda import device as cuda_module
from hicache_storage.transfer.cuda import runtime as cuda_runtime
from hicache_storage.transfer.uploads import UploadBuffers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from stubbed_cuda import StubbedDevice, stubbed


def engine(kind, layout, backend, pages=PAGES, *, moves_rows=False):
    device = StubbedDevice(moves_rows=moves_rows)
    device_pool, host_pool = KINDS[kind].pair(layout, "cpu", pages)
    return PageTransfers.between(
        device, device.stream("compute"), device_pool, host_pool, backend=backend
    )


def slots(pages, page_size):
    return (torch.tensor(pages).unsqueeze(1) * page_size + torch.arange(page_size)).view(-1)


def parts(engine, side):
    return [part for layer in range(LAYERS) for part in getattr(engine, side).layer(layer)]


@pytest.mark.parametrize(("kind", "layout"), POOLS)
@pytest.mark.parametrize(
    ("backend", "batches"), [*product(("direct", "kernel"), (True, False)), ("mapped", True)]
)
@pytest.mark.parametrize("separate", [True, False])
def test_every_address_is_right(monkeypatch, kind, layout, backend, batches, separate):
    """Pages go out and come back elsewhere, moved by the host at the addresses that CUDA would be
    given."""
    # Few pages make few rectangles; they are to be batches as well.
    monkeypatch.setattr(cuda_runtime, "FEW_CALLS", 0 if separate else 8)
    size, generator = KINDS[kind].page_size, torch.Generator().manual_seed(1)
    out, host, back = (
        ([5, 0, 3, 1], [1, 2, 5, 4], [0, 2, 3, 4])
        if separate
        else ([1, 2, 3, 4], [2, 3, 4, 5], [0, 1, 2, 3])
    )
    with stubbed(executes=True, batches=batches) as calls:
        made = engine(kind, layout, backend)
        for part in parts(made, "_device_pages"):
            part.copy_(random_bytes(part, generator))
        before = [part.clone() for part in parts(made, "_device_pages")]
        for part in parts(made, "_host_pages"):
            fill(part, 0xA5)
        made.write_back(slots(out, size), slots(host, size))
        for part in parts(made, "_device_pages"):
            fill(part, 0xA5)
        made.load(slots(host, size), slots(back, size))
    assert bool(calls["batch"]) == (backend != "mapped" and batches and separate)
    for part, old in zip(parts(made, "_device_pages"), before, strict=True):
        assert torch.equal(raw(part[back]), raw(old[out]))
        assert all(raw(part[page]).eq(0xA5).all() for page in set(range(PAGES)) - set(back))
    for part in parts(made, "_host_pages"):
        assert all(raw(part[page]).eq(0xA5).all() for page in set(range(PAGES)) - set(host))


@pytest.mark.parametrize("layout", KINDS["mha"].host.LAYOUTS)
@pytest.mark.parametrize("backend", ["direct", "kernel", "mapped", "mapped without Triton"])
def test_the_number_of_calls_does_not_grow_with_the_pages(backend, layout):
    """Pages of which no two are adjacent on either side."""
    name, _, how = backend.partition(" ")
    counts = []
    for pages in (64, 512):
        with stubbed() as calls:
            made = engine("mha", layout, name, 2 * pages, moves_rows=not how)
            separate = slots([2 * page for page in range(pages)], KINDS["mha"].page_size)
            made.write_back(separate, separate)
            made.load(separate, separate)
        counts.append(calls)
    assert counts[0] == counts[1]
    assert counts[1].total() <= 4 * LAYERS * len("KV") + 4


def scattered_write_back():
    made, pages = (
        engine("mha", "layer_first", "direct", 32),
        slots(range(0, 32, 2), KINDS["mha"].page_size),
    )
    made.write_back(pages, pages)


def test_a_batch_that_cuda_refuses_is_named():
    with (
        stubbed(),
        patch.object(cuda_runtime, "forget_error") as forgotten,
        patch.object(cuda_runtime, "memcpy_batch", lambda: lambda *arguments: 1),
        pytest.raises(StreamFailedError, match="copy of 16 pieces failed with CUDA error 1"),
    ):
        scattered_write_back()
    forgotten.assert_called()


@pytest.mark.parametrize("error", [36, 801])
def test_a_driver_that_knows_no_batches_gets_single_copies(error):
    with (
        stubbed() as calls,
        patch.object(cuda_runtime, "forget_error"),
        patch.object(cuda_runtime, "memcpy_batch", lambda: lambda *arguments: error),
    ):
        scattered_write_back()
    assert calls == {"copy": 16 * LAYERS * len("KV")}


class Runtime:
    """As much of CUDA's runtime as the binding of batches needs; notes what it is called with."""

    def __init__(self, version):
        self.calls = []

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        def version_of(address):
            ctypes.c_int.from_address(address).value = version
            return 0

        self.cudaRuntimeGetVersion = version_of
        pointers = (ctypes.c_void_p,) * (1 if version < 13000 else 0)
        kinds = (
            *(ctypes.c_void_p,) * 3,
            ctypes.c_size_t,
            *(ctypes.c_void_p,) * 2,
            ctypes.c_size_t,
            *pointers,
            ctypes.c_void_p,
        )

        @ctypes.CFUNCTYPE(ctypes.c_int, *kinds)
        def batch(*arguments):
            self.calls.append(arguments)
            self.attributes = list((ctypes.c_int * 6).from_address(arguments[4]))
            self.first = ctypes.c_size_t.from_address(arguments[5]).value
            return 0

        self.cudaMemcpyBatchAsync = batch


@pytest.mark.parametrize(("version", "length"), [(12080, 9), (12090, 9), (13000, 8)])
def test_batches_are_called_as_each_runtime_declares_them(monkeypatch, version, length):
    runtime = Runtime(version)
    monkeypatch.setattr(cuda_runtime, "cuda_runtime", lambda: runtime)
    uncached(monkeypatch)
    assert cuda_runtime.memcpy_batch()(11, 12, 13, 14, 15) == 0
    (arguments,) = runtime.calls
    assert len(arguments) == length
    assert (*arguments[:4], arguments[6], arguments[-1]) == (11, 12, 13, 14, 1, 15)
    # cudaMemcpySrcAccessOrderStream, no hints, no flags, for all copies from the first on.
    assert (runtime.attributes, runtime.first) == ([1, 0, 0, 0, 0, 0], 0)


def test_runtimes_before_batches_have_none(monkeypatch):
    monkeypatch.setattr(cuda_runtime, "cuda_runtime", lambda: Runtime(12060))
    uncached(monkeypatch)
    assert cuda_runtime.memcpy_batch() is None


def uncached(monkeypatch):
    for name in ("memcpy_batch", "runtime_version"):
        monkeypatch.setattr(cuda_runtime, name, getattr(cuda_runtime, name).__wrapped__)


# What is used again
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["kernel", "mapped"])
def test_no_transfer_locks_memory_or_makes_events(monkeypatch, backend):
    """Either may wait for the device, or costs as much as a small copy."""
    monkeypatch.setattr(fences, "SWEEP_EVENTS", 8)
    with stubbed():
        made, pages = (
            engine("mha", "page_first", backend, 32),
            slots(range(0, 32, 2), KINDS["mha"].page_size),
        )

        def transfers():
            for _ in range(20):
                made.write_back(pages, pages)
                made.load(pages, pages)
                made.host_slots.available_size()

        # Fences keep events until they are swept.
        transfers()
        with (
            patch.object(cuda_module, "_pinned") as pinned,
            patch("stubbed_cuda._Native") as native,
        ):
            transfers()
        assert not pinned.called
        assert not native.called


class Uploaded:
    """An event that comes when it is told to."""

    def __init__(self):
        self.over = True

    def query(self):
        return self.over


def test_a_buffer_is_used_again_when_its_upload_is_over():
    sizes = []
    buffers = UploadBuffers(
        lambda rows: sizes.append(rows) or torch.zeros(rows, dtype=torch.int64), Uploaded
    )
    first, uploaded = buffers.take(3)
    uploaded.over = False
    second, _ = buffers.take(3)
    assert first.data_ptr() != second.data_ptr()
    uploaded.over = True
    assert buffers.take(5)[0].data_ptr() == first.data_ptr()
    assert buffers.take(5000)[0].numel() == 5000
    assert sizes == [4096, 4096, 8192]


def test_an_event_that_was_used_before_is_complete_until_it_is_recorded():
    with stubbed():
        device = StubbedDevice()
        event = device.event()
        event.record(device.stream("a"))
        native = event.native
        del event
        again = device.event()
        assert again.native is native
        native.query = lambda: False
        assert again.query()
        again.record(device.stream("a"))
        assert not again.query()


def test_nothing_goes_into_a_graph_that_is_being_captured():
    with stubbed():
        device = StubbedDevice()
        stream, event = device.stream("compute"), device.event()
        with patch.object(cuda_module, "is_capturing", lambda stream: True):
            for call in (lambda: stream.wait_event(event), lambda: event.record(stream)):
                with pytest.raises(InvalidTransferError, match="being captured"):
                    call()
