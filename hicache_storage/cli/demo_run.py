"""Store a hybrid model's cache, kill the writer, restore it in another process, verify every byte.

One process stores a conversation (KV pages, and a Mamba state every 14 pages), and is killed with
SIGKILL before its end. Another process then restores whatever was acknowledged.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import torch
import xxhash
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
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from rich.console import Console

PAGE_SIZE = 64
CALL_PAGES = 112
"""KV pages in one call; an engine sends up to 128."""
STATE_EVERY = 14
"""One Mamba state per this many KV pages: the checkpoints that a hybrid model can resume from."""
COLUMNS = ("pages", "hits", "wrong")
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

    def open(self, path: str) -> HiCacheStorage:
        storage = create_storage("file", self.identity, {"path": path})
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

    def pages(self, transfers: list[PoolTransfer]) -> Iterator[tuple[str, str, list[memoryview]]]:
        """Yield pool, key and buffers of each page of a call."""
        for transfer in transfers:
            pool, keys = self.pools[transfer.name], transfer.keys or []
            slots = range(0, len(keys) * pool.page_size, pool.page_size)
            for key, buffers in zip(keys, pool.page_buffers(slots), strict=True):
                yield transfer.name, key, buffers

    def write(self, transfers: list[PoolTransfer]) -> None:
        """Compute the pages of a call, as a forward pass would."""
        for name, key, buffers in self.pages(transfers):
            data, start = memoryview(self.expected_page(name, key)), 0
            for buffer in buffers:
                buffer[:] = data[start : start + len(buffer)]
                start += len(buffer)

    def expected_page(self, name: str, key: str) -> bytes:
        """The page of a key: every 8 bytes of it differ from those of every other page."""
        seed = xxhash.xxh3_64_intdigest(f"{name}/{key}".encode()) >> 1
        words = torch.arange(self.pools[name].geometry.page_bytes // 8, dtype=torch.int64)
        return bytes(byte_view(words.mul_(0x9E3779B97F4A7C1).add_(seed)))

    def forget(self) -> None:
        """Fill the host pools with junk, so that nothing can be right by accident."""
        for pool in self.pools.values():
            for buffer in pool.buffers:
                buffer.view(torch.uint8).fill_(0xEE)


def chain(pages: int) -> list[str]:
    """Page keys, chained as an engine chains them: each stands for all tokens before it."""
    keys, digest = list[str](), "conversation"
    for page in range(pages):
        digest = xxhash.xxh3_128_hexdigest(f"{digest}/{page}".encode())
        keys.append(digest)
    return keys


def store(path: str, pages: int, calls: Connection) -> None:
    """Store a conversation, call by call.

    Args:
        calls: is sent False when a call begins, and True when the storage has acknowledged it.
    """
    model, keys = Model(), chain(pages)
    with model.open(path) as storage:
        for start in range(0, pages, CALL_PAGES):
            transfers = model.transfers(keys[start : start + CALL_PAGES])
            model.write(transfers)
            calls.send(False)
            storage.batch_set_v2(transfers)
            calls.send(True)


def restore(path: str, pages: int) -> tuple[dict[str, Counter[str]], int]:
    """Restore the acknowledged pages of the conversation, and verify every byte.

    Returns:
        Counts by pool; and the number of pages from which the conversation can be resumed.
    """
    model, keys = Model(), chain(pages)
    counts = {name: Counter[str]() for name in model.pools}
    window = PoolTransfer(PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    with model.open(path) as storage:
        for start in range(0, pages, CALL_PAGES):
            transfers = model.transfers(keys[start : start + CALL_PAGES])
            model.forget()
            delivered = storage.batch_get_v2(transfers)
            hits = [hit for transfer in transfers for hit in delivered[transfer.name]]
            for (name, key, buffers), hit in zip(model.pages(transfers), hits, strict=True):
                wrong = hit and b"".join(buffers) != model.expected_page(name, key)
                counts[name].update(pages=1, hits=hit, wrong=wrong)
        return counts, storage.batch_exists_v2(keys, [window]).kv_hit_pages


def run(path: str, gib: float, console: Console) -> bool:
    """Store a conversation, kill its writer, restore what was acknowledged, print a table.

    Returns:
        Whether everything acknowledged came back and every byte was right.
    """
    kv, mamba = (pool.geometry.page_bytes for pool in Model().pools.values())
    calls = max(3, round(gib * 2**30 / (kv + mamba / STATE_EVERY) / CALL_PAGES))
    reader, writer = SPAWN.Pipe(duplex=False)
    # A daemon is killed with this process.
    process = SPAWN.Process(target=store, args=(path, calls * CALL_PAGES, writer), daemon=True)
    process.start()
    writer.close()
    acknowledged = follow(reader, process.kill, calls - 2) * CALL_PAGES
    process.join()
    if process.exitcode != -signal.SIGKILL:
        return False
    console.print(f"{acknowledged} pages were acknowledged before the writer was killed (SIGKILL)")
    console.print("another process restores what was acknowledged, and compares every byte ...")
    with ProcessPoolExecutor(1, SPAWN) as executor:
        counts, prefix = executor.submit(restore, path, acknowledged).result()
    table = Table("pool", *COLUMNS, title="restored by another process", title_justify="left")
    for name, count in counts.items():
        table.add_row(name, *(str(count[column]) for column in COLUMNS))
    console.print(table)
    console.print(
        f"the conversation can be resumed after {prefix} pages ({prefix * PAGE_SIZE} tokens)"
    )
    right = all(count["hits"] == count["pages"] and not count["wrong"] for count in counts.values())
    console.print(
        "[green]every acknowledged page came back, every byte verified"
        if right
        else "[red]pages were lost or wrong"
    )
    return right


def follow(calls: Connection, kill: Callable[[], None], kill_after: int) -> int:
    """Follow the writer until it ends, and kill it inside the first call after so many.

    Returns:
        The acknowledged calls.
    """
    acknowledged = 0
    while True:
        try:
            is_acknowledged = calls.recv()
        except EOFError:
            return acknowledged
        if is_acknowledged:
            acknowledged += 1
        elif acknowledged >= kill_after:
            time.sleep(0.02)  # the call takes some 100 ms: now it is in the middle of it
            kill()
