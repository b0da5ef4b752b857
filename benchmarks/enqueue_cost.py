"""Cost of enqueueing a transfer in the scheduler's thread, with CUDA calls replaced by no-ops: no
GPU is needed.

    python benchmarks/enqueue_cost.py

All I/O backends, both directions, pages of which no two are adjacent on either side. A turn is one
whole call of `write_back` or `load`, with checks of the indices, fences and held host slots, and
with the slots freed and taken again; the time that CUDA's driver and Triton's launcher take is not
in it. Writes results.md and results.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from interleaved import machine, table
from stubbed_cuda import StubbedDevice, stubbed

from hicache_storage.pools import MHADevicePool, MHAHostPool
from hicache_storage.transfer import BACKENDS, PageTransfers

HEADS, HEAD_DIM, DTYPE, LAYERS = 8, 128, torch.bfloat16, 16
GOAL = 2.0
"""Microseconds a page of 64 KiB."""


def engine(backend: str, layout: str, pages: int) -> PageTransfers:
    """A pair of pools with twice as many pages of one token, and the engine between them."""
    arguments = {
        "size": 2 * pages,
        "page_size": 1,
        "layer_num": LAYERS,
        "head_num": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": DTYPE,
    }
    pools = MHADevicePool(**arguments, device="cpu"), MHAHostPool(**arguments, layout=layout)
    name, _, how = backend.partition(" ")
    device = StubbedDevice(moves_rows=not how)
    return PageTransfers.between(device, device.stream("compute"), *pools, backend=name)


def measure(transfers: PageTransfers, direction: str, pages: int, rounds: int) -> float:
    """Seconds of the fastest turn."""
    separate = torch.arange(pages) * 2
    device, host = (separate[torch.randperm(pages)] for _ in range(2))
    transfers.host_slots.alloc(2 * pages)
    seconds = list[float]()
    for _ in range(rounds):
        began = time.perf_counter()
        if direction == "write-back":
            transfers.write_back(device, host)
        else:
            transfers.load(host, device)
        transfers.host_slots.free(host)
        transfers.host_slots.alloc(pages)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=4096, help="of 64 KiB, in a transfer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layouts", default="layer_first,page_first")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/enqueue-cost"))
    options = parser.parse_args()
    if options.pages < 1 or options.rounds < 1:
        raise SystemExit("--pages and --rounds must be at least 1")
    # More threads than cores would measure the scheduler of the machine.
    torch.set_num_threads(1)
    rows, raw = [], []
    with stubbed() as calls:
        for layout in options.layouts.split(","):
            for backend in (*BACKENDS, "mapped without Triton"):
                transfers = engine(backend, layout, options.pages)
                for direction in ("write-back", "load"):
                    before = calls.total()
                    seconds = measure(transfers, direction, options.pages, options.rounds)
                    made = (calls.total() - before) // options.rounds
                    page = seconds * 1e6 / options.pages
                    rows.append(
                        [
                            layout,
                            backend,
                            direction,
                            f"{seconds * 1e3:.1f} ms",
                            f"{page:.2f} us",
                            str(made),
                            str(GOAL),
                        ]
                    )
                    raw.append(
                        {
                            "layout": layout,
                            "backend": backend,
                            "direction": direction,
                            "seconds": seconds,
                            "calls": made,
                        }
                    )
    text = table(
        [
            "layout",
            "backend",
            "direction",
            f"{options.pages} pages",
            "a page",
            "CUDA calls",
            "goal, us",
        ],
        rows,
    )
    facts = {**machine(), "torch": torch.__version__, "pages": options.pages}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.md").write_text(text)
    (options.out / "results.json").write_text(
        json.dumps({"machine": facts, "measured": raw}, indent=1)
    )
    print(json.dumps(facts, indent=1), text, sep="\n")


if __name__ == "__main__":
    main()
