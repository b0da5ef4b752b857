"""Copies of pages between device and host: every pool and layout, refused arguments."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from transfer_bench import KINDS, PAGE, PAGES, POOLS, Bench, fill, one_pool, same

from hicache_storage.pools import DevicePages
from hicache_storage.spec import InvalidPoolError, InvalidTransferError
from hicache_storage.transfer import Indices
from hicache_storage.transfer.pool_copies import IN, OUT


@pytest.mark.parametrize(("kind", "layout"), POOLS)
@pytest.mark.parametrize(
    ("way", "staging_bytes"), [(None, 1), ("kernel", 1), ("dma", 1), ("dma", 1 << 20)]
)
def test_pages_come_back_as_they_went(simulated, kind, layout, way, staging_bytes):
    bench = Bench(simulated, kind, layout, way, staging_bytes=staging_bytes)
    contents, pages, elsewhere = (
        [bench.content(seed) for seed in range(4)],
        (3, 1, 2, 5),
        (0, 5, 4, 2),
    )
    for page, content in zip(pages, contents, strict=True):
        bench.run_kernel(page, content)
    host = torch.cat([bench.alloc() for _ in pages]).view(4, -1)[[2, 3, 0, 1]].view(-1)
    acknowledgement = bench.write_back(bench.slots(*pages), host)
    counter = bench.load(host, bench.slots(*elsewhere))
    seen = bench.read_pages(elsewhere, counter)
    untouched = bench.read(1)
    bench.finish()
    assert acknowledgement.done()
    assert all(map(same, seen, contents))
    assert same(untouched, contents[1])
    assert _poisoned(bench, host)


def _poisoned(bench, used):
    """Return True if unused host pages are unchanged."""
    pages = set(range(PAGES)) - {slot // bench.kind.page_size for slot in used.tolist()}
    parts = [part[page] for page in pages for layer in bench.host_pool._layers for part in layer]
    expected = [torch.empty_like(part) for part in parts]
    for tensor in expected:
        fill(tensor, 0xA5)
    return len(pages) == 2 and same([parts], [expected])


def test_indices_that_do_not_fit_are_refused(simulated):
    bench = Bench(simulated, "mha", "page_first", None)
    host = bench.alloc(2)
    for wrong in (
        bench.slots(0),
        bench.slots(0, 1)[1:],
        torch.arange(1, 5),
        torch.tensor([], dtype=torch.int64),
    ):
        with pytest.raises(InvalidTransferError):
            bench.write_back(wrong, host)
    with pytest.raises(InvalidTransferError, match="device_indices must be slots in"):
        bench.write_back(bench.slots(0, PAGES), host)
    with pytest.raises(InvalidTransferError, match="host_indices must be slots in"):
        bench.load(bench.slots(0, -1), bench.slots(0, 1))
    with pytest.raises(InvalidTransferError, match="host_indices hold a page twice"):
        bench.write_back(bench.slots(0, 1), bench.slots(2, 2))
    with pytest.raises(InvalidTransferError, match="device_indices hold a page twice"):
        bench.load(bench.slots(0, 1), bench.slots(2, 2))
    simulated.check()
    assert not any(fences._count for fences in bench.pool._fences.values())


def test_repeated_pages_are_found(simulated):
    """Only where they are written."""
    bench = Bench(simulated, "mha", "page_first", None)
    for pages in [*itertools.product(range(4), repeat=4), (0,) * (PAGES + 1)]:
        written, read = bench.slots(*pages), bench.slots(*[1] * len(pages))
        for direction, indices in ((OUT, (read, written)), (IN, (written, read))):
            with (
                pytest.raises(InvalidTransferError, match="hold a page twice")
                if len(set(pages)) < len(pages)
                else nullcontext()
            ):
                bench.pool.pages(direction, Indices(*indices))


def test_pools_that_do_not_fit_are_refused(simulated):
    device, host = KINDS["mha"].pair("page_first", "cpu")
    compute = simulated.device.stream("compute")
    for layers, field in (
        (device.layers[1:], "layer_num is 3 in the host pool and 2 in the device pages"),
        ([(v, k) for k, v in device.layers], "element type and shape of the rows of layer 0 is"),
        (
            [(k.view(torch.int16), v) for k, v in device.layers],
            "element type and shape of the rows of layer 0 is",
        ),
    ):
        with pytest.raises(InvalidPoolError, match=field):
            one_pool(simulated.device, compute, DevicePages(layers, PAGE), host)
    with pytest.raises(InvalidPoolError, match="page_size is 2 in the host pool and 4 in"):
        one_pool(simulated.device, compute, DevicePages(device.layers, 2 * PAGE), host)
    _, other = KINDS["mla"].pair("page_first", "cpu")
    with pytest.raises(InvalidPoolError, match="MHADevicePool is backed up by MHAHostPool"):
        one_pool(simulated.device, compute, device, other)
    with pytest.raises(InvalidTransferError, match="way must be None or one of kernel, dma"):
        one_pool(simulated.device, compute, device, host, way="auto")
