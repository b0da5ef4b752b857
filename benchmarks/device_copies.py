"""Copies between device and host pools against one large pinned copy of as many bytes, and beside a
model's matrix products, taking turns in one run.

    python benchmarks/device_copies.py [--sglang TREE] [--device cuda]

Layouts and page lengths of an MHA pool, both directions, pages that are scattered over both pools:
every second one, in an order of its own. A side is what the engine chooses, what it can be forced
to, and SGLang's own kernels where a tree of them is given. For each: its share of the speed of one
pinned copy, for a caller that waits, and on a device that was busy while it was enqueued; what
enqueueing costs the calling thread; how much longer matrix products take beside it; and how long a
load takes whose layers are each followed by the products of that layer, against the larger of the
two.

Each of our copies is checked once before it is measured. Writes results.md and results.json. `--device
cpu` runs the same on the simulator, to see that it runs: figures without a GPU mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import Run, table, turns

from hicache_storage.pools import AttentionGeometry, DevicePool, PagedHostPool, host_tensor
from hicache_storage.transfer import (
    CudaDevice,
    Indices,
    PageTransfers,
    PoolPair,
    StreamSimulator,
    Way,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.tools.bench.results import Measurement
    from hicache_storage.transfer import Device, Stream

HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
TOKEN_BYTES = 2 * HEADS * HEAD_DIM * DTYPE.itemsize
"""Of a layer."""
PINNED, CHOSEN, SGLANG = "one pinned copy", "chosen", "SGLang"
OUT, IN = "write-back", "load"
CASES = [
    ("page_first", 32, 64),
    ("page_first_direct", 32, 64),
    ("layer_first", 32, 64),
    ("page_head", 32, 64),
    ("page_first", 32, 16),
    ("page_first", 16, 1),
]
"""Layout, layers, tokens a page: 8 MiB, 2 MiB and 64 KiB."""
GOALS = {OUT: (0.97, 1.05), IN: (0.92, 1.05)}
"""Share of the pinned copy, and products beside a copy by DMA, from pages of 1 MiB on."""
SHORT_GOAL = 0.92
OVERLAP_GOAL = 1.1
ENQUEUEING = "enqueueing, us"
ON_DEVICE = "seconds on the device"
PRODUCTS = "products beside it, as many times as long"
OVERLAP = "load and compute, of the larger"
WARNING = "**No GPU: these copies ran on the simulator, and the figures mean nothing.**\n\n"


@dataclass
class Copy:
    """A way to move all pages of a case once."""

    enqueue: Callable[[], object]
    wait: Callable[[], object]
    """Blocks until everything enqueued is over."""
    follow: Callable[[Stream], object]
    """Lets a stream wait until everything enqueued is over."""
    wait_layer: Callable[[int, Stream], object] | None = None
    """Lets a stream wait for a layer of a load."""


class Products:
    """Matrix products on the model's stream."""

    def __init__(self, compute: Stream) -> None:
        self._compute = compute
        self._matrix = torch.randn(4096, 4096, dtype=DTYPE, device="cuda")
        self._result = torch.empty_like(self._matrix)
        torch.cuda.synchronize()
        self.enqueue(20)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.enqueue(100)
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - began) / 100
        """Of one."""

    def enqueue(self, count: int) -> None:
        with torch.cuda.stream(self._compute.native):  # type: ignore[attr-defined]
            for _ in range(count):
                torch.mm(self._matrix, self._matrix, out=self._result)

    def beside(self, copy: Copy, alone: float) -> float:
        """How many times as long products take that begin with a copy and are about as long."""
        count = max(1, round(alone / self.seconds))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        native = self._compute.native  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        copy.enqueue()
        events[0].record(native)
        self.enqueue(count)
        events[1].record(native)
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1]) / 1e3 / (count * self.seconds))

    def on_device(self, copy: Copy, enqueueing: float) -> float:
        """Seconds of a copy behind products that last longer than enqueueing it takes."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        native = self._compute.native  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        self.enqueue(round(2 * enqueueing / self.seconds) + 10)
        events[0].record(native)
        copy.enqueue()
        copy.follow(self._compute)
        events[1].record(native)
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1]) / 1e3)

    def behind_layers(self, copy: Copy, alone: float, layers: int) -> float:
        """Seconds of a load and the products of its layers, over the larger of the two."""
        assert copy.wait_layer is not None
        count = max(1, round(alone / self.seconds / layers))
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy.enqueue()
        for layer in range(layers):
            copy.wait_layer(layer, self._compute)
            self.enqueue(count)
        torch.cuda.synchronize()
        larger = max(alone, layers * count * self.seconds)
        return (time.perf_counter() - began) / larger


@dataclass
class Case:
    """Pools of one layout, and the pages that are moved."""

    place: str
    device: Device
    compute: Stream
    layout: str
    layers: int
    page_size: int
    mib: int

    def __post_init__(self) -> None:
        self.page_bytes = self.layers * self.page_size * TOKEN_BYTES
        self.pages = max(1, (self.mib << 20) // self.page_bytes)
        self.bytes = self.pages * self.page_bytes
        arguments = {"size": 2 * self.pages * self.page_size, "page_size": self.page_size}
        shape = AttentionGeometry(
            layers=range(self.layers), head_num=HEADS, head_dim=HEAD_DIM, dtype=DTYPE
        )
        self.device_pool = DevicePool(shape, **arguments, device=self.place)
        self.host_pool = PagedHostPool(shape, **arguments, layout=self.layout)
        self.device_slots, self.host_slots = (self._scattered() for _ in range(2))
        self.indices = {"kv": Indices(self.device_slots, self.host_slots)}

    def _scattered(self) -> torch.Tensor:
        pages = torch.randperm(self.pages) * 2
        return (pages.unsqueeze(1) * self.page_size + torch.arange(self.page_size)).view(-1)

    def ours(self, way: Way | None) -> tuple[PageTransfers, dict[str, Copy]]:
        """Our copies in both directions; checked."""
        pair = PoolPair(self.device_pool, self.host_pool)
        engine = PageTransfers(self.device, self.compute, {"kv": pair}, way=way)
        self._check(engine)
        last: list[Any] = []

        def enqueue(direction: str) -> None:
            copy = engine.write_back if direction == OUT else engine.load
            last[:] = [copy(self.indices)]

        copies = {
            direction: Copy(
                partial(enqueue, direction),
                lambda: last[0].synchronize(),
                lambda stream: stream.wait_event(last[0].events[-1]),
            )
            for direction in (OUT, IN)
        }
        copies[IN].wait_layer = lambda layer, stream: last[0].wait(layer, stream)
        return engine, copies

    def _check(self, engine: PageTransfers) -> None:
        parts = [part for layer in self.device_pool.layers for part in layer]
        for part in parts:
            part.normal_()
        slots = self.device_slots.to(parts[0].device)
        before = [part[slots] for part in parts]
        self.synchronize()
        engine.write_back(self.indices).synchronize()
        for part in parts:
            part.zero_()
        self.synchronize()
        engine.load(self.indices).synchronize()
        if not all(torch.equal(part[slots], old) for part, old in zip(parts, before, strict=True)):
            raise AssertionError("pages did not come back as they went")

    def pinned(self) -> dict[str, Copy]:
        """One copy of as many bytes in either direction."""
        host = host_tensor((self.bytes,), torch.uint8).zero_()
        device = torch.zeros(self.bytes, dtype=torch.uint8, device=self.place)
        stream = self.device.stream("pinned")
        addresses = torch.tensor([host.data_ptr(), device.data_ptr()])

        def enqueue(to: torch.Tensor, origin: torch.Tensor, *memory: torch.Tensor) -> None:
            stream.wait_event(self.compute.record())
            stream.copy_pieces(to.data_ptr(), origin.data_ptr(), 1, self.bytes, PINNED)

        def follow(other: Stream) -> None:
            other.wait_event(stream.record())

        out = partial(enqueue, addresses[:1], addresses[1:], host, device)
        into = partial(enqueue, addresses[1:], addresses[:1], host, device)
        return {
            direction: Copy(enqueue, stream.synchronize, follow)
            for direction, enqueue in ((OUT, out), (IN, into))
        }

    def sglang(self, kernels: Any) -> dict[str, Copy]:
        """SGLang's own kernels, as its controller calls them for this layout."""
        native, compute = torch.cuda.Stream(), self.compute.native  # type: ignore[attr-defined]
        slots, host_slots = self.device_slots.cuda(), self.host_slots.cuda()
        keys, values = self.device_pool.parts
        pointers = [
            torch.tensor([part.data_ptr() for part in parts], dtype=torch.uint64, device="cuda")
            for parts in (keys, values)
        ]
        shape = (slots.numel(), self.layers, HEADS, HEAD_DIM)
        staging = [torch.empty(shape, dtype=DTYPE, device="cuda") for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(self.layers)]

        def write_back() -> None:
            native.wait_stream(compute)
            with torch.cuda.stream(native):
                kernels.transfer_hicache_all_layer_staged_lf_pf(
                    k_ptr_src=pointers[0],
                    v_ptr_src=pointers[1],
                    src_indices=slots,
                    dst_indices=self.host_slots,
                    staging_k=staging[0],
                    staging_v=staging[1],
                    dst_k=self.host_pool.parts[0],
                    dst_v=self.host_pool.parts[1],
                    page_size=self.page_size,
                )

        def load() -> None:
            native.wait_stream(compute)
            with torch.cuda.stream(native):
                for layer, event in enumerate(events):
                    kernels.transfer_hicache_one_layer(
                        page_size=self.page_size,
                        k_cache_dst=keys[layer],
                        v_cache_dst=values[layer],
                        k_cache_src=self.host_pool.parts[0][:, layer],
                        v_cache_src=self.host_pool.parts[1][:, layer],
                        indices_dst=slots,
                        indices_src=host_slots,
                        element_dim=HEADS * HEAD_DIM,
                    )
                    event.record(native)

        def wait_layer(layer: int, stream: Any) -> None:
            stream.native.wait_event(events[layer])

        def follow(stream: Any) -> None:
            stream.native.wait_stream(native)

        return {
            OUT: Copy(write_back, native.synchronize, follow),
            IN: Copy(load, native.synchronize, follow, wait_layer),
        }

    def measured(self, run: Run, side: str, direction: str) -> Measurement:
        """The measurement of a side."""
        operation = f"{direction}, {self.layout}, {self.page_size} tokens"
        return run.of(side, (self.page_bytes, 1, self.pages, operation))

    def figure(self, name: str, side: str, direction: str) -> str:
        """Name of a figure of a side."""
        return f"{name}: {side}, {direction}, {self.layout}, {self.page_size} tokens"

    def row(self, run: Run, side: str, direction: str) -> list[str]:
        """Row of the table."""
        one, pinned = (self.measured(run, each, direction) for each in (side, PINNED))
        share_goal, products_goal = GOALS[direction]
        is_long = self.page_bytes >= 1 << 20
        goals = f"{share_goal if is_long else SHORT_GOAL}"
        if is_long and direction == OUT:
            goals += f", products {products_goal}"
        if direction == IN:
            goals += f", together {OVERLAP_GOAL}"

        def figure(name: str, of: str = side) -> float:
            """NaN where it was not measured."""
            noted = self.figure(name, of, direction)
            return run.figure(noted) if noted in run.report.figures else math.nan

        figures = [
            figure(ON_DEVICE, PINNED) / figure(ON_DEVICE),
            figure(PRODUCTS),
            figure(OVERLAP),
        ]
        shown = ["-" if math.isnan(each) else f"{each:.2f}" for each in figures]
        return [
            self.layout,
            f"{self.page_size} tokens, {self.page_bytes >> 10} KiB",
            direction,
            side,
            f"{one.rates()[0]:.1f} GB/s",
            f"{one.pages_per_second / pinned.pages_per_second:.2f}",
            shown[0],
            f"{figure(ENQUEUEING):.0f} us",
            *shown[1:],
            goals if side == CHOSEN else "",
        ]

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.place == "cuda":
            torch.cuda.synchronize()


def sides_of(case: Case, sglang: Any) -> tuple[dict[str, dict[str, Copy]], str]:
    """All sides of a case, by name, and the plan that was chosen."""
    engine, chosen = case.ours(None)
    plan = engine.pools["kv"].plan[0]
    sides = {PINNED: case.pinned(), CHOSEN: chosen}
    for way in ("kernel", "dma"):
        other, copies = case.ours(way)
        forced = other.pools["kv"].plan[0]
        if (forced.out, forced.into) != (plan.out, plan.into):
            sides[way] = copies
    if sglang is not None and case.layout == "page_first":
        sides[SGLANG] = case.sglang(sglang)
    return sides, f"{OUT} {plan.out}, {IN} {plan.into}"


def measure(
    run: Run,
    case: Case,
    sides: dict[str, dict[str, Copy]],
    products: Products | None,
    rounds: int,
) -> list[list[str]]:
    """Measure all sides in turn, in both directions; rows of the table."""
    found = [(side, direction) for side, copies in sides.items() for direction in copies]
    for side, direction in turns(found, rounds):
        copy = sides[side][direction]
        case.synchronize()
        began = time.perf_counter()
        copy.enqueue()
        enqueued = time.perf_counter()
        copy.wait()
        case.measured(run, side, direction).add(time.perf_counter() - began)
        run.note(case.figure(ENQUEUEING, side, direction), 1e6 * (enqueued - began))
    for side, direction in found if products is not None else ():
        copy, alone = sides[side][direction], case.measured(run, side, direction).seconds
        for _ in range(max(1, rounds // 2)):
            run.note(case.figure(PRODUCTS, side, direction), products.beside(copy, alone))
            enqueueing = 1e-6 * run.figure(case.figure(ENQUEUEING, side, direction))
            run.note(case.figure(ON_DEVICE, side, direction), products.on_device(copy, enqueueing))
            if copy.wait_layer is not None:
                overlap = products.behind_layers(copy, alone, case.layers)
                run.note(case.figure(OVERLAP, side, direction), overlap)
    return [case.row(run, side, direction) for side, direction in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/device-copies"))
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first ones only")
    parser.add_argument("--mib", type=int, default=512, help="moved in a turn")
    parser.add_argument("--layers", type=int, help="instead of those of the cases")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    parser.add_argument("--sglang", type=Path, help="a tree with SGLang's kernels and stubs")
    options = parser.parse_args(arguments)
    if options.mib < 1 or options.rounds < 1 or options.cases < 1:
        raise SystemExit("--mib, --rounds and --cases must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device; --device cpu shows whether this runs, and its figures mean nothing"
        )
    began, sglang, notes = time.monotonic(), None, list[str]()
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    run = Run(gpu=gpu, **{"MiB a turn": str(options.mib)})
    if options.sglang is not None:
        sys.path.insert(0, str(options.sglang))
        try:
            sglang = importlib.import_module("sglang.kernels.ops.kvcache.hicache")
        except Exception as error:  # noqa: BLE001 - another side, which must not end the run
            notes.append(f"SGLang's kernels are left out: {error!r}")
    rows, plans = list[list[str]](), list[list[str]]()
    with ExitStack() as stack:
        device: Device = (
            CudaDevice()
            if options.device == "cuda"
            else stack.enter_context(closing(StreamSimulator()))
        )
        compute = device.stream("compute")
        products = Products(compute) if options.device == "cuda" else None
        for layout, layers, page_size in CASES[: options.cases]:
            layers = options.layers or layers
            case = Case(options.device, device, compute, layout, layers, page_size, options.mib)
            try:
                sides, plan = sides_of(case, sglang)
                found = measure(run, case, sides, products, options.rounds)
            except AssertionError:
                raise
            except Exception as error:
                if sglang is None:
                    raise
                notes.append(f"{layout}, {page_size} tokens: without SGLang after {error!r}")
                sides, plan = sides_of(case, None)
                found = measure(run, case, sides, products, options.rounds)
            plans.append([layout, str(page_size), plan])
            rows += found
    header = ["layout", "page", "direction", "side", "speed", "share", "on the device"]
    header += ["enqueueing", "products beside", "load and compute / larger", "goal"]
    text = f"{table(header, rows)}\n{table(['layout', 'tokens a page', 'chosen'], plans)}"
    text += "".join(f"\n{note}\n" for note in notes)
    if options.device == "cpu":
        text = WARNING + text
    run.report.machine["seconds"] = f"{time.monotonic() - began:.0f}"
    run.save(options.out, text)
    run.show(text)


if __name__ == "__main__":
    main()
