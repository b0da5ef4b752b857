"""The kernel that copies rows: every pool and layout, both ways, by the numbers; run without a GPU,
block by block."""

from __future__ import annotations

import pytest
import torch
from transfer_bench import KINDS, LAYERS, PAGES, POOLS, random_bytes, raw
from triton_stand_in import triton_on_the_cpu

from hicache_storage.spec import InvalidPoolError
from hicache_storage.transfer import HostPages
from hicache_storage.transfer.regions.rows import move_rows


@pytest.fixture
def row_kernel(monkeypatch):
    with triton_on_the_cpu() as module:
        yield module


@pytest.mark.parametrize(("kind", "layout"), POOLS)
@pytest.mark.parametrize(("blocks", "tile"), [(1, 4096), (3, 32)])
def test_rows_go_where_their_numbers_say(monkeypatch, row_kernel, kind, layout, blocks, tile):
    monkeypatch.setattr(row_kernel, "TILE_WORDS", tile)
    device_pool, host_pool = KINDS[kind].pair(layout, "cpu")
    generator, host_pages = torch.Generator().manual_seed(0), HostPages(host_pool)
    there, here = torch.tensor([4, 0, 3]), torch.tensor([1, 5, 2])
    for layer in range(LAYERS):
        for device, host in zip(device_pool.layer(layer), host_pages.layer(layer), strict=True):
            for destination, source in ((host, device), (device, host)):
                destination.copy_(random_bytes(destination, generator))
                source.copy_(random_bytes(source, generator))
                expected = destination.clone()
                move_rows(expected, there, source, here)
                row_kernel.launch(destination, there, source, here, blocks)
                assert torch.equal(raw(destination), raw(expected))


def test_no_rows_are_no_copy(row_kernel):
    memory, none = torch.arange(12).view(PAGES, 2), torch.zeros(0, dtype=torch.int64)
    row_kernel.launch(memory, none, memory.clone().neg(), none, 2)
    assert torch.equal(memory, torch.arange(12).view(PAGES, 2))


def test_rows_that_it_cannot_copy_are_refused(row_kernel):
    memory = torch.zeros(2, 3, 6, 5, 4)
    with pytest.raises(InvalidPoolError, match="gaps along 3 axes"):
        row_kernel.launch(
            torch.zeros(2, 2, 2, 3, 2),
            torch.tensor([0]),
            memory[:, :2, ::4, :3, :2],
            torch.tensor([1]),
            1,
        )
