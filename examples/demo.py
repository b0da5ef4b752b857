"""Store a hybrid model's cache, kill the writer, restore it in another process, verify every byte.

One process stores a conversation of 1 GiB (KV pages, and a Mamba state every 14 pages) through the
file driver. While it stores a second conversation it is killed with SIGKILL. Another process then
restores whatever was acknowledged.

    python examples/demo.py [--path DIR] [--gib 1.0] [--driver file]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StorageIdentity,
    create_storage,
)
from hicache_storage.pools import (
    AttentionGeometry,
    MambaGeometry,
    PagedHostPool,
    byte_view,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

PAGE_SIZE = 64
CALL_PAGES = 112
"""KV pages in one call; an engine sends up to 128."""
STATE_EVERY = 14
"""One Mamba state per this many KV pages: the checkpoints that a hybrid model can resume from."""
STORING = "storing"
"""What the writer says when it hands a call to the storage; the acknowledgement is the next
line."""


class Model:
    """A small hybrid model's host pools: KV pages of 2 MiB, Mamba states of 4 MiB."""

    def __init__(self) -> None:
        self.identity = StorageIdentity(
            model="demo/hybrid-8b", kv_dtype="bfloat16", page_size=PAGE_SIZE, layout="page_first"
        )
        self.pools: dict[str, PagedHostPool] = {
            "kv": PagedHostPool(
                AttentionGeometry(layers=range(8), head_num=8, head_dim=128, dtype=torch.bfloat16),
                size=CALL_PAGES * PAGE_SIZE,
                page_size=PAGE_SIZE,
            ),
            "mamba": PagedHostPool(
                MambaGeometry(
                    layers=range(8),
                    temporal_shape=(32, 64, 62),
                    conv_shapes=[(4096, 4)],
                    temporal_dtype=torch.float32,
                    conv_dtype=torch.bfloat16,
                ),
                size=CALL_PAGES // STATE_EVERY,
            ),
        }

    def open(self, driver: str, path: str) -> HiCacheStorage:
        storage = create_storage(driver, self.identity, {"path": path})
        for name, pool in self.pools.items():
            storage.register_mem_host_pool_v2(pool, name)
        storage.on_host_pools_registered()
        return storage

    def transfers(self, keys: list[str]) -> list[PoolTransfer]:
        """The KV pages of `keys`, and the states at its checkpoints."""
        states = keys[STATE_EVERY - 1 :: STATE_EVERY]
        return [
            PoolTransfer(PoolName.KV, torch.arange(len(keys) * PAGE_SIZE), keys=keys),
            PoolTransfer(
                PoolName.MAMBA,
                torch.arange(len(states)),
                keys=states,
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
        ]

    def write(self, transfers: list[PoolTransfer]) -> int:
        """Compute the pages of a call, as a forward pass would; returns their bytes."""
        total = 0
        for transfer in transfers:
            pool = self.pools[transfer.name]
            for index, key in enumerate(transfer.keys or ()):
                data, start = memoryview(expected_page(pool, transfer.name, key)), 0
                for buffer in pool.page_buffers([index * pool.page_size])[0]:
                    buffer[:] = data[start : start + len(buffer)]
                    start += len(buffer)
                total += pool.geometry.page_bytes
        return total

    def wrong_pages(self, transfers: list[PoolTransfer], name: str, delivered: list[bool]) -> int:
        """Count the pages in a pool that differ from the computed ones."""
        pool = self.pools[name]
        keys = next(transfer.keys or () for transfer in transfers if transfer.name == name)
        return sum(
            ok
            and b"".join(pool.page_buffers([index * pool.page_size])[0])
            != expected_page(pool, name, key)
            for index, (key, ok) in enumerate(zip(keys, delivered, strict=True))
        )

    def forget(self) -> None:
        """Fill the host pools with junk, so that nothing can be right by accident."""
        for pool in self.pools.values():
            for buffer in pool.buffers:
                buffer.view(torch.uint8).fill_(0xEE)


def expected_page(pool: PagedHostPool, name: str, key: str) -> bytes:
    """The page that belongs to a key: every 8 bytes of it differ from those of every other page."""
    seed = xxhash.xxh3_64_intdigest(f"{name}/{key}".encode()) >> 1
    words = (
        torch.arange(pool.geometry.page_bytes // 8, dtype=torch.int64)
        .mul_(0x9E3779B97F4A7C1)
        .add_(seed)
    )
    return bytes(byte_view(words))


def chain(conversation: str, pages: int) -> list[str]:
    """Page keys, chained as an engine chains them: each stands for all tokens before it."""
    keys, digest = list[str](), conversation
    for page in range(pages):
        digest = xxhash.xxh3_128_hexdigest(f"{digest}/{page}".encode())
        keys.append(digest)
    return keys


def store(driver: str, path: str, conversation: str, pages: int) -> None:
    """The first process: stores a conversation call by call and acknowledges each, in a line of
    JSON."""
    model, keys = Model(), chain(conversation, pages)
    with model.open(driver, path) as storage:
        for start in range(0, pages, CALL_PAGES):
            transfers = model.transfers(keys[start : start + CALL_PAGES])
            size = model.write(transfers)
            print(STORING, flush=True)
            storage.batch_set_v2(transfers)
            call = {"conversation": conversation, "keys": transfers[0].keys, "bytes": size}
            print(json.dumps(call), flush=True)


def restore(driver: str, path: str) -> None:
    """The second process: restores every call that its standard input names, and verifies every
    byte."""
    model, size, seconds = Model(), 0, 0.0
    counts = {name: Counter[str]() for name in model.pools}
    conversations = dict[str, list[str]]()
    with model.open(driver, path) as storage:
        for call in map(json.loads, sys.stdin):
            conversations.setdefault(call["conversation"], []).extend(call["keys"])
            transfers = model.transfers(call["keys"])
            model.forget()
            started = time.perf_counter()
            delivered = storage.batch_get_v2(transfers)
            seconds += time.perf_counter() - started
            for name, pages in delivered.items():
                wrong = model.wrong_pages(transfers, name, pages)
                counts[name].update(pages=len(pages), hits=sum(pages), wrong=wrong)
                size += sum(pages) * model.pools[name].geometry.page_bytes
        window = PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        prefixes = {
            conversation: storage.batch_exists_v2(keys, [window]).kv_hit_pages
            for conversation, keys in conversations.items()
        }
        for name, stats in storage.get_stats().pools.items():
            counts[name]["damaged"] += stats.pages_damaged
    speed = f"{size / seconds / 1e9:.2f}"
    print(json.dumps({"pools": counts, "speed": speed, "prefixes": prefixes}))


def run(driver: str, path: str, gib: float) -> int:
    """Both processes, the kill in between, and the table. Returns the exit status."""
    console = Console()
    page_bytes = sum(
        pool.geometry.page_bytes / (STATE_EVERY if name == "mamba" else 1)
        for name, pool in Model().pools.items()
    )
    pages = max(CALL_PAGES, round(gib * 2**30 / page_bytes / CALL_PAGES) * CALL_PAGES)
    acknowledged = list[str]()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
    ) as progress:
        for conversation, kill_after in (("first", None), ("second", pages // 2)):
            task = progress.add_task(f"{conversation} conversation", total=pages * page_bytes)
            with writer(driver, path, conversation, pages) as process:
                status = follow(
                    process,
                    acknowledged,
                    kill_after,
                    lambda size, task=task: progress.advance(task, size),
                )
            if kill_after is None and status:
                return status
    console.print("the writer was killed with SIGKILL while it stored the second conversation")
    arguments = [sys.executable, __file__, "--role", "restore", "--driver", driver, "--path", path]
    done = subprocess.run(
        arguments, input="".join(acknowledged), stdout=subprocess.PIPE, text=True, check=True
    )
    return report(console, json.loads(done.stdout))


def follow(
    process: subprocess.Popen[str],
    acknowledged: list[str],
    kill_after: int | None,
    advance: Callable[[int], None],
) -> int:
    """Collect acknowledgements; kill the writer inside the first call after `kill_after` pages.
    Returns its exit status."""
    pages = 0
    for line in process.stdout or ():
        if line.strip() == STORING:
            if kill_after is not None and pages >= kill_after:
                time.sleep(0.02)  # the call takes some 100 ms: now it is in the middle of it
                process.kill()
            continue
        acknowledged.append(line)
        call = json.loads(line)
        pages += len(call["keys"])
        advance(call["bytes"])
    return process.wait()


@contextlib.contextmanager
def writer(
    driver: str, path: str, conversation: str, pages: int
) -> Generator[subprocess.Popen[str]]:
    """The storing process; killed if the demo itself fails."""
    command = [sys.executable, __file__, "--role", "store", "--driver", driver, "--path", path]
    command += ["--conversation", conversation, "--pages", str(pages)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def report(console: Console, result: dict[str, Any]) -> int:
    """Print the table; 0 if everything acknowledged came back and every byte was right."""
    table = Table(title="restored by another process", title_justify="left")
    for column in ("pool", "pages acknowledged", "hits", "damaged", "wrong bytes", "GB/s"):
        table.add_column(column, justify="left" if column == "pool" else "right")
    columns = ("pages", "hits", "damaged", "wrong")
    total = Counter[str]()
    for name, counts in result["pools"].items():
        total.update(counts)
        table.add_row(name, *(str(counts.get(column, 0)) for column in columns))
    table.add_section()
    table.add_row("all", *(str(total[column]) for column in columns), result["speed"])
    console.print(table)
    for conversation, prefix in result["prefixes"].items():
        tokens = prefix * PAGE_SIZE
        console.print(
            f"{conversation} conversation: {prefix} pages ({tokens} tokens) can be resumed"
        )
    right = total["hits"] == total["pages"] and not total["wrong"] and not total["damaged"]
    console.print(
        "[green]every acknowledged page came back, every byte verified"
        if right
        else "[red]pages were lost or wrong"
    )
    return 0 if right else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", help="directory of the store; a temporary one by default")
    parser.add_argument("--gib", type=float, default=1.0, help="size of a conversation")
    parser.add_argument("--driver", default="file")
    parser.add_argument("--role", choices=["store", "restore"], help=argparse.SUPPRESS)
    parser.add_argument("--conversation", default="first", help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=int, default=CALL_PAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "store":
        store(options.driver, options.path, options.conversation, options.pages)
        return 0
    if options.role == "restore":
        restore(options.driver, options.path)
        return 0
    with contextlib.ExitStack() as stack:
        path = options.path or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="hicache-demo-")
        )
        return run(options.driver, str(Path(path)), options.gib)


if __name__ == "__main__":
    sys.exit(main())
