"""Two places where copies run, the simulator and a GPU, and pairs of pools of every kind and layout
between which they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hicache_storage.pools import (
    IndexerDevicePool,
    IndexerHostPool,
    MambaDevicePool,
    MambaHostPool,
    MHADevicePool,
    MHAHostPool,
    MLADevicePool,
    MLAHostPool,
)
from hicache_storage.transfer import CudaDevice, PageTransfers
from hicache_storage.transfer.simulator import Hold, StreamSimulator

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, PAGES, PAGE = 3, 6, 2
STAGED = "mapped staged"
"""The backend `mapped` where there is no Triton."""
POISON = 0xA5
HOLD_SECONDS = 30
SLEEP_CYCLES = 50_000_000
"""A few hundredths of a second on today's GPUs: longer than any copy here, so that what does not
wait comes first."""


@dataclass(frozen=True)
class PoolKind:
    """A device pool and the host pool that backs it up, made of the same arguments."""

    device: Callable[..., Any]
    host: Callable[..., Any]
    arguments: dict[str, Any]
    page_size: int = PAGE

    def pair(self, layout, where, pages=PAGES):
        arguments = dict(self.arguments, size=pages * self.page_size, layer_num=LAYERS)
        return self.device(**arguments, device=where), self.host(**arguments, layout=layout)


KINDS = {
    "mha": PoolKind(
        MHADevicePool,
        MHAHostPool,
        {"page_size": PAGE, "head_num": 2, "head_dim": 6, "v_head_dim": 4, "dtype": torch.bfloat16},
    ),
    "mla": PoolKind(
        MLADevicePool,
        MLAHostPool,
        {"page_size": PAGE, "kv_cache_dim": 5, "dtype": torch.float8_e4m3fn},
    ),
    "mamba": PoolKind(
        MambaDevicePool,
        MambaHostPool,
        {
            "temporal_shape": (2, 3),
            "conv_shapes": ((5,), (3, 2)),
            "temporal_dtype": torch.float32,
            "conv_dtype": torch.bfloat16,
        },
        page_size=1,
    ),
    "indexer": PoolKind(
        IndexerDevicePool,
        IndexerHostPool,
        {"page_size": PAGE, "index_head_dim": 32, "quant_block_size": 16},
    ),
}
POOLS = [(name, layout) for name, kind in KINDS.items() for layout in kind.host.LAYOUTS]


class Simulated:
    """The simulator: copies run piece by piece at random times, and what nothing orders is found
    whenever it ran."""

    where = "cpu"

    def __init__(self, seed, pause_seconds=0.0003):
        self.device = StreamSimulator(seed, pause_seconds=pause_seconds)

    def take_triton_away(self):
        self.device.moves_rows = False

    def delay(self, stream, times=1):
        """Nothing: the verdict does not depend on time."""

    def host(self, what, **touched):
        self.device.host(what, **touched)

    def hold(self, tensors):
        return self.device.hold(tensors, HOLD_SECONDS)

    def check(self):
        assert not self.device.races, str(self.device.races[0])

    def close(self):
        self.device.close()


class Cuda:
    """A GPU: kernels that take their time keep streams back, so that a copy that does not wait
    finds poison."""

    where = "cuda"

    def __init__(self, seed):
        self.device = CudaDevice()
        torch.cuda.synchronize()

    def take_triton_away(self):
        self.device._moves_rows = False

    def delay(self, stream, times=1):
        with torch.cuda.stream(stream.native):
            torch.cuda._sleep(times * SLEEP_CYCLES)

    def host(self, what, **touched):
        """Nothing: the host has waited for what it looks at."""

    def hold(self, tensors):
        """Nothing that can be released: a delay keeps the copies in flight."""
        return Hold([], 0)

    def check(self):
        """Nothing: the bytes tell."""

    def close(self):
        torch.cuda.synchronize()


PLACES = [
    pytest.param(Simulated, id="simulator"),
    pytest.param(
        Cuda,
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


class Bench:
    """A pair of pools full of poison, the engine between them, and kernels that write and read
    device pages."""

    def __init__(self, place, kind, layout, backend, *, staging_bytes=1):
        self.place, self.kind = place, KINDS[kind]
        if backend == STAGED:
            backend = "mapped"
            place.take_triton_away()
        self.device_pool, self.host_pool = self.kind.pair(layout, place.where)
        for buffer in self.host_pool.buffers:
            fill(buffer, POISON)
        for layer in range(LAYERS):
            for part in self.device_pool.layer(layer):
                fill(part, POISON)
        self.compute = place.device.stream("compute")
        self.engine = PageTransfers.between(
            place.device,
            self.compute,
            self.device_pool,
            self.host_pool,
            backend=backend,
            staging_bytes=staging_bytes,
        )
        if place.where == "cuda":
            torch.cuda.synchronize()

    def slots(self, *pages):
        size = self.kind.page_size
        return torch.tensor([page * size + offset for page in pages for offset in range(size)])

    def content(self, seed):
        """Content of a page: the parts of each layer."""
        generator = torch.Generator().manual_seed(seed)
        return [
            [
                random_bytes(part[0], generator).to(self.place.where)
                for part in self.device_pool.layer(layer)
            ]
            for layer in range(LAYERS)
        ]

    def run_kernel(self, page, content, *, at_once=False):
        """Launch kernels that write a page, behind the copies that use it, and take their time or
        not."""
        self.engine.before_overwrite(self.slots(page))
        if not at_once:
            self.place.delay(self.compute)
        for layer, parts in enumerate(content):
            for destination, source in zip(self.device_pool.layer(layer), parts, strict=True):
                self.compute.copy(
                    destination[page],
                    source,
                    f"kernel that writes layer {layer} of device page {page}",
                )

    def read_layer(self, page, layer):
        """Launch kernels that read a layer of a page; what they will have seen."""
        seen = []
        for source in self.device_pool.layer(layer):
            seen.append(torch.zeros_like(source[page]))
            if self.place.where == "cuda":
                torch.cuda.current_stream().synchronize()
            self.compute.copy(
                seen[-1], source[page], f"kernel that reads layer {layer} of device page {page}"
            )
        return seen

    def read_pages(self, pages, counter):
        """Launch kernels that read pages layer by layer, each behind its event; what they will have
        seen of each page."""
        seen = [[] for _ in pages]
        for layer in range(LAYERS):
            counter.wait(layer, self.compute)
            for page, layers in zip(pages, seen, strict=True):
                layers.append(self.read_layer(page, layer))
        return seen

    def read(self, page, counter=None):
        """The same of one page; without a counter nothing is waited for."""
        if counter is not None:
            return self.read_pages([page], counter)[0]
        return [self.read_layer(page, layer) for layer in range(LAYERS)]

    def host_content(self, page):
        """Current content of a host page."""
        parts = [
            [part[page] for part in self.engine._host_pages.layer(layer)] for layer in range(LAYERS)
        ]
        self.place.host("look at a host page", reads=[part for layer in parts for part in layer])
        return [[part.clone() for part in layer] for layer in parts]

    def write_host(self, page, content):
        """Fill a host page by hand, as a storage would."""
        for layer, parts in enumerate(content):
            for destination, source in zip(
                self.engine._host_pages.layer(layer), parts, strict=True
            ):
                self.place.host("filling of a host page", writes=[destination[page]])
                destination[page].copy_(source)

    def filled_host(self, *contents):
        """Host pages that hold these; their slots."""
        slots = self.engine.host_slots.alloc(len(contents) * self.kind.page_size)
        for start, content in zip(slots[:: self.kind.page_size].tolist(), contents, strict=True):
            self.write_host(start // self.kind.page_size, content)
        return slots

    def staging(self, direction):
        """The staging of write-backs (`_out`) or of loads (`_in`)."""
        return getattr(self.engine._copies, direction)

    def delay_draining(self, direction):
        """Let what drains the staging buffers take its time, from where filling them may begin."""
        staging = self.staging(direction)
        begin = staging.begin

        def slow(behind):
            begin(behind)
            self.place.delay(behind)

        staging.begin = slow

    def hold_loads_into(self, page):
        """Keep a load into a device page in flight until that is released."""
        return self.place.hold(
            [part[page] for layer in range(LAYERS) for part in self.device_pool.layer(layer)]
        )

    def hold_layer(self, page, layer):
        """Keep a layer of a load into a device page in flight until that is released."""
        return self.place.hold([part[page] for part in self.device_pool.layer(layer)])

    def hold_write_backs_into(self, page):
        """Keep a write-back into a host page in flight until that is released."""
        return self.place.hold(self.engine._host_pages.whole(page, 1))

    def finish(self):
        self.compute.synchronize()
        self.place.check()


def fill(tensor, byte):
    """Set all bytes of a tensor, whatever its element type and strides are."""
    tensor.copy_(
        torch.full((tensor.element_size(),), byte, dtype=torch.uint8)
        .view(tensor.dtype)
        .to(tensor.device)[0]
    )


def random_bytes(like, generator):
    """A contiguous tensor on the CPU of the same shape and element type."""
    size = like.numel() * like.element_size()
    return (
        torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        .view(like.dtype)
        .view(like.shape)
    )


def same(first, second):
    """Return True if two pages hold the same bytes, on any device."""
    return all(
        torch.equal(raw(one), raw(other))
        for parts in zip(first, second, strict=True)
        for one, other in zip(*parts, strict=True)
    )


def raw(tensor):
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
