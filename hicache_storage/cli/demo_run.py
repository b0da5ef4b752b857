"""Store a hybrid model's cache, kill the writer, restore it in another process, verify every byte.

One process stores a conversation (KV pages, and a Mamba state every 14 pages). While it stores a
second conversation it is killed with SIGKILL. Another process then restores whatever was
acknowledged.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash
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
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from rich.console import Console

PAGE_SIZE = 64
CALL_PAGES = 112
"""KV pages in one call; an engine sends up to 128."""
STATE_EVERY = 14
"""One Mamba state per this many KV pages: the checkpoints that a hybrid model can resume from."""
SPAWN = multiprocessing.get_context("spawn")


class Model:
    """A small hybrid model's host pools: KV pages of 2 MiB, Mamba states of 4 MiB."""

    def __init__(self) -> None:
        # Pages are small: more threads would spend their time waiting for each other.
        torch.set_num_threads(1)
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


def store(driver: str, path: str, conversation: str, pages: int, calls: Connection) -> None:
    """Store a conversation, call by call.

    Args:
        calls: is sent 0 when a call begins, and its bytes when the storage has acknowledged it.
    """
    model, keys = Model(), chain(conversation, pages)
    with model.open(driver, path) as storage:
        for start in range(0, pages, CALL_PAGES):
            transfers = model.transfers(keys[start : start + CALL_PAGES])
            size = model.write(transfers)
            calls.send(0)
            storage.batch_set_v2(transfers)
            calls.send(size)


def restore(driver: str, path: str, acknowledged: Mapping[str, int]) -> dict[str, Any]:
    """Restore the acknowledged pages of each conversation, and verify every byte."""
    model, size, seconds = Model(), 0, 0.0
    counts = {name: Counter[str]() for name in model.pools}
    prefixes = dict[str, int]()
    window = PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    with model.open(driver, path) as storage:
        for conversation, pages in acknowledged.items():
            keys = chain(conversation, pages)
            for start in range(0, pages, CALL_PAGES):
                transfers = model.transfers(keys[start : start + CALL_PAGES])
                model.forget()
                started = time.perf_counter()
                delivered = storage.batch_get_v2(transfers)
                seconds += time.perf_counter() - started
                for name, found in delivered.items():
                    wrong = model.wrong_pages(transfers, name, found)
                    counts[name].update(pages=len(found), hits=sum(found), wrong=wrong)
                    size += sum(found) * model.pools[name].geometry.page_bytes
            prefixes[conversation] = storage.batch_exists_v2(keys, [window]).kv_hit_pages
        for name, stats in storage.get_stats().pools.items():
            counts[name]["damaged"] += stats.pages_damaged
    return {"pools": counts, "speed": f"{size / seconds / 1e9:.2f}", "prefixes": prefixes}


def run(driver: str, path: str, gib: float, console: Console) -> bool:
    """Make both conversations, the kill, the restore and the table.

    Returns:
        Whether everything acknowledged came back and every byte was right.
    """
    page_bytes = sum(
        pool.geometry.page_bytes / (STATE_EVERY if name == "mamba" else 1)
        for name, pool in Model().pools.items()
    )
    pages = max(CALL_PAGES, round(gib * 2**30 / page_bytes / CALL_PAGES) * CALL_PAGES)
    acknowledged = dict[str, int]()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
    ) as progress:
        for conversation, kill_after in (("first", None), ("second", pages // 2)):
            task = progress.add_task(f"{conversation} conversation", total=pages * page_bytes)
            calls, theirs = SPAWN.Pipe(duplex=False)
            arguments = (driver, path, conversation, pages, theirs)
            # A daemon is killed with this process.
            process = SPAWN.Process(target=store, args=arguments, daemon=True)
            process.start()
            theirs.close()
            acknowledged[conversation] = follow(
                calls, process.kill, kill_after, partial(progress.advance, task)
            )
            process.join()
            if kill_after is None and process.exitcode:
                return False
    console.print("the writer was killed with SIGKILL while it stored the second conversation")
    console.print("another process restores what was acknowledged, and compares every byte ...")
    with ProcessPoolExecutor(1, SPAWN) as reader:
        return report(console, reader.submit(restore, driver, path, acknowledged).result())


def follow(
    calls: Connection,
    kill: Callable[[], None],
    kill_after: int | None,
    advance: Callable[[int], None],
) -> int:
    """Follow the writer until it ends, and kill it inside the first call after `kill_after` pages.

    Returns:
        The acknowledged pages.
    """
    pages = 0
    while True:
        try:
            size = calls.recv()
        except EOFError:
            return pages
        if size:
            pages += CALL_PAGES
            advance(size)
        elif kill_after is not None and pages >= kill_after:
            time.sleep(0.02)  # the call takes some 100 ms: now it is in the middle of it
            kill()


def report(console: Console, result: dict[str, Any]) -> bool:
    """Print the table; returns whether all pages came back and every byte was right."""
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
    right = total["hits"] == total["pages"] and not (total["wrong"] or total["damaged"])
    console.print(
        "[green]every acknowledged page came back, every byte verified"
        if right
        else "[red]pages were lost or wrong"
    )
    return right
