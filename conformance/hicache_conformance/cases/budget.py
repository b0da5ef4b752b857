"""Costs of a call (round trips, batches, transient memory), and what get_stats() counts of it."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from hicache_conformance.harness.driver_calls import counted, has_steps, require_steps
from hicache_conformance.harness.pools import GuardedPool, PoolMemory
from hicache_conformance.harness.storage_under_test import (
    PageGroup,
    StorageUnderTest,
    all_pages,
    trailing,
)
from hicache_conformance.injectors.tcp_proxy import TcpProxyInjector
from hicache_conformance.model.case import Inconclusive, NotPromised, check, covers
from hicache_conformance.model.rules import Level
from hicache_storage.layers import StorageOptions, innermost
from hicache_storage.spec import PoolName, PoolStats, PoolTransfer, PoolTransferResult
from hicache_storage.spec.stats import OPERATIONS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.fixtures.target import DriverTarget
    from hicache_conformance.injectors.injector import FaultInjector

BATCH: Final = 128
"""Pages of a call, as SGLang batches them."""
PAGES_OF_POOLS: Final = f"{BATCH} pages in each of 3 pools"
PAGE_BYTES: Final = 256 << 10
MIN_PAGE_BYTES: Final = 32 << 10
MAX_PAGES: Final = BATCH // 4
CALLS: Final = 3
_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")


MANY_KEYS: Final = 250_000
MANY_REQUESTS: Final = 1_000
"""Keys of a call to a store where each page is a request: of a context of 64,000 tokens."""
MIN_IN_FLIGHT: Final = 16
"""A driver that has fewer requests in flight waits as often as one that has this many."""
QUIET_SECONDS: Final = (0.02, 0.1, 0.4)
"""Times without a byte after which a driver is taken to wait, of the attempts. A busy machine makes
pauses of its own, but hardly of the last one's length."""
PATIENCE_SECONDS: Final = 60.0
"""Twice the default deadline of a call."""
NOTICEABLE_SECONDS: Final = 1.0
ATTEMPTS: Final = 3


class BudgetCases:
    """EX-10, BU-1 and BU-2."""

    @covers("EX-10", levels=Level.BUDGET)
    def test_one_question_for_all_pools(self, context: CaseContext) -> None:
        """128 keys over three pools are answered right, by one question to the driver."""
        sut, keys = _three_pools(context), context.keys(BATCH)
        _store_chain(sut, keys[:40])
        with counted(sut.storage) as calls:
            answer = _ask(sut, keys)
        _check_answer(answer, BATCH)
        check(
            calls.total() <= 1,
            "EX-10",
            f"one exists of {BATCH} keys over 3 pools called {_listed(calls)}, must be one "
            f"objects_exist",
        )
        with counted(sut.storage) as calls:
            found = sut.present(keys)
        check(
            found == [True] * 40 + [False] * (BATCH - 40),
            "EX-11",
            f"40 of {BATCH} keys are stored; batch_present says {found}",
        )
        check(
            calls.total() <= 1,
            "EX-10",
            f"one batch_present of {BATCH} keys called {_listed(calls)}, must be one objects_exist",
        )

    @covers("EX-10", levels=Level.BUDGET, needs=["networked"])
    def test_one_round_trip(self, context: CaseContext, injector: FaultInjector) -> None:
        """128 keys over three pools cost one wait, or those of its requests in flight."""
        owner = cast("DriverTarget", self)
        if TcpProxyInjector.name not in owner.driver_setup().injectors():
            raise Inconclusive(
                "the suite cannot count round trips: it starts no server of this driver "
                "(trial_services, {port:NAME})"
            )
        if not isinstance(injector, TcpProxyInjector):
            raise NotPromised("round trips are counted on the injector network alone")
        sut, keys = _three_pools(context), context.keys(BATCH)
        _store_chain(sut, keys[:40])
        _check_waits(sut, keys, injector)

    @covers("EX-10", levels=Level.BUDGET)
    def test_many_keys(self, context: CaseContext) -> None:
        """250,000 keys in one call, or 1,000 requests: the time does not grow squared."""
        each = context.capabilities.requests_in_flight is not None
        many = MANY_REQUESTS if each else MANY_KEYS
        sut, keys = _three_pools(context), context.keys(many)
        _store_chain(sut, keys[:40])
        _store_chain(sut, keys[-1:])
        # In doublings, so that a driver of quadratic cost is found out after seconds. The whole
        # call alone would take it hours.
        count = 1000
        while count <= many // 4:
            _check_time(sut, keys[:count])
            count *= 2
        _check_answer(_ask(sut, keys), many)

    @covers("BU-1", levels=Level.BUDGET)
    def test_one_batch_for_a_call(self, context: CaseContext) -> None:
        """128 pages in each of three pools: a set asks the driver once, and so does a get."""
        sut = _three_pools(context, pages=BATCH)
        require_steps(sut.storage)
        shares = [PageGroup(context.keys(BATCH), pool) for pool in sut.memories]
        # Fresh keys first and the same ones afterwards, so that the set has to write and the get
        # has to read all of them.
        with counted(sut.storage) as calls:
            sut.store_many(shares)
        check_calls(calls, f"set of {PAGES_OF_POOLS}", "objects_exist", "write_objects")
        with counted(sut.storage) as calls:
            found = sut.get_many(shares)
        check_calls(calls, f"get of {PAGES_OF_POOLS}", "objects_exist", "read_objects")
        for share in shares:
            sut.compare(share.keys, found[share.pool], share.pool)

    @covers("BU-2", levels=Level.BUDGET)
    def test_pages_are_not_staged(self, context: CaseContext) -> None:
        """A set and a get of 128 pages of 256 KiB need memory for a quarter at most."""
        if context.capabilities.networked:
            raise NotPromised("the driver is networked: its messages take memory of their own")
        limit = context.capabilities.max_page_bytes or PAGE_BYTES
        page_bytes = min(PAGE_BYTES, limit // 2 * 2)
        if page_bytes < MIN_PAGE_BYTES:
            raise Inconclusive(
                f"max_page_bytes is {limit}; what a batch costs is measured with pages of "
                f"{MIN_PAGE_BYTES} bytes and more"
            )
        memory = GuardedPool(pages=BATCH, components=(page_bytes // 2, page_bytes // 2))
        for page in range(BATCH):
            # Random bytes, so that no store saves work by compressing them or by finding two pages
            # alike.
            memory.write(page, context.random.randbytes(page_bytes))
        sut = context.storage(pools={PoolName.KV: memory})
        groups = [PageGroup(context.keys(BATCH)) for _ in range(CALLS)]
        batches = [sut.transfers([group], [range(BATCH)]) for group in groups]
        # New pages in each set, and in the gets those that were set last.
        for what, some in (("set", batches), ("get", [batches[-1]] * CALLS)):
            needed = transient_bytes(partial(_move, sut, what, batch) for batch in some)
            check(
                needed <= MAX_PAGES * memory.page_bytes,
                "BU-2",
                f"a {what} of {BATCH} pages took memory for {needed / memory.page_bytes:.0f} pages "
                f"of {memory.page_bytes >> 10} KiB while it ran, must be {MAX_PAGES} at most",
            )


def transient_bytes(calls: Iterable[Callable[[], object]]) -> int:
    """The least that any of the calls needed beyond what it found and left behind.

    Python's own memory is traced to the byte. Memory from elsewhere, such as tensors and mappings,
    shows in the pages that the process touches.
    """
    needs = list[int]()
    gc.collect()
    tracemalloc.start()
    try:
        for call in calls:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            # Where the kernel does not let us, the peak since the process began hides this part; the
            # traced part remains.
            with contextlib.suppress(OSError):
                _CLEAR.write_text("5")
            resident = _resident("VmRSS:")
            call()
            resident_peak, resident_after = _resident("VmHWM:"), _resident("VmRSS:")
            after, peak = tracemalloc.get_traced_memory()
            needs.append(
                max(peak - max(before, after), resident_peak - max(resident, resident_after))
            )
    finally:
        tracemalloc.stop()
    # The least, because a buffer that grows once, or a library's cache, is needed in the first
    # calls only.
    return max(0, min(needs))


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _move(sut: StorageUnderTest, what: str, transfers: Sequence[PoolTransfer]) -> None:
    """Set or get a batch of KV pages."""
    move = sut.storage.batch_set_v2 if what == "set" else sut.storage.batch_get_v2
    missed = sut.call(f"batch_{what}_v2", partial(move, transfers))[PoolName.KV].count(False)
    if missed and (what == "set" or sut.storage.capabilities.evicts):
        raise Inconclusive(f"the store has no room for a batch of {BATCH} pages; give it more")
    check(not missed, "SET-1", f"a get of {BATCH} stored pages answered False for {missed}")


def _three_pools(context: CaseContext, pages: int = 64) -> StorageUnderTest:
    memories: dict[str, PoolMemory] = {
        pool: GuardedPool(pages=pages) for pool in (PoolName.KV, PoolName.MAMBA, PoolName.INDEXER)
    }
    return context.storage(pools=memories)


def _store_chain(sut: StorageUnderTest, keys: Sequence[str]) -> None:
    """KV and indexer of all pages, and the state after every twentieth."""
    sut.store(keys)
    sut.store(keys, PoolName.INDEXER)
    if keys[19::20]:
        sut.store(keys[19::20], PoolName.MAMBA)


def _ask(sut: StorageUnderTest, keys: Sequence[str]) -> PoolTransferResult:
    return sut.exists(keys, trailing(PoolName.MAMBA, 1), all_pages(PoolName.INDEXER))


def _check_answer(answer: PoolTransferResult, count: int) -> None:
    hit, endpoints = answer.kv_hit_pages, list(answer.restorable_prefix_pages)
    check(
        hit == 40 and endpoints == [20, 40],
        "EX-10",
        f"an exists of {count} keys over 3 pools answered {hit} and {endpoints[:5]}, must be 40 and "
        f"[20, 40]",
    )


def _check_waits(sut: StorageUnderTest, keys: Sequence[str], injector: TcpProxyInjector) -> None:
    lookups = 3 * len(keys)
    in_flight = sut.storage.capabilities.requests_in_flight
    allowed = 1 if in_flight is None else -(-lookups // max(in_flight, MIN_IN_FLIGHT))
    _check_answer(_ask(sut, keys), len(keys))
    # The least of several attempts counts: one may open connections or refresh a view of the
    # store, which are waits of their own.
    waits, requests = list[int](), list[int]()
    for quiet_seconds in QUIET_SECONDS:
        before = injector.requests()
        injector.hold_replies(quiet_seconds)
        try:
            hit = _ask(sut, keys).kv_hit_pages
        finally:
            waited = injector.waits()
        # Held back for so long, a call of many waits ends at its deadline, and has not made all.
        if hit or not waits:
            waits.append(waited)
            requests.append(injector.requests() - before)
        if min(waits) <= allowed and min(requests) <= lookups:
            return
    what = f"one exists of {len(keys)} keys over 3 pools"
    declared = "" if in_flight is None else f" with {in_flight} requests in flight"
    check(
        min(waits) <= allowed,
        "EX-10",
        f"{what} waited {min(waits)} times for the server{declared}, must be {allowed} at most",
    )
    check(
        min(requests) <= lookups,
        "EX-10",
        f"{what} made {min(requests)} requests, must be {lookups} at most: one for each",
    )


def _check_time(sut: StorageUnderTest, keys: Sequence[str]) -> None:
    """Check that a call takes its share, by the number of keys, of what a call of all may take."""
    allowed = max(NOTICEABLE_SECONDS, PATIENCE_SECONDS * len(keys) / MANY_KEYS)
    taken = list[float]()
    # The least of several: a single slow call may be the machine's doing.
    while len(taken) < ATTEMPTS and min(taken, default=math.inf) > allowed:
        started = time.perf_counter()
        _check_answer(_ask(sut, keys), len(keys))
        taken.append(time.perf_counter() - started)
    check(
        min(taken) <= allowed,
        "EX-10",
        f"an exists of {len(keys)} keys took {min(taken):.2f} s, must take {allowed:.2f} s at most: "
        f"its share of {PATIENCE_SECONDS:.0f} s for {MANY_KEYS} keys",
    )


def check_calls(calls: Counter[str], what: str, *allowed: str) -> None:
    """Check that the driver was asked once at most for each of some methods.

    Raises:
        Violation: BU-1.
    """
    check(
        not any(name not in allowed or number > 1 for name, number in calls.items()),
        "BU-1",
        f"a {what} called {_listed(calls)}; allowed is each of {' and '.join(allowed)} once",
    )


def _listed(calls: Counter[str]) -> str:
    return ", ".join(f"{name} {number} times" for name, number in sorted(calls.items()))


class StatsCases:
    """OB-1 and OB-2."""

    @covers("OB-1")
    def test_counters(self, context: CaseContext) -> None:
        """Pages set, read, found and missed, in one transfer and in several, of each pool."""
        pools = {PoolName.KV: GuardedPool(), PoolName.INDEXER: GuardedPool(components=(40,))}
        sut, keys, missing = context.storage(pools=pools), context.keys(5), context.keys(2)
        page_bytes = sut.memories[PoolName.KV].page_bytes
        groups = [PageGroup(keys[:2]), PageGroup(keys[2:3]), PageGroup(keys[3:])]
        sut.store_many(groups)
        _check(sut, pages_written=5, bytes_written=5 * page_bytes, pages_read=0, pages_refused=0)
        sut.exists([*keys[:3], *missing])
        _check(sut, pages_hit=3, pages_absent=2, pages_missed=0, pages_read=0)
        sut.get([*keys[:4], *missing])
        _check(sut, pages_read=4, bytes_read=4 * page_bytes, pages_missed=2, pages_damaged=0)
        sut.get_many(groups)
        _check(sut, pages_read=9, bytes_read=9 * page_bytes, pages_missed=2)
        sut.store(keys[:1], PoolName.INDEXER)
        sut.get_many([PageGroup(keys[:2], pool) for pool in pools])
        indexer, page = PoolName.INDEXER, pools[PoolName.INDEXER].page_bytes
        _check(sut, indexer, pages_written=1, bytes_written=page, pages_read=1, bytes_read=page)
        _check(sut, indexer, pages_missed=1)
        _check(sut, pages_hit=3, pages_absent=2, pages_written=5, pages_read=11, pages_missed=2)

    @covers("OB-1")
    def test_latencies(self, context: CaseContext) -> None:
        """Each call is observed once, under its operation and pool."""
        sut, keys = context.storage(), context.keys(2)
        for _ in range(3):
            sut.set(keys)
            sut.get(keys)
            sut.exists(keys)
        for operation in OPERATIONS:
            latency = sut.stats().latency[operation]
            check(
                latency.calls == 3 and sum(latency.buckets) == 3 and latency.seconds >= 0,
                "OB-1",
                f"3 calls of {operation} left latency {latency}",
            )

    @covers("OB-1")
    def test_a_snapshot_stays_what_it_is(self, context: CaseContext) -> None:
        """get_stats() is a copy, is not drained by reading it, and can be asked after close()."""
        sut, keys = context.stored(3)
        first = sut.call("get_stats", sut.storage.get_stats)
        sut.get(keys)
        kept = first.pools[PoolName.KV].pages_read == 0
        check(kept, "OB-1", "a snapshot changed after it was taken")
        sut.call("close", sut.storage.close)
        for _ in range(2):
            _check(sut, pages_written=3, pages_read=3)

    @covers("OB-2", levels=Level.BUDGET)
    def test_metrics_can_be_switched_off(self, context: CaseContext) -> None:
        """With metrics off nothing is counted but faults."""
        sut, keys = context.stored(4, options=StorageOptions(metrics=False))
        sut.expect(keys)
        sut.exists(keys)
        sut.get(context.keys(2))
        _check_silence(sut)
        driver: Any = innermost(sut.storage)
        if has_steps(driver):
            faults = sut.storage.fault_count()
            # On the instance; of a driver that reads from memory, too.
            driver.read_objects = _fails
            driver.read_objects_cached = _fails
            sut.get(keys)
            told = sut.call("get_stats", sut.storage.get_stats).faults
            check(
                told > faults,
                "OB-2",
                f"with metrics off, get_stats() tells {told} faults after {faults} and one more",
            )
            _check_silence(sut)


def _check(sut: StorageUnderTest, pool: str = PoolName.KV, **wanted: int) -> None:
    stats = sut.stats(pool)
    for name, count in wanted.items():
        check(
            getattr(stats, name) == count,
            "OB-1",
            f"{name} of pool {str(pool)!r} is {getattr(stats, name)}, must be {count}",
        )


def _check_silence(sut: StorageUnderTest) -> None:
    counted_pools = sut.call("get_stats", sut.storage.get_stats).pools
    for pool, stats in counted_pools.items():
        check(
            stats == PoolStats(),
            "OB-2",
            f"metrics are off, and get_stats() counts for pool {pool!r}: {stats!r:.300}",
        )


def _fails(*_: object) -> list[list[bool]]:
    raise OSError("the suite lets this read fail")
