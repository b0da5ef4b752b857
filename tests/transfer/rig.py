"""Two places where copies run, the simulator and a GPU, the row kernel on the CPU, and pairs of pools
of every kind and layout between which copies run."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hicache_storage.pools import DevicePool, PagedHostPool, host_tensor
from hicache_storage.transfer import (
    CudaDevice,
    Indices,
    PageTransfers,
    PoolPair,
    StreamSimulator,
    copies,
)
from hicache_storage.transfer.cuda.kernel import SOURCE, address, driver
from tests.support.pools import SHAPES, make_pool

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

BF16 = torch.bfloat16
STATE = {"temporal_shape": (2, 3), "conv_shapes": ((5,), (3, 2)), "conv_dtype": BF16}
FIELDS = {
    "mha": {"page_size": PAGE, "head_num": 2, "head_dim": 6, "v_head_dim": 4, "dtype": BF16},
    "mla": {"page_size": PAGE, "kv_lora_rank": 5, "dtype": torch.float8_e4m3fn},
    "mamba": {"page_size": 1, "temporal_dtype": torch.float32, **STATE},
    "indexer": {"page_size": PAGE, "index_head_dim": 32, "quant_block_size": 16},
}
MODELS = {
    **{name: {"pool": (name, range(LAYERS))} for name in FIELDS},
    "hybrid": {"kv": ("mha", (1, 4, 5)), "mamba": ("mamba", (0, 2, 3))},
    "sparse": {"kv": ("mla", range(LAYERS)), "indexer": ("indexer", range(LAYERS))},
}
"""Pools by name, each with its kind and the model's layers."""
ONE_POOL = [(name, layout) for name in FIELDS for layout in SHAPES[name].ORDERS]
POOLS = [*ONE_POOL, ("hybrid", "page_first"), ("sparse", "page_first")]


def pools_of(kind, layout, where="cpu", pages=PAGES, **changes):
    """A device pool and the host pool that backs it up, made of the same fields."""
    fields = {"layers": range(LAYERS), **FIELDS[kind], **changes}
    fields["size"] = pages * fields["page_size"]
    device = make_pool(DevicePool, kind, **fields, device=where)
    return device, make_pool(PagedHostPool, kind, **fields, layout=layout)


@functools.cache
def gate():
    """The code of the kernel `gate` for this GPU, and the kernel."""
    from cuda.core import Program, ProgramOptions

    major, minor = torch.cuda.get_device_capability()
    code = Program(GATE, "c++", ProgramOptions(arch=f"sm_{major}{minor}")).compile("cubin")
    return code, driver().CUfunction(int(code.get_kernel("gate").handle))


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

    def copy(self, stream, destination, source, what):
        """Launch a kernel."""
        stream.copy(destination, source, what)

    def host(self, what, **touched):
        self.device.host(what, **touched)

    def check(self):
        assert not self.device.races, self.device.races[0]

    def close(self):
        self.device.close()


class Cuda:
    """A GPU: kernels wait for the host, so that a copy that does not wait for them comes first."""

    where = "cuda"

    def __init__(self, seed):
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
        _, function = gate()
        one = (1, 1, 1)
        where = stream.native.cuda_stream, ctypes.addressof(arguments)
        error, *_ = driver().cuLaunchKernel(function, *one, *one, 0, *where, 0)
        assert not int(error)

    def release(self):
        """Open all gates, after a head start for what does not wait for them."""
        if self._released < self._gates:
            time.sleep(HEAD_START_SECONDS)
            self._open[: self._gates] = 1
            self._released = self._gates

    def copy(self, stream, destination, source, what):
        with torch.cuda.stream(stream.native):
            destination.copy_(source, non_blocking=True)

    def host(self, what, **touched):
        """Nothing: the host has waited for what it looks at."""

    def hold(self):
        """Nothing: gates keep copies in flight."""

    def check(self):
        """Nothing: the bytes tell."""

    def close(self):
        self.release()
        torch.cuda.synchronize()


NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = [
    pytest.param(Simulated, id="simulator"),
    pytest.param(Cuda, id="cuda", marks=NEEDS_GPU),
]


@functools.cache
def library():
    """The row kernel as C++: `run(word bytes, blocks, threads, address of a Move)`."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "rows.so"
        options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
        paths = ["-I", SOURCE.parent, Path(__file__).parent / "rows_on_cpu.cpp", "-o", built]
        subprocess.run(["g++", "-Werror", *options, *paths], check=True)
        loaded = ctypes.CDLL(str(built))
    loaded.run.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)
    loaded.run.restype = None
    return loaded


def launch(word, blocks, arguments, threads=32):
    """Run a kernel as `cuLaunchKernel` is called: with the address of its arguments' addresses."""
    library().run(word, blocks, threads, ctypes.c_void_p.from_address(arguments).value)


class Rig:
    """A model's pools full of poison, the engine between them, and kernels that write and read
    device pages.

    A page is that of one number in every pool. Slots are given by pool; content is, for each of the
    model's layers, its parts.

    Args:
        model: one of `MODELS`.
    """

    def __init__(self, place, model, layout, way, *, staging_bytes=1):
        self.place, where = place, place.where
        self.compute = place.device.stream("compute")
        self.layers = {name: tuple(layers) for name, (_, layers) in MODELS[model].items()}
        pairs = {
            name: PoolPair(*pools_of(kind, layout, where, layers=layers))
            for name, (kind, layers) in MODELS[model].items()
        }
        self.device = {name: pair.device_pool for name, pair in pairs.items()}
        self.host = {name: pair.host_pool for name, pair in pairs.items()}
        self.page_sizes = {name: pool.page_size for name, pool in self.host.items()}
        with patch.object(copies, "STAGING_BYTES", staging_bytes):
            self.engine = PageTransfers(place.device, self.compute, pairs, way=way)
        self.layer_num = self.engine.layer_num
        self.host_slots = self.engine.host_slots
        self.pool = self.engine.pools[min(pairs)]
        """The copies of the first pool."""
        if where == "cuda":
            # Kernels are loaded before one waits for the host.
            self.write_back(self.slots(0), self.slots(0)).synchronize()
            self.load(self.slots(0), self.slots(0)).synchronize()
        for pair in pairs.values():
            poison(*pair)
        if where == "cuda":
            torch.cuda.synchronize()

    # Slots
    # -----------------------------------------------------------------------------------------

    def slots(self, *pages):
        return {name: page_slots(pages, size) for name, size in self.page_sizes.items()}

    def alloc(self, pages=1):
        """Slots of host pages; None if fewer are free."""
        if self.free_pages() < pages:
            return None
        sizes = {name: pages * size for name, size in self.page_sizes.items()}
        return {name: slots.alloc(sizes[name]) for name, slots in self.host_slots.items()}

    def free(self, host):
        for name, slots in host.items():
            self.host_slots[name].free(slots)

    def free_pages(self):
        """Number of host pages that can be taken, in the pool that has the fewest."""
        slots = self.host_slots
        return min(slots[name].available_size() // size for name, size in self.page_sizes.items())

    def host_pages(self, host):
        """The numbers of host pages, by pool."""
        return {
            name: (slots[:: self.page_sizes[name]] // self.page_sizes[name]).tolist()
            for name, slots in host.items()
        }

    def some(self, host, numbers):
        """Some of these host pages, which may occur twice."""
        return {
            name: slots.view(-1, self.page_sizes[name])[list(numbers)].view(-1)
            for name, slots in host.items()
        }

    # Copies
    # -----------------------------------------------------------------------------------------

    def write_back(self, device, host):
        return self.engine.write_back(moved(device, host))

    def load(self, host, device):
        return self.engine.load(moved(device, host))

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

    # Kernels, and the host
    # -----------------------------------------------------------------------------------------

    def content(self, seed):
        """New content of a page."""
        generator = torch.Generator().manual_seed(seed)
        return [
            [random_bytes(part[0], generator).to(self.place.where) for _, part in parts]
            for parts in self._parts(self.device)
        ]

    def run_kernel(self, page, content, *, at_once=False, pools=None):
        """Launch kernels that write a page, of all pools or some, behind the copies that use it,
        and take their time or not."""
        pools = set(pools or self.device)
        self.engine.before_overwrite({name: self.slots(page)[name] for name in pools})
        if not at_once:
            self.place.delay(self.compute)
        for layer, parts in enumerate(self._parts(self.device)):
            for (name, part), source in zip(parts, content[layer], strict=True):
                if name in pools:
                    what = f"kernel that writes layer {layer} of device page {page}"
                    self.place.copy(self.compute, part[page], source, what)

    def read_layer(self, page, layer):
        """Launch kernels that read a layer of a page; what they will have seen."""
        what, seen = f"kernel that reads layer {layer} of device page {page}", []
        for _, part in [*self._parts(self.device)][layer]:
            seen.append(torch.zeros_like(part[page]))
            if self.place.where == "cuda":
                torch.cuda.current_stream().synchronize()
            self.place.copy(self.compute, seen[-1], part[page], what)
        return seen

    def read_pages(self, pages, counter=None):
        """Launch kernels that read pages layer by layer, each behind its event if there is a
        counter; what they will have seen of each page."""
        seen = [[] for _ in pages]
        for layer in range(self.layer_num):
            if counter is not None:
                counter.wait(layer, self.compute)
            for page, layers in zip(pages, seen, strict=True):
                layers.append(self.read_layer(page, layer))
        return seen

    def read(self, page, counter=None):
        """The same of one page."""
        return self.read_pages([page], counter)[0]

    def host_content(self, host, number=0):
        """Current content of one of some host pages."""
        pages = {name: numbers[number] for name, numbers in self.host_pages(host).items()}
        found = [[part[pages[name]] for name, part in parts] for parts in self._parts(self.host)]
        self.place.host("look at a host page", reads=[part for parts in found for part in parts])
        return [[part.clone() for part in parts] for parts in found]

    def filled_host(self, *contents):
        """Host pages that a storage has filled; their slots."""
        host = self.alloc(len(contents))
        pages = self.host_pages(host)
        for number, content in enumerate(contents):
            for parts, sources in zip(self._parts(self.host), content, strict=True):
                for (name, part), source in zip(parts, sources, strict=True):
                    to = part[pages[name][number]]
                    self.place.host("filling of a host page", writes=[to])
                    to.copy_(source)
        return host

    def _parts(self, pools):
        """For each layer of the model its views of all pages, with the names of their pools."""
        for layer in range(self.layer_num):
            yield [
                (name, part)
                for name, layers in self.layers.items()
                if layer in layers
                for part in pools[name].layer(layers.index(layer))
            ]

    # Staging
    # -----------------------------------------------------------------------------------------

    def staging(self, direction):
        """The first copies of a direction, which pass through staging buffers."""
        return self.pool.lanes[direction][0]

    def delay_draining(self, direction):
        """Let what drains the staging buffers take its time, from where filling them may begin."""
        staging = self.staging(direction)
        before_staging = staging.before_staging

        def slow():
            before_staging()
            self.place.delay(self.engine.streams[direction])

        staging.before_staging = slow


def page_slots(pages, page_size):
    pages = torch.as_tensor(pages, dtype=torch.int64)
    return (pages.unsqueeze(1) * page_size + torch.arange(page_size)).view(-1)


def one_pool(device, compute, device_pool, host_pool, **options):
    """An engine for one pair of pools."""
    pair = PoolPair(device_pool, host_pool)
    return PageTransfers(device, compute, {"pool": pair}, **options)


def moved(device, host):
    """Slots to copy between, by pool; of `one_pool` its own."""
    if isinstance(device, torch.Tensor):
        device, host = {"pool": device}, {"pool": host}
    return {name: Indices(device[name], host[name]) for name in device}


def poison(device_pool, host_pool):
    """Fill both pools."""
    for buffer in host_pool.buffers:
        fill(buffer, POISON)
    for layer in range(device_pool.layer_num):
        for part in device_pool.layer(layer):
            fill(part, POISON)


def fill(tensor, byte):
    """Set all bytes of a tensor, whatever its element type and strides are."""
    tensor.view(torch.uint8).fill_(byte)


def random_bytes(like, generator):
    """A contiguous tensor on the CPU of the same shape and element type."""
    size = like.numel() * like.element_size()
    made = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    return made.view(like.dtype).view(like.shape)


def same(first, second):
    """Return True if two pages hold the same bytes, on any device."""
    return all(
        torch.equal(raw(one), raw(other))
        for parts in zip(first, second, strict=True)
        for one, other in zip(*parts, strict=True)
    )


def raw(tensor):
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
