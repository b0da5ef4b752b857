"""Stores of limited capacity: eviction and its order, what does not fit, room that is used again.

No read is of a page that has taken another's place.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.fixtures.small_store import (
    BATCH,
    PAGE_BYTES,
    SHAPES,
    capacity_of,
    fill_store,
    open_capped,
    open_small_store,
    readable,
)
from hicache_conformance.harness.concurrency import eventually, together
from hicache_conformance.harness.oracle import drawn
from hicache_conformance.harness.pools import GuardedPool, short
from hicache_conformance.harness.storage_under_test import PageGroup, StorageUnderTest, check_each
from hicache_conformance.harness.store_files import disk_usage
from hicache_conformance.history.events import Call
from hicache_conformance.model.case import Inconclusive, check, covers
from hicache_conformance.model.rules import Level
from hicache_conformance.processes.worker import KillSchedule, WorkerProcess
from hicache_storage.spec import HiCacheStorageExtraInfo, PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.fixtures.context import CaseContext


SETTLE_SECONDS: Final = 2.0
"""How long an eviction that goes on in the background may take to show in the counters."""
CHAIN: Final = 8
MIX: Final[Mapping[Call, int]] = {Call.SET: 3, Call.GET: 3, Call.EXISTS: 1}


class EvictionCases:
    """EV-1 to EV-4, in one process."""

    @covers("EV-1", "OB-1", levels=Level.FAULTS, needs=["evicts"])
    def test_capacity_is_kept(self, context: CaseContext) -> None:
        """What can be read, and what lies on the disk, however much is written."""
        pages = 40
        config = context.capped(capacity_of(pages))
        sut, stored, occupied = open_capped(context, config), list[str](), 0
        for _ in range(context.profile.store_fills):
            stored += fill_store(
                context, sut, pages * 3 // 2, batch=context.random.choice((1, BATCH, 2 * BATCH))
            )
            there = readable(sut, stored, rule="EV-1")
            _within(there.count(True), pages, 2 * BATCH)
            check(
                any(there),
                "EV-1",
                f"of {len(there)} pages, written into a store of {pages}, none is left: it "
                f"evicts everything",
            )
            taken = disk_usage(config, context.tmp)
            # What a store takes for itself is there after the first turn; from then on it does not
            # grow.
            occupied = occupied or taken
            check(
                taken <= max(occupied, capacity_of(pages)) + 2 * BATCH * PAGE_BYTES,
                "EV-1",
                f"{taken} bytes lie on the disk after more writing, and {occupied} before; "
                f"{_limit(pages)}",
            )
        _check_counted(sut, stored)

    @covers("EV-1", levels=Level.FAULTS, needs=["evicts", "sharing>=process"])
    def test_several_writers_keep_the_capacity(self, context: CaseContext) -> None:
        """Storages that write at the same time exceed the capacity by a batch each at most."""
        pages, config, identity = 40, context.capped(capacity_of(40)), context.identity()
        writers = [open_capped(context, config, identity) for _ in range(3)]
        batches = [[context.keys(BATCH, "other") for _ in range(pages // BATCH)] for _ in writers]

        def write(sut: StorageUnderTest, mine: list[list[str]]) -> None:
            for keys in mine:
                sut.set(keys)

        # At the same time: each writer finds room for its own batch, so that a driver which checks
        # before it writes, and not after, exceeds the capacity by all of them.
        together("EV-1", [partial(write, *pair) for pair in zip(writers, batches, strict=True)])
        there = readable(
            writers[0], [key for mine in batches for keys in mine for key in keys], rule="EV-1"
        )
        _within(there.count(True), pages, BATCH * len(writers))

    @covers("EV-1", levels=Level.FAULTS, needs=["evicts", "sharing>=process"])
    def test_models_with_similar_names(self, context: CaseContext) -> None:
        """Room is made for a model, while there are older pages of an unlike one."""
        pages, config, base = 48, context.capped(capacity_of(48)), context.identity(model="b")
        # The oldest: a right driver that evicts other models' pages at all begins with these.
        unlike = open_capped(context, config, context.identity(model="quite/another"))
        old = context.keys(BATCH)
        unlike.store(old)
        alike = {
            name: open_capped(context, config, context.identity(model=name, salt=base.salt))
            for name in ("a_b", "b_a", "a-b", "a/b", "bb", "B")
        }
        young = {name: context.keys(BATCH) for name in alike}
        for name, sut in alike.items():
            sut.store(young[name])
        fill_store(context, open_capped(context, config, base), 2 * pages)
        spared = all(readable(unlike, old, rule="EV-1"))
        for name, sut in alike.items():
            gone = (
                f"of model {name!r} is gone, because model 'b' made room, while older pages of model "
                f"'quite/another' are all there: it was taken for a page of 'b' by its name"
            )
            left = readable(sut, young[name], rule="EV-1")
            check_each(young[name], left if spared else young[name], "EV-1", gone)

    @covers("EV-2", "GET-1", levels=Level.FAULTS, needs=["evicts"])
    def test_pages_pushed_out_between_lookup_and_read(self, context: CaseContext) -> None:
        """Pages that others push out between a lookup and a read."""
        config, identity = context.capped(capacity_of(24)), context.identity()
        reader = open_capped(context, config, identity)
        writer = open_capped(context, config, identity) if context.shares else reader
        # The storage that is asked writes every other chain itself, since a driver may answer from
        # what it remembers of its own sets.
        for turn in range(8 * context.profile.store_fills):
            chain = context.keys(BATCH)
            (writer if turn % 2 else reader).set(chain)
            told = chain[: reader.exists(chain).kv_hit_pages]
            fill_store(
                context,
                writer,
                context.random.randint(1, 40),
                batch=context.random.choice((1, BATCH, 2 * BATCH)),
            )
            readable(reader, told, rule="EV-2")

    @covers("EV-2", levels=Level.FAULTS, needs=["evicts"])
    def test_reads_while_others_push_pages_out(self, context: CaseContext) -> None:
        """Four threads look up, read and write in a store that is always full."""
        group, config = ProcessGroup(context, SHAPES), context.capped(capacity_of(16))
        keys, sut = group.new_keys(48), open_capped(context, config, group.identity)
        suts = (
            [sut, *(open_capped(context, config, group.identity) for _ in range(3))]
            if context.shares
            else context.clients(sut, 4)
        )
        calls = context.profile.thread_calls
        work = group.work(keys, MIX, calls=calls, clients=len(suts), max_keys=BATCH)
        clients = [group.client(str(number), sut) for number, sut in enumerate(suts)]
        together("EV-2", [partial(one.run, work, number) for number, one in enumerate(clients)])
        group.judge("EV-2", keeps=False)

    @covers("EV-3", levels=Level.FAULTS, needs=["evicts"])
    @pytest.mark.parametrize("manner", ["one-call", "several-calls", "looked-up", "read"])
    def test_tails_go_before_heads(self, context: CaseContext, manner: str) -> None:
        """Of a chain that is partly pushed out, what is left is its beginning."""
        pages = 16
        # From "all of the chain fits" to "none of it does": one of these is in between, whatever a
        # page takes.
        for pressure in range(2 + context.random.randrange(3), pages + CHAIN // 2, 2):
            sut, chain = open_small_store(context, pages), context.keys(CHAIN)
            _write_chain(context, sut, chain, manner)
            fill_store(context, sut, pressure, batch=1)
            left = readable(sut, chain, rule="EV-3")
            usable = left.index(False) if False in left else CHAIN
            check(
                not any(left[usable:]),
                "EV-3",
                f"a chain of {CHAIN} pages, written in {manner}, and {pressure} others after it, in "
                f"a store of {pages}: a page of the chain was evicted before the pages behind it; "
                f"left is {drawn(left)}, head first: {usable} of {sum(left)} pages can be used",
            )
            # Closed here, because the case opens a store for each pressure, and each would keep its
            # threads and files until the end.
            sut.call("close", sut.storage.close)

    @covers("EV-4", levels=Level.FAULTS, needs=["evicts"])
    @pytest.mark.parametrize("use", ["get", "exists"])
    def test_what_is_used_stays(self, context: CaseContext, use: str) -> None:
        """Pages that are read or found again and again stay, while newer unused ones go."""
        pages = 24
        sut, warm = open_small_store(context, pages), context.keys(context.random.randint(2, BATCH))
        sut.store(warm)
        others = list[str]()
        for _ in range(2 * pages // BATCH):
            others += fill_store(context, sut, BATCH)
            if use == "get":
                there = readable(sut, warm, rule="EV-4")
            else:
                hit = sut.exists(warm).kv_hit_pages
                there = [page < hit for page in range(len(warm))]
            gone = (
                f"was used after every batch ({use}), and is evicted after {len(others)} newer "
                f"pages that nobody used"
            )
            check_each(warm, there, "EV-4", gone)


def _write_chain(
    context: CaseContext, sut: StorageUnderTest, chain: list[str], manner: str
) -> None:
    if manner == "several-calls":
        for start in range(0, CHAIN, 2):
            # As the pages that follow the beginning of a chain.
            sut.info = HiCacheStorageExtraInfo(prefix_keys=chain[:start])
            sut.set(chain[start : start + 2])
            sut.info = None
            if start == CHAIN // 2:
                fill_store(context, sut, 1)
        return
    sut.store(chain)
    if manner == "looked-up":
        sut.exists(chain)
    elif manner == "read":
        sut.expect(chain)


def _limit(pages: int) -> str:
    return f"the capacity is {capacity_of(pages)}"


def _within(there: int, pages: int, batch: int) -> None:
    check(
        there * PAGE_BYTES <= capacity_of(pages) + batch * PAGE_BYTES,
        "EV-1",
        f"{there} pages of {PAGE_BYTES} bytes can be read; {_limit(pages)}, and a batch is "
        f"{batch} pages",
    )


def _check_counted(sut: StorageUnderTest, stored: Sequence[str]) -> None:
    """The pages that are gone are those that were counted as evicted."""

    def gone() -> int:
        return readable(sut, stored, rule="EV-1").count(False)

    check(
        eventually(lambda: gone() == sut.stats().pages_evicted, SETTLE_SECONDS, 0.05),
        "OB-1",
        f"{gone()} of {len(stored)} stored pages were evicted, and pages_evicted is "
        f"{sut.stats().pages_evicted}",
    )


KILLS: Final = 8
"""Writers that are killed in a call; between calls nothing is left that a driver could forget."""
MAX_WRITERS: Final = 3 * KILLS
"""Writers that are tried for it: where calls are over at once, most kills fall between them."""
YEAR_SECONDS: Final = 365 * 86_400.0


class EvictionProcessCases:
    """EV-1, EV-2 and EV-4, between processes."""

    @covers("EV-1", levels=Level.FAULTS, needs=["evicts", "sharing>=processes"])
    def test_leftovers_of_killed_writers(self, context: CaseContext) -> None:
        """A store that is full before and after writers were killed holds as much."""
        pages, random = 24, context.chance("strikes")
        config = context.capped(capacity_of(pages))
        group = ProcessGroup(context, SHAPES, config=config)
        survivor = group.worker("survivor")
        held_before = _refill(group, survivor, pages)
        taken_before = disk_usage(config, context.tmp)
        kills = writers = 0
        while kills < KILLS and writers < MAX_WRITERS:
            writer = group.worker(f"writer{writers}")
            work = group.work(group.new_keys(3 * pages), {Call.SET: 1}, calls=8, max_keys=2 * BATCH)
            # Not in the second call: one call tells nothing yet of how long they take, and the kill
            # would fall at its very beginning, where nothing is written.
            group.run({writer: work}, {writer: KillSchedule(random.randint(3, 4), random.random())})
            kills += writer.recorder.running() is not None
            writers += 1
        if not kills:
            raise Inconclusive(
                f"none of {writers} writers was killed in a call: all their calls were over before"
            )
        held_after = _refill(group, survivor, pages)
        # What a killed writer had reserved is free when its lease has ended, not at once.
        deadline = time.monotonic() + context.profile.recovery_seconds
        while held_after < held_before - BATCH and time.monotonic() < deadline:
            held_after = _refill(group, survivor, pages)
        taken_after = disk_usage(config, context.tmp)
        scenario = (
            f"{kills} writers were killed in the middle of writing to a full store of {pages} "
            "pages; then it was filled again"
        )
        check(
            held_after >= held_before - BATCH,
            "EV-1",
            f"{scenario}: it held {held_before} pages before, and holds {held_after} now",
        )
        # Each writer may keep something of its own, such as a log of its changes.
        allowed = (BATCH + writers / 2) * PAGE_BYTES
        check(
            taken_after <= taken_before + allowed,
            "EV-1",
            f"{scenario}: it took {taken_before} bytes before, and takes {taken_after} now; the "
            f"capacity is {capacity_of(pages)}",
        )
        group.judge("EV-2", keeps=False)

    @covers("EV-2", "CC-2", levels=Level.FAULTS, needs=["evicts", "sharing>=processes"])
    def test_processes_push_each_other_s_pages_out(self, context: CaseContext) -> None:
        """Several processes look up, read and write in a store that is always full."""
        group = ProcessGroup(context, SHAPES, config=context.capped(capacity_of(16)))
        keys = group.new_keys(48)
        workers = [group.worker(name) for name in ("one", "two", "three")]
        calls = context.profile.process_calls // 2
        group.run_together(workers, keys, MIX, calls=calls, clients=2, max_keys=BATCH)
        group.judge("EV-2", keeps=False)

    @covers("EV-4", levels=Level.FAULTS, needs=["evicts", "sharing>=processes"])
    @pytest.mark.parametrize("clock", [YEAR_SECONDS, -YEAR_SECONDS], ids=["ahead", "behind"])
    def test_clocks_a_year_apart(self, context: CaseContext, clock: float) -> None:
        """Two processes whose clocks are a year apart fill a store in turn."""
        pages = 24
        group = ProcessGroup(context, SHAPES, config=context.capped(capacity_of(pages)))
        here, there = group.worker("here"), group.worker("there", clock=clock)
        # The process with the later clock writes first: by wall-clock time its pages are the newer
        # ones, and a driver that trusts it evicts the other's.
        first, second = (there, here) if clock > 0 else (here, there)
        old, new = group.new_keys(pages // 2), group.new_keys(pages)
        _fill(group, first, old)
        _fill(group, second, new)
        left = sum(found is not None for found in here.get(old))
        gone = sum(found is None for found in here.get(new))
        # What one call has written may go together.
        check(
            left <= BATCH or gone <= BATCH,
            "EV-4",
            f"in a store of {pages} pages, process {first.name} set {len(old)} pages and then process "
            f"{second.name} {len(new)}; the clock of one is a year "
            f"{'ahead' if clock > 0 else 'behind'}: {gone} of the newer pages are gone, while {left} "
            f"of the older ones are there, which nobody has used since",
        )


def _fill(group: ProcessGroup, worker: WorkerProcess, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), BATCH):
        worker.set(keys[start : start + BATCH], group.value())


def _refill(group: ProcessGroup, worker: WorkerProcess, pages: int) -> int:
    """Write twice as many pages as fit; how many of them are there then."""
    keys = group.new_keys(2 * pages)
    _fill(group, worker, keys)
    return sum(found is not None for found in worker.get(keys))


PAGES: Final = 12
MAX_BYTES: Final = 256 << 20


class SpaceCases:
    """SET-5."""

    @covers("SET-5", "GET-1", levels=Level.FAULTS, needs=["capacity_option"])
    def test_batches_larger_than_the_store(self, context: CaseContext) -> None:
        """Batches of three times the capacity, and smaller ones after them."""
        sut = open_small_store(context, PAGES)
        for turn in range(5 * context.profile.store_fills):
            keys = context.keys(3 * PAGES)
            answered = _set_counted(sut, keys)
            there = readable(sut, keys, rule="GET-1")
            _check_refused(keys, answered, there, lasting=not sut.storage.capabilities.evicts)
            check(
                turn or any(there),
                "SET-5",
                f"{len(keys)} pages were set in an empty store of {PAGES}, and none was stored",
            )
            if _free(sut, keys):
                batches = f"{turn + 1} batches of {len(keys)} pages"
                _check_usable(context, sut, f"after {batches}, more than it holds")

    @covers("SET-5", levels=Level.FAULTS, needs=["capacity_option"])
    def test_pages_longer_than_the_store(self, context: CaseContext) -> None:
        """Pages longer than the whole capacity, and others after them."""
        sut = open_small_store(context, PAGES)
        length = 2 * capacity_of(PAGES)
        small = list[str]()
        wide = context.with_pool(sut, "draft", GuardedPool(pages=2, components=(length,)))
        for turn in range(2 * context.profile.store_fills):
            keys = context.keys(2, "long")
            answered = _set_counted(wide, keys, "draft")
            check(
                sut.storage.capabilities.evicts or not any(answered),
                "SET-5",
                f"a page of {length} bytes was accepted; the capacity is {capacity_of(PAGES)}",
            )
            longer = ", longer than the store,"
            wide.check_right(keys, wide.get(keys, "draft"), "draft", when=longer)
            if _free(sut, small):
                calls = f"{turn + 1} calls with pages of {length} bytes"
                small = _check_usable(context, sut, f"after {calls}, more than it holds")

    @covers("SET-5", levels=Level.FAULTS, needs=["capacity_option"])
    def test_nothing_leaks_while_the_store_is_full(self, context: CaseContext) -> None:
        """After much writing into a full store it holds as many pages as at first."""
        sut = open_small_store(context, PAGES)
        evicts = sut.storage.capabilities.evicts
        stored = fill_store(context, sut, 3 * PAGES, batch=1)
        first = readable(sut, stored, rule="GET-1").count(True)
        for turn in range(3 * context.profile.store_fills):
            # Batches that do not fit at once, and the same keys twice, are where places get lost.
            keys = context.keys(PAGES - 2)
            sut.set_many([PageGroup(keys), PageGroup(keys[: PAGES // 2])])
            stored += fill_store(context, sut, PAGES, batch=BATCH)
            there = readable(sut, stored[-3 * PAGES :] if evicts else stored, rule="GET-1")
            later = there.count(True)
            check(
                later >= first - (BATCH if evicts else 0),
                "SET-5",
                f"a full store held {first} pages at first, and {later} after {turn + 1} "
                f"rounds of writing",
            )

    @covers("SET-5", levels=Level.FAULTS, needs=["capacity_option", "deletes"])
    def test_deleted_room_is_used_again(self, context: CaseContext) -> None:
        """Deleted pages make room for as many."""
        _check_reuse(context, lambda sut, keys: sut.delete(keys), "deleted")

    @covers("SET-5", levels=Level.FAULTS, needs=["capacity_option", "clears"])
    def test_cleared_room_is_used_again(self, context: CaseContext) -> None:
        """Cleared pages make room for as many."""
        _check_reuse(context, lambda sut, _: sut.call("clear", sut.storage.clear), "cleared")

    @covers("SET-5", levels=Level.FAULTS, needs=["max_page_bytes"])
    def test_pages_longer_than_the_driver_takes(self, context: CaseContext) -> None:
        """A page above max_page_bytes is refused, and one of just that length is stored."""
        limit = context.capabilities.max_page_bytes
        assert limit is not None
        if limit > MAX_BYTES:
            raise Inconclusive(f"max_page_bytes is {limit}, more than this suite has memory for")
        pools = {
            PoolName.KV: GuardedPool(pages=2, components=(limit,), exact=True),
            "draft": GuardedPool(pages=2, components=(limit + 1,), exact=True),
        }
        sut, max_keys, keys = context.storage(pools=pools), context.keys(1), context.keys(2)
        sut.store(max_keys)
        check(
            not any(_set_counted(sut, keys, "draft")),
            "SET-5",
            f"a page of {limit + 1} bytes was accepted, and max_page_bytes is {limit}",
        )
        sut.expect_missing(keys, "draft", rule="SET-5", why="was refused because it is too long")
        sut.expect(max_keys)


def _set_counted(sut: StorageUnderTest, keys: Sequence[str], pool: str = PoolName.KV) -> list[bool]:
    """Set pages, and check that the refused ones are counted."""
    before = sut.stats(pool).pages_refused
    answered = sut.set(keys, pool)
    counted = sut.stats(pool).pages_refused - before
    check(
        counted == answered.count(False),
        "OB-1",
        f"{answered.count(False)} of {len(keys)} pages were refused, and pages_refused grew by "
        f"{counted}",
    )
    return answered


def _check_refused(
    keys: Sequence[str], answered: Sequence[bool], there: Sequence[bool], *, lasting: bool
) -> None:
    """Check that acknowledged pages are there, unless evicted, and refused ones are not."""
    for index, (key, said, found) in enumerate(zip(keys, answered, there, strict=True)):
        page = (
            f"page {index} key {short(key)} of a batch that does not fit was answered with {said}"
        )
        check(not found or said, "SET-5", f"{page}, and a get delivers it")
        check(not lasting or not said or found, "SET-5", f"{page}, and a get misses it")


def _free(sut: StorageUnderTest, stored: Sequence[str]) -> bool:
    """Make room where the driver does not do that by itself.

    Whether it does, or could be made to.
    """
    declared = sut.storage.capabilities
    if not declared.evicts and declared.clears:
        sut.call("clear", sut.storage.clear)
    elif not declared.evicts and declared.deletes:
        sut.delete(stored)
    return declared.evicts or declared.clears or declared.deletes


def _check_usable(context: CaseContext, sut: StorageUnderTest, when: str) -> list[str]:
    """Store a small batch; its keys."""
    keys = context.keys(BATCH)
    check(
        any(sut.set(keys)),
        "SET-5",
        f"{when}, the store takes no page of a batch of {len(keys)} any more",
    )
    check(
        any(readable(sut, keys, rule="GET-1")),
        "SET-5",
        f"{when}, a batch of {len(keys)} pages was answered with True, and none of it is there",
    )
    return keys


def _check_reuse(
    context: CaseContext, free: Callable[[StorageUnderTest, list[str]], object], what: str
) -> None:
    """Fill a store, free all of it, and fill half of it again, many times over."""
    sut = open_small_store(context, PAGES)
    stored = fill_store(context, sut, 2 * PAGES)
    for turn in range(3 * context.profile.store_fills):
        free(sut, stored)
        half = context.keys(PAGES // 2)
        refused = sut.set(half).count(False)
        missing = readable(sut, half, rule="GET-1").count(False)
        check(
            not refused and not missing,
            "SET-5",
            f"everything was {what} in a store of {PAGES} pages, for time {turn + 1}; "
            f"of {len(half)} pages set then {refused} were refused and {missing} cannot be read",
        )
        stored = half + fill_store(context, sut, PAGES)
