"""Cost of enqueueing a transfer in the scheduler's thread, with CUDA calls replaced by no-ops: no
GPU is needed.

    python benchmarks/enqueue_cost.py

Both directions, pages of 32 layers of which no two are adjacent on either side. A turn is one call
of `write_back` or `load`, with the checks of its indices, fences and held host slots; the time that
CUDA's driver takes is not in it. Times are those of the thread's processor. Writes results.md and
results.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import Run, table
from stubbed_cuda import StubbedDevice, stubbed

from hicache_storage.pools import AttentionGeometry, DevicePages, PagedHostPool, host_tensor
from hicache_storage.transfer import Indices, PageTransfers, PoolPair

if TYPE_CHECKING:
    from hicache_storage.tools.bench.results import Measurement

HEAD_DIM, DTYPE, LAYERS = 128, torch.bfloat16, 32
HEADS, POOL_BYTES = (8, 4, 2, 1), 8 << 30
"""As many heads as a pool of this length takes: with 8, a token has 128 KiB."""
GOALS = {"write-back": 60, "load": 300}
"""Microseconds for 64 pages; 4,096 may take twice as long."""
CASES = [("page_first", 1), ("page_first", 64), ("page_first_direct", 64)]
"""Layout and tokens a page."""


def engine(layout: str, page_size: int, pages: int) -> PageTransfers:
    """A pair of pools with twice as many pages, and the engine between them."""
    size = 2 * pages * page_size
    token_bytes = 2 * LAYERS * HEAD_DIM * DTYPE.itemsize
    heads = next(heads for heads in HEADS if size * token_bytes * heads <= POOL_BYTES)
    # Nobody touches this memory, so that there need not be as much.
    shape = (LAYERS, 2, size, heads, HEAD_DIM)
    layers = host_tensor(shape, DTYPE, pin_memory=False).unbind()
    host_pool = PagedHostPool(
        AttentionGeometry(layers=range(LAYERS), head_num=heads, head_dim=HEAD_DIM, dtype=DTYPE),
        size=size,
        page_size=page_size,
        layout=layout,
        pin_memory=False,
    )
    device_pages = DevicePages([layer.unbind() for layer in layers], page_size)
    device = StubbedDevice()
    pair = PoolPair(device_pages, host_pool)
    return PageTransfers(device, device.stream("compute"), {"kv": pair})


def measure(
    one: Measurement, transfers: PageTransfers, direction: str, page_size: int, rounds: int
) -> None:
    """Measure seconds of the processor in each turn: others use this machine, too."""
    pages = one.batch_pages
    device, host = (
        ((torch.randperm(pages) * 2).unsqueeze(1) * page_size + torch.arange(page_size)).view(-1)
        for _ in range(2)
    )
    indices = {"kv": Indices(device, host)}
    enqueue = transfers.write_back if direction == "write-back" else transfers.load
    for _ in range(rounds):
        began = time.thread_time()
        enqueue(indices)
        one.add(time.thread_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", default="64,4096", help="in a transfer")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/enqueue-cost"))
    options = parser.parse_args()
    counts = [int(pages) for pages in options.pages.split(",")]
    if min(counts) < 1 or options.rounds < 1:
        raise SystemExit("--pages and --rounds must be at least 1")
    # More threads than cores would measure the scheduler of the machine.
    torch.set_num_threads(1)
    rows, run = list[list[str]](), Run()
    with stubbed() as calls:
        for layout, page_size in CASES:
            for pages in counts:
                transfers = engine(layout, page_size, pages)
                for direction, goal in GOALS.items():
                    before = calls.total()
                    case = [layout, str(page_size)]
                    one = run.of(", ".join(case), (0, 1, pages, direction))
                    measure(one, transfers, direction, page_size, options.rounds)
                    made = (calls.total() - before) // options.rounds
                    run.note(f"calls: {', '.join([*case, str(pages), direction])}", made)
                    times = [
                        f"{1e6 * seconds:.0f} us"
                        for seconds in (one.seconds, pages / max(one.rounds))
                    ]
                    goals = f"{goal * (1 + (pages > 64))} us"
                    rows.append([*case, str(pages), direction, *times, str(made), goals])
    header = ["layout", "tokens", "pages", "direction", "median", "least", "calls", "goal"]
    text = table(header, rows)
    run.save(options.out, text)
    run.show(text)


if __name__ == "__main__":
    main()
