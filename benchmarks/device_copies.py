"""Copies between device and host pools against one large pinned copy of as many bytes, taking turns
in one run.

    python benchmarks/device_copies.py [--device cuda]

Every layout of an MHA pool, all I/O backends, both directions, pages that are adjacent in both
pools and pages that are scattered over them: every second page of either pool, in an order of its
own, so that no two lie side by side. A turn moves the same bytes once: it begins with the call and
ends when the host knows that all bytes are there, so that enqueueing counts. Then the overlap: how
long a load together with the compute of its layers takes, where each layer's compute waits for that
layer alone, against the larger of the two.

Every copy is checked once before it is measured. Writes results.md and results.json. `--device cpu`
runs the same on the simulator, to see that it runs: figures without a GPU mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import Results, machine, table, turns

from hicache_storage.pools import MHADevicePool, MHAHostPool, host_tensor
from hicache_storage.transfer import BACKENDS, CudaDevice, PageTransfers
from hicache_storage.transfer.simulator import StreamSimulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.transfer import Device, Stream

HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
PINNED = "one pinned copy"
OUT, IN = "write-back", "load"
PAGE_FIRST = ("page_first", "page_first_direct", "page_head")
GOALS = {64: 0.8, 256: 0.9, 1024: 0.9, 4096: 0.9}
"""Of the pinned copy, by KiB of a page, in page-first layouts."""
OVERLAP_GOAL = 1.1
"""Of the larger of load and compute."""
MIN_ROUNDS, PATIENCE_SECONDS = 3, 10.0
"""Where a turn takes long there are fewer: direct copies of scattered pages with gaps are many
calls."""
ROOM = 2
"""Pools have so many times the pages that are moved."""
WARNING = "**No GPU: these copies ran on the simulator, and the figures mean nothing.**\n\n"


class NamedStreams:
    """A device that makes one stream of each name, whoever asks for it.

    torch deals streams from a pool of 32: of hundreds, those of an engine would be the compute
    stream now and then.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[str, Stream] = {}

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self._device.stream(name)
        return self._streams[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@dataclass
class Setup:
    """A device for copies, and the bytes of each copy."""

    place: str
    device: Device
    compute: Stream
    layers: int
    page_kib: int
    page_size: int
    """Tokens of a page."""
    pages: int
    results: Results

    def engine(self, layout: str, backend: str) -> PageTransfers:
        """A pair of pools with room for this many pages, and the engine between them."""
        arguments = {
            "size": ROOM * self.pages * self.page_size,
            "page_size": self.page_size,
            "layer_num": self.layers,
        }
        arguments |= {"head_num": HEADS, "head_dim": HEAD_DIM, "dtype": DTYPE}
        pools = (
            MHADevicePool(**arguments, device=self.place),
            MHAHostPool(**arguments, layout=layout),
        )
        return PageTransfers.between(self.device, self.compute, *pools, backend=backend)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.place == "cuda":
            torch.cuda.synchronize()


def page_sizes(pages_kib: list[int], layers: int) -> dict[int, int]:
    """Tokens a page, by KiB a page."""
    token_bytes = 2 * layers * HEADS * HEAD_DIM * DTYPE.itemsize
    wrong = [kib for kib in pages_kib if kib < 1 or (kib << 10) % token_bytes]
    if wrong:
        raise SystemExit(
            f"pages of {wrong} KiB are no whole number of tokens of {token_bytes} bytes; pass "
            f"other --layers or --pages"
        )
    return {kib: (kib << 10) // token_bytes for kib in pages_kib}


def write_back(engine: PageTransfers, device: torch.Tensor, host: torch.Tensor) -> bool:
    engine.write_back(device, host).wait()
    return True


def load(engine: PageTransfers, device: torch.Tensor, host: torch.Tensor) -> bool:
    engine.load(host, device).synchronize()
    return True


def slots(pages: int, page_size: int, order: str) -> torch.Tensor:
    """So many pages of a pool, side by side or none beside another."""
    numbers = torch.arange(pages) if order == "adjacent" else torch.randperm(pages) * ROOM
    return (numbers.unsqueeze(1) * page_size + torch.arange(page_size)).view(-1)


def checked(setup: Setup, engine: PageTransfers, device: torch.Tensor, host: torch.Tensor) -> float:
    """Make sure that pages come back as they went; how many seconds that took."""
    layers = [part for layer in range(setup.layers) for part in engine._device_pages.layer(layer)]
    for part in layers:
        part.normal_()
    pages = (device[:: setup.page_size] // setup.page_size).to(layers[0].device)
    before = [part[pages] for part in layers]
    setup.synchronize()
    began = time.perf_counter()
    write_back(engine, device, host)
    for part in layers:
        part.zero_()
    setup.synchronize()
    load(engine, device, host)
    seconds = time.perf_counter() - began
    if not all(torch.equal(part[pages], old) for part, old in zip(layers, before, strict=True)):
        raise AssertionError("pages did not come back as they went")
    return seconds


def pinned_copies(setup: Setup) -> dict[str, Callable[[], bool]]:
    """One copy of all bytes in either direction, by direction."""
    size = setup.pages * setup.page_kib << 10
    host = host_tensor((size,), torch.uint8, populate=True)
    device = torch.zeros(size, dtype=torch.uint8, device=setup.place)
    stream = setup.device.stream("pinned")

    def copy(destination: torch.Tensor, source: torch.Tensor) -> bool:
        stream.copy(destination, source, PINNED)
        stream.synchronize()
        return True

    return {OUT: partial(copy, host, device), IN: partial(copy, device, host)}


def measure(setup: Setup, layout: str, order: str, rounds: int) -> None:
    """All backends and the pinned copy, taking turns."""
    pinned = pinned_copies(setup)
    candidates, slowest = [(PINNED, pinned)], 0.0
    for backend in BACKENDS:
        engine = setup.engine(layout, backend)
        device, host = (slots(setup.pages, setup.page_size, order) for _ in range(2))
        slowest = max(slowest, checked(setup, engine, device, host))
        moves = {
            direction: partial(move, engine, device, host)
            for direction, move in ((OUT, write_back), (IN, load))
        }
        candidates.append((backend, moves))
    for who, actions in turns(
        candidates, max(MIN_ROUNDS, min(rounds, int(PATIENCE_SECONDS / slowest)))
    ):
        for direction, action in actions.items():
            setup.synchronize()
            setup.results.time(f"{layout}/{order}/{setup.page_kib}", direction, who, action)


def compute_layers(setup: Setup, seconds: float) -> Callable[[], None]:
    """Return a function that enqueues the compute of one layer: matrix products of about that
    duration."""
    if setup.place != "cuda":
        memory = torch.zeros(1 << 16)
        return partial(setup.compute.copy, memory, memory.clone(), "compute")
    matrix = torch.randn(2048, 2048, dtype=DTYPE, device="cuda")
    result = torch.empty_like(matrix)
    setup.synchronize()

    def multiply(times: int) -> None:
        with torch.cuda.stream(setup.compute.native):
            for _ in range(times):
                torch.mm(matrix, matrix, out=result)

    multiply(10)
    setup.synchronize()
    began = time.perf_counter()
    multiply(100)
    setup.synchronize()
    return partial(multiply, max(1, round(seconds / ((time.perf_counter() - began) / 100))))


def measure_overlap(setup: Setup, layout: str, backend: str, rounds: int) -> None:
    """A load, compute that takes about as long, and both together."""
    engine = setup.engine(layout, backend)
    device, host = (slots(setup.pages, setup.page_size, "adjacent") for _ in range(2))
    checked(setup, engine, device, host)
    began = time.perf_counter()
    load(engine, device, host)
    compute = compute_layers(setup, (time.perf_counter() - began) / setup.layers)

    def compute_alone() -> bool:
        for _ in range(setup.layers):
            compute()
        setup.compute.synchronize()
        return True

    def together() -> bool:
        counter = engine.load(host, device)
        for layer in range(setup.layers):
            counter.wait(layer, setup.compute)
            compute()
        setup.compute.synchronize()
        return True

    candidates = [
        ("load", partial(load, engine, device, host)),
        ("compute", compute_alone),
        ("both", together),
    ]
    for who, action in turns(candidates, rounds):
        setup.synchronize()
        setup.results.time(f"{layout}/{backend}/{setup.page_kib}", "overlap", who, action)


def report(results: Results, total_bytes: dict[int, int]) -> str:
    """The two tables."""
    copies: list[list[str]] = []
    overlaps: list[list[str]] = []
    for (subject, operation), samples in results.samples.items():
        layout, kind, page = subject.split("/")
        if operation == "overlap":
            alone = max(samples.median("load"), samples.median("compute"))
            times = [f"{samples.median(who) * 1e3:.2f} ms" for who in ("load", "compute", "both")]
            overlaps.append(
                [
                    layout,
                    kind,
                    f"{page} KiB",
                    *times,
                    f"{samples.median('both') / alone:.2f}",
                    str(OVERLAP_GOAL),
                ]
            )
            continue
        speeds = {
            who: f"{total_bytes[int(page)] / samples.median(who) / 1e9:.1f} GB/s"
            for who in (PINNED, *BACKENDS)
        }
        shares = [
            cell for who in BACKENDS for cell in (speeds[who], f"{samples.ratio(who, PINNED):.2f}")
        ]
        fastest = min(BACKENDS, key=samples.median)
        goal = str(GOALS.get(int(page), "")) if layout in PAGE_FIRST else ""
        copies.append(
            [operation, layout, kind, f"{page} KiB", speeds[PINNED], *shares, fastest, goal]
        )
    backends = [cell for who in BACKENDS for cell in (who, "share")]
    header = ["direction", "layout", "pages", "page", PINNED, *backends, "fastest", "goal"]
    second = ["layout", "backend", "page", "load", "compute", "both", "both / larger", "goal"]
    return f"{table(header, copies)}\n{table(second, overlaps)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/device-copies"))
    parser.add_argument("--layouts", default=",".join(MHAHostPool.LAYOUTS))
    parser.add_argument(
        "--pages", default="64,256,1024,4096", help="KiB of a page, all layers together"
    )
    parser.add_argument("--orders", default="adjacent,scattered")
    parser.add_argument("--layers", type=int, default=16, help="of 4 KiB a token")
    parser.add_argument("--mib", type=int, default=256, help="moved in a turn")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each")
    options = parser.parse_args()
    if options.mib < 1 or options.layers < 1 or options.rounds < 1:
        raise SystemExit("--mib, --layers and --rounds must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device; --device cpu shows whether this runs, and its figures mean nothing"
        )
    sizes = page_sizes([int(kib) for kib in options.pages.split(",")], options.layers)
    results, totals = Results(), {}
    with ExitStack() as stack:
        made = (
            CudaDevice()
            if options.device == "cuda"
            else stack.enter_context(StreamSimulator(pause_seconds=0))
        )
        device = cast("Device", NamedStreams(made))
        compute = device.stream("compute")
        for page_kib, page_size in sizes.items():
            pages = max(1, (options.mib << 10) // page_kib)
            totals[page_kib] = pages * page_kib << 10
            setup = Setup(
                options.device, device, compute, options.layers, page_kib, page_size, pages, results
            )
            for layout in options.layouts.split(","):
                for order in options.orders.split(","):
                    measure(setup, layout, order, options.rounds)
                for backend in BACKENDS:
                    measure_overlap(setup, layout, backend, options.rounds)
    text = report(results, totals)
    if options.device == "cpu":
        text = WARNING + text
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    facts = {
        **machine(),
        "torch": torch.__version__,
        "gpu": gpu,
        "layers": options.layers,
        "MiB a turn": options.mib,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.md").write_text(text)
    raw = [
        {"subject": subject, "operation": what, "seconds": samples.seconds}
        for (subject, what), samples in results.samples.items()
    ]
    (options.out / "results.json").write_text(
        json.dumps({"machine": facts, "measured": raw}, indent=1)
    )
    print(json.dumps(facts, indent=1), text, sep="\n")


if __name__ == "__main__":
    main()
