"""Time until a store of many pages answers: a fresh storage is opened, and looks pages up for the
first time.

    python benchmarks/open_store.py [--pages 100000]

The pages are small, because only their index is read.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

from interleaved import drop_from_page_cache, fresh_keys

from hicache_storage import PoolTransfer, StorageIdentity, create_storage
from hicache_storage.pools import MHAHostPool

BATCH_PAGES = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path(), help="where to make the store")
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    identity = StorageIdentity(
        model="benchmark", kv_dtype="bfloat16", page_size=1, layout="page_first"
    )
    pool = MHAHostPool(
        size=BATCH_PAGES,
        page_size=1,
        layer_num=1,
        head_num=1,
        head_dim=16,
        dtype=torch.bfloat16,
        layout="page_first",
    )
    indices, keys = torch.arange(BATCH_PAGES), list[str]()
    with tempfile.TemporaryDirectory(prefix="open-store-", dir=options.path) as path:

        def storage():
            made = create_storage("file", identity, {"path": path, "capacity": "1TiB"})
            made.register_mem_host_pool_v2(pool, "kv")
            return made

        with storage() as writer:
            for _ in range(-(-options.pages // BATCH_PAGES)):
                keys = fresh_keys(BATCH_PAGES)
                assert all(writer.batch_set_v2([PoolTransfer("kv", indices, keys=keys)])["kv"])
        seconds: dict[str, list[float]] = {"cached": [], "cold": []}
        for kind, samples in seconds.items():
            for _ in range(options.rounds):
                if kind == "cold":
                    drop_from_page_cache(list(Path(path).rglob("*.bundle")))
                reader = storage()
                started = time.perf_counter()
                reader.open()
                found = reader.batch_exists_v2(keys).kv_hit_pages
                samples.append(time.perf_counter() - started)
                assert found == BATCH_PAGES
                reader.close()
    for kind, samples in seconds.items():
        low, middle, high = (
            1000 * value for value in (min(samples), statistics.median(samples), max(samples))
        )
        print(
            f"{options.pages} pages, {kind}: {middle:.0f} ms ({low:.0f} - {high:.0f}) to open and "
            f"answer the first exists"
        )


if __name__ == "__main__":
    main()
