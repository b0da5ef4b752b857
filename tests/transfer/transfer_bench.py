"""Two places where copies run, the simulator and a GPU, and pairs of pools of every kind and layout
between which they run."""

from __future__ import annotations

import ctypes
import functools
import time

import pytest
import torch

from hicache_storage.pools import host_tensor
from hicache_storage.transfer import (
    CudaDevice,
    Indices,
    PageTransfers,
    PoolPair,
    StreamSimulator,
)
from tests.support.pools import POOL_KINDS, make_pool

LAYERS, PAGES, PAGE = 3, 6, 2
POISON = 0xA5
HOLD_SECONDS = 30
HEAD_START_SECONDS = 0.02
"""What does not wait for a gate is over after this, however slow a GPU is."""
GATES = 4096
GATE = """
extern "C" __global__ void gate(const volatile int* open, unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (!*open && now - start < nanoseconds);
}
"""
"""A kernel that ends when the host sets a number, or too late for its test."""


class PoolKind:
    """A device pool and the host pool that backs it up, made of the same fields."""

    def __init__(self, name, **fields):
        self.device, self.host = POOL_KINDS[name]
        self.fields = fields
        self.page_size = fields.get("page_size", 1)

    def pair(self, layout, where, pages=PAGES, layers=range(LAYERS)):
        fields = dict(self.fields, size=pages * self.page_size, layers=layers)
        device = make_pool(self.device, **fields, device=where)
        return device, make_pool(self.host, **fields, layout=layout)


BF16 = torch.bfloat16
STATE = {"temporal_shape": (2, 3), "conv_shapes": ((5,), (3, 2)), "conv_dtype": BF16}
KINDS = {
    "mha": PoolKind("mha", page_size=PAGE, head_num=2, head_dim=6, v_head_dim=4, dtype=BF16),
    "mla": PoolKind("mla", page_size=PAGE, kv_lora_rank=5, dtype=torch.float8_e4m3fn),
    "mamba": PoolKind("mamba", temporal_dtype=torch.float32, **STATE),
    "indexer": PoolKind("indexer", page_size=PAGE, index_head_dim=32, quant_block_size=16),
}
POOLS = [(name, layout) for name, kind in KINDS.items() for layout in kind.host.LAYOUTS]


@functools.cache
def gate():
    """The driver, the kernel `gate` for this GPU, and the code that it is part of."""
    from cuda.core import Program, ProgramOptions

    from hicache_storage.transfer.cuda.kernel import driver

    major, minor = torch.cuda.get_device_capability()
    code = Program(GATE, "c++", ProgramOptions(arch=f"sm_{major}{minor}")).compile("cubin")
    return driver(), code, driver().CUfunction(int(code.get_kernel("gate").handle))


class Simulated:
    """The simulator: copies run piece by piece in a random order, and what nothing orders is found
    whenever it ran."""

    where = "cpu"

    def __init__(self, seed):
        self.device = StreamSimulator(seed)

    def delay(self, stream):
        """Nothing: the verdict does not depend on time."""

    def hold(self):
        """Keep copies in flight until `release`."""
        self.device.is_held = True

    def release(self):
        self.device.is_held = False

    def host(self, what, **touched):
        self.device.host(what, **touched)

    def check(self):
        assert not self.device.races, str(self.device.races[0])

    def close(self):
        self.device.close()


class Cuda:
    """A GPU: kernels wait for the host, so that a copy that does not wait for them comes first."""

    where = "cuda"

    def __init__(self, seed):
        from hicache_storage.transfer.cuda.kernel import address

        self.device = CudaDevice()
        # Page-locked memory that kernels read: a gate's number is 0 while it is closed.
        self._open = host_tensor((GATES,), torch.int32)
        self._open.zero_()
        self._address, self._gates, self._released = address(self._open), 0, 0
        # CUDA loads a kernel when it is first launched, and may wait for those that run.
        self.delay(warm := self.device.stream("warm"))
        self.release()
        warm.synchronize()

    def delay(self, stream):
        """Enqueue a kernel that waits for `release`."""
        values = self._address + 4 * self._gates, HOLD_SECONDS * 10**9
        places = [ctypes.c_uint64(value) for value in values]
        arguments = (ctypes.c_void_p * 2)(*map(ctypes.addressof, places))
        self._gates += 1
        driver, _, function = gate()
        one = (1, 1, 1)
        where = stream.native.cuda_stream, ctypes.addressof(arguments)
        error, *_ = driver.cuLaunchKernel(function, *one, *one, 0, *where, 0)
        assert not int(error)

    def release(self):
        """Open all gates, after a head start for what does not wait for them."""
        if self._released < self._gates:
            time.sleep(HEAD_START_SECONDS)
            self._open[: self._gates] = 1
            self._released = self._gates

    def host(self, what, **touched):
        """Nothing: the host has waited for what it looks at."""

    def hold(self):
        """Nothing: gates keep copies in flight."""

    def check(self):
        """Nothing: the bytes tell."""

    def close(self):
        self.release()
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


class Rig:
    """A place, and the model's stream there."""

    def __init__(self, place):
        self.place = place
        self.compute = place.device.stream("compute")

    def see(self, source, what):
        """Launch a kernel that reads memory; what it will have seen."""
        seen = torch.zeros_like(source)
        if self.place.where == "cuda":
            torch.cuda.current_stream().synchronize()
        self.compute.copy(seen, source, what)
        return seen

    def wait(self, copy):
        """Wait for a write-back."""
        # One that is over already has waited for no gate, and what it copies must not, either.
        if not copy.done():
            self.place.release()
        copy.synchronize()

    def finish(self):
        self.place.release()
        self.compute.synchronize()
        self.place.check()


class Bench(Rig):
    """A pair of pools full of poison, the engine between them, and kernels that write and read
    device pages."""

    def __init__(self, place, kind, layout, way, *, staging_bytes=1):
        super().__init__(place)
        self.kind = KINDS[kind]
        self.device_pool, self.host_pool = self.kind.pair(layout, place.where)
        self.engine = one_pool(
            place.device,
            self.compute,
            self.device_pool,
            self.host_pool,
            way=way,
            staging_bytes=staging_bytes,
        )
        self.pool = self.engine.pools["pool"]
        self.host_slots = self.pool.host_slots
        if place.where == "cuda":
            # Kernels are loaded before one waits for the host.
            self.write_back(self.slots(0), self.slots(0)).synchronize()
            self.load(self.slots(0), self.slots(0)).synchronize()
        poison(self.device_pool, self.host_pool)
        if place.where == "cuda":
            torch.cuda.synchronize()

    def slots(self, *pages):
        size = self.kind.page_size
        return torch.tensor([page * size + offset for page in pages for offset in range(size)])

    def write_back(self, device, host):
        return self.engine.write_back(moved(device, host))

    def load(self, host, device):
        return self.engine.load(moved(device, host))

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
        self.engine.before_overwrite({"pool": self.slots(page)})
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
        what = f"kernel that reads layer {layer} of device page {page}"
        return [self.see(source[page], what) for source in self.device_pool.layer(layer)]

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

    def alloc(self, pages=1):
        """Slots of host pages; None if fewer are free."""
        return self.host_slots.alloc(pages * self.kind.page_size)

    def host_content(self, host):
        """Current content of the first of some host pages."""
        page = int(host[0]) // self.kind.page_size
        parts = [[part[page] for part in self.host_pool.layer(layer)] for layer in range(LAYERS)]
        self.place.host("look at a host page", reads=[part for layer in parts for part in layer])
        return [[part.clone() for part in layer] for layer in parts]

    def write_host(self, page, content):
        """Fill a host page by hand, as a storage would."""
        for layer, parts in enumerate(content):
            for destination, source in zip(self.host_pool.layer(layer), parts, strict=True):
                self.place.host("filling of a host page", writes=[destination[page]])
                destination[page].copy_(source)

    def filled_host(self, *contents):
        """Host pages that hold these; their slots."""
        slots = self.alloc(len(contents))
        for start, content in zip(slots[:: self.kind.page_size].tolist(), contents, strict=True):
            self.write_host(start // self.kind.page_size, content)
        return slots

    def staging(self, direction):
        """The first copies of a direction, which pass through staging buffers."""
        return self.pool.lanes[direction][0]

    def delay_draining(self, direction):
        """Let what drains the staging buffers take its time, from where filling them may begin."""
        staging = self.staging(direction)
        before_staging = staging._before_staging

        def slow():
            before_staging()
            self.place.delay(staging._stream)

        staging._before_staging = slow


def one_pool(device, compute, device_pool, host_pool, **options):
    """An engine for one pair of pools."""
    pair = PoolPair(device_pool, host_pool)
    return PageTransfers(device, compute, {"pool": pair}, **options)


def moved(device, host):
    """What `one_pool` is given to move."""
    return {"pool": Indices(device, host)}


def poison(device_pool, host_pool):
    """Fill both pools."""
    for buffer in host_pool.buffers:
        fill(buffer, POISON)
    for layer in range(LAYERS):
        for part in device_pool.layer(layer):
            fill(part, POISON)


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
