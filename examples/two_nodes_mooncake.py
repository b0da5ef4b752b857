"""Two nodes share one cache: what one stores the other reads, and the other way round, byte for
byte.

Each node is a process with an address of loopback, which lends memory to the cluster. Needs `pip
install 'hicache-storage[mooncake]'`.

    python examples/two_nodes_mooncake.py [--pages 64]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from contextlib import ExitStack
from hashlib import sha256, shake_128
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from mooncake_cluster import DevCluster

from hicache_storage import PoolName, PoolTransfer, StorageIdentity, create_storage
from hicache_storage.pools import AttentionGeometry, PagedHostPool

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM = 16, 8, 2, 64
END_SECONDS = 30.0
ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Node:
    """A process with an engine's host pool and the driver; told what to do by lines of text."""

    def __init__(self, name: str, master: str, pages: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, f"--node={name}", f"--master={master}", f"--pages={pages}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = name

    def tell(self, order: str) -> str:
        """Give an order; the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=END_SECONDS)


def main() -> int:
    arguments = _arguments()
    if arguments.node:
        return run_node(arguments.node, arguments.master, arguments.pages)
    if find_spec("mooncake") is None:
        print("this needs Mooncake: pip install 'hicache-storage[mooncake]'", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        cluster = stack.enter_context(DevCluster(stores=0))
        nodes = [Node(name, cluster.address, arguments.pages) for name in ADDRESSES]
        for node in nodes:
            stack.callback(node.close)
        for writer, reader in (nodes, nodes[::-1]):
            for node, order in ((writer, "store"), (reader, "read")):
                answer = node.tell(f"{order} {writer.name}")
                print(f"{node.name:>12} {order:5}  {answer}", flush=True)
                if answer != f"{arguments.pages} of {arguments.pages} pages":
                    return 1
    print("every page that one node stored was read by the other, byte for byte")
    return 0


def run_node(address: str, master: str, pages: int) -> int:
    """Obey orders on standard input until it ends."""
    pool = PagedHostPool(
        AttentionGeometry(
            layers=range(LAYERS), head_num=HEADS, head_dim=HEAD_DIM, dtype=torch.bfloat16
        ),
        size=pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
    )
    identity = StorageIdentity(
        model="two-nodes", kv_dtype="bfloat16", page_size=PAGE_SIZE, layout="page_first"
    )
    options = {
        "master_server_address": master,
        "local_hostname": address,
        "global_segment_size": "64mb",
    }
    storage = create_storage("mooncake", identity, options)
    storage.register_mem_host_pool_v2(pool, "kv")
    slots = [page * PAGE_SIZE for page in range(pages)]
    with storage:
        for line in sys.stdin:
            order, name = line.split()
            keys = [sha256(f"{name}/{page}".encode()).hexdigest() for page in range(pages)]
            transfer = PoolTransfer(PoolName.KV, torch.arange(pages * PAGE_SIZE), keys=keys)
            if order == "store":
                for key, page in zip(keys, pool.page_buffers(slots), strict=True):
                    fill(key, page)
                good = storage.batch_set_v2([transfer])[PoolName.KV]
            else:
                hit = storage.batch_exists_v2(keys).kv_hit_pages
                got = storage.batch_get_v2([transfer])[PoolName.KV]
                pages_read = zip(keys, got, pool.page_buffers(slots), strict=True)
                good = [ok and is_right(key, page) for key, ok, page in pages_read][:hit]
            print(f"{sum(good)} of {pages} pages", flush=True)
    return 0


def fill(key: str, page: Sequence[memoryview]) -> None:
    for number, component in enumerate(page):
        component[:] = shake_128(f"{key}/{number}".encode()).digest(len(component))


def is_right(key: str, page: Sequence[memoryview]) -> bool:
    return all(
        component.tobytes() == shake_128(f"{key}/{number}".encode()).digest(len(component))
        for number, component in enumerate(page)
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
