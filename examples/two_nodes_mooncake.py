"""Two nodes share one cache: what one stores the other reads, and the other way round, byte for
byte.

The nodes are network namespaces with an address each, where this user may make some, and two
addresses of loopback otherwise. One of them also runs the master. Needs `pip install
'hicache-storage[mooncake]'`.

    python examples/two_nodes_mooncake.py [--loopback] [--pages 64]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256, shake_128
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from hicache_storage import PoolName, PoolTransfer, StorageIdentity, create_storage
from hicache_storage.pools import AttentionGeometry, PagedHostPool

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM = 16, 8, 2, 64
START_SECONDS = 30.0
MASTER_PORT = 50051


@dataclass(frozen=True)
class Place:
    """A node: its address, and the prefix of commands that run there."""

    address: str
    enter: tuple[str, ...] = ()


class Node:
    """A process in a place, with an engine's host pool and the driver; told what to do by lines of
    text."""

    def __init__(self, place: Place, master: str, pages: int) -> None:
        self._process = subprocess.Popen(
            [
                *place.enter,
                sys.executable,
                __file__,
                "--node",
                place.address,
                "--master",
                master,
                "--pages",
                str(pages),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = place.address

    def tell(self, order: str) -> str:
        """Give an order; the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=START_SECONDS)


def main() -> int:
    arguments = _arguments()
    if arguments.node:
        return run_node(arguments.node, arguments.master, arguments.pages)
    if find_spec("mooncake") is None:
        print("this needs Mooncake: pip install 'hicache-storage[mooncake]'", file=sys.stderr)
        return 2
    # So that namespaces and processes go then too.
    signal.signal(signal.SIGTERM, _end)
    with ExitStack() as stack:
        kind, here, there = "loopback", Place("127.0.0.1"), Place("127.0.0.2")
        if not arguments.loopback and may_make_namespaces():
            kind = "network namespaces"
            here, there = stack.enter_context(namespaces())
        port = free_port() if kind == "loopback" else MASTER_PORT
        stack.enter_context(running_master(here, port))
        print(
            f"two nodes in {kind}: {here.address}, with the master, and {there.address}", flush=True
        )
        nodes = [Node(place, f"{here.address}:{port}", arguments.pages) for place in (here, there)]
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


@contextlib.contextmanager
def running_master(place: Place, port: int) -> Generator[None]:
    """A master in a place, until the block ends."""
    options = [
        f"--rpc_address={place.address}",
        f"--rpc_port={port}",
        f"--metrics_host={place.address}",
        "--metrics_port=0",
    ]
    command = [*place.enter, sys.executable, "-m", "mooncake.cli", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        try:
            look = (
                f"import socket; socket.create_connection(({place.address!r}, {port}), 1).close()"
            )
            until = time.monotonic() + START_SECONDS
            while subprocess.run(
                [*place.enter, sys.executable, "-c", look], stderr=subprocess.DEVNULL, check=False
            ).returncode:
                if master.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the master does not listen at {place.address}:{port}")
                time.sleep(0.1)
            yield
        finally:
            # It keeps nothing, and asked to end by itself it takes its time.
            master.kill()


def may_make_namespaces() -> bool:
    """Return True if this user may create network namespaces, connect them, and run commands in
    them."""
    if shutil.which("ip") is None:
        return False
    try:
        with namespaces() as (place, _):
            return (
                subprocess.run([*place.enter, "true"], capture_output=True, check=False).returncode
                == 0
            )
    except subprocess.CalledProcessError:
        return False


@contextlib.contextmanager
def namespaces() -> Generator[tuple[Place, Place]]:
    """Two namespaces with a cable between them; both go when the block ends, and the cable with
    them."""
    ends = [
        (f"hicache-{os.getpid()}-{side}", f"hc{os.getpid()}{side}", f"10.213.7.{number}")
        for number, side in ((1, "a"), (2, "b"))
    ]
    with ExitStack() as stack:
        for name, _, _ in ends:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        (one, cable, _), (other, end, _) = ends
        _ip("link", "add", cable, "netns", one, "type", "veth", "peer", "name", end, "netns", other)
        for name, device, address in ends:
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            for up in (device, "lo"):
                _ip("-n", name, "link", "set", up, "up")
        here, there = (Place(address, ("ip", "netns", "exec", name)) for name, _, address in ends)
        yield here, there


def _end(_number: int, _frame: object) -> None:
    sys.exit(1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--loopback",
        action="store_true",
        help="two addresses of loopback, also where namespaces could be made",
    )
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
