"""Takeover of a scope by another metadata server on one Redis: seconds until the scope is in memory,
and bytes in Redis and in that server for each live page.

    python benchmarks/metadata_takeover.py --pages 1000000

Needs `redis-server` and this project with its extra `redis`. The keys are as long as those of the
driver `hf3fs`, and every page names the one before it. A killed server's lease comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from metadata_servers import redis
from redis import Redis

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.heap import keep_large_blocks_apart, trim_heap
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.scope_log import (
    ScopeLog,
    ScopeLogStore,
    load,
    max_hold_of,
    read_head,
    recovered,
    take,
)

if TYPE_CHECKING:
    from hicache_metadata_server.core.scope import Scope

SCOPE = "0:bench"
BATCH = 128


def server(url: str) -> tuple[MetadataService, ScopeLogStore]:
    service = MetadataService(durability=p.StoreDurability.PROCESS, shares_store=True)
    return service, ScopeLogStore(RedisConnection(url), time.time)


def fill(url: str, pages: int) -> None:
    """Write pages as a server does, group by group, and compact as it does when it is idle."""
    service, store = server(url)
    token, head = store._do(take(store._connection, SCOPE, b"", "one"))
    service.initialize(
        p.Initialize(scopes=[p.ScopeGeometry(scope=SCOPE, slots=pages + pages // 10)]), time.time()
    )
    store.attach(ScopeLog(SCOPE, service.number_of(SCOPE), token, head.seq, 0.0))
    last = ""
    for first in range(0, pages, BATCH):
        keys = [sha256(b"%d" % number).hexdigest() for number in range(first, first + BATCH)]
        part = p.ReserveScope(scope=SCOPE, keys=keys, prefixes=[last, *keys[:-1]])
        leases = service.reserve(p.Reserve(scopes=[part]), time.time()).scopes[0].leases
        store.write(service.take_changes())
        checksums = [int(key[:16], 16) for key in keys]
        done = p.CommitScope(
            scope=SCOPE, leases=leases, lengths=[1 << 20] * BATCH, checksums=checksums
        )
        service.commit(p.Commit(scopes=[done]), time.time())
        store.write(service.take_changes())
        last = keys[-1]
        while store.wants_compaction(idle=True):
            store.compact(store.collect(service.scope_of), time.time())
    store.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def take_over(url: str) -> dict[str, float]:
    """Take the scope in a process that begins as a server does."""
    keep_large_blocks_apart()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    before = resident_bytes()
    scope, steps = asyncio.run(taken(url))
    begin = time.perf_counter()
    trim_heap()
    steps["trim the heap"] = time.perf_counter() - begin
    pages = len(scope.lru)
    in_server = (resident_bytes() - before) / pages
    seconds = sum(steps.values())
    return {"pages": pages, "bytes_a_page_in_the_server": in_server, "seconds": seconds} | steps


async def taken(url: str) -> tuple[Scope, dict[str, float]]:
    """The scope, and the seconds of each step until another server has it in memory."""
    service, _ = server(url)
    connection = RedisConnection(url)
    steps, begin = dict[str, float](), time.perf_counter()

    def done(step: str) -> None:
        nonlocal begin
        now = time.perf_counter()
        steps[step], begin = now - begin, now

    head = await read_head(connection, SCOPE)
    token, head = await take(connection, SCOPE, head.token, "other")
    log = ScopeLog(SCOPE, service.new_number(), token, head.seq, 0.0, head.seq)
    loaded = await load(connection, SCOPE, token)
    done("read")
    found, rows = await asyncio.to_thread(recovered, log, loaded, time.time())
    done("replay the log")
    scope = await asyncio.to_thread(
        service.restored_scope, found.scopes[0], found.pins, rows, time.time(), max_hold_of(found)
    )
    done("restore")
    await connection.close()
    return scope, steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("out/metadata_takeover"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, redis(Path(directory) / "redis") as store:
        with Redis(port=store.port) as client:
            before = client.info("memory")["used_memory_dataset"]
            fill(store.url, options.pages)
            used = client.info("memory")["used_memory_dataset"] - before
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            result = process.submit(take_over, store.url).result()
    result["bytes_a_page_in_redis"] = used / result["pages"]
    (options.out / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
