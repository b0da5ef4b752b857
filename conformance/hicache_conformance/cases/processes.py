"""Several processes on one store: visibility of pages, races, kills, restarts and histories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.context import NO_LAYERS, CaseContext
from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.fixtures.small_store import BATCH, capacity_of
from hicache_conformance.fixtures.small_store import SHAPES as LONG_PAGES
from hicache_conformance.fixtures.target import CAPACITY
from hicache_conformance.harness.pools import PoolShape, make_pools, short
from hicache_conformance.harness.storage_under_test import check_each
from hicache_conformance.harness.store_files import disk_usage, store_files
from hicache_conformance.history.checker import AnomalyKind
from hicache_conformance.history.events import Call, Event
from hicache_conformance.model.case import Inconclusive, Violation, check, checked, covers
from hicache_conformance.model.rules import Level, declares
from hicache_conformance.processes.worker import KillSchedule, WorkerProcess
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


ALSO_SHARED: Final = [Level.CORE, Level.SHARED]
BETWEEN_PROCESSES: Final = ("sharing>=processes",)
SHAPES: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=32),
    PoolName.MAMBA: PoolShape(pages=32, page_size=1, components=(80, 24)),
}


class SharingCases:
    """ID-2 between processes; SET-1, SET-3, LC-4, GET-7 and EX-9 as a second process sees them."""

    @covers("ID-2", levels=Level.SHARED, needs=BETWEEN_PROCESSES)
    def test_processes_share_pages(self, context: CaseContext) -> None:
        """Pages of one process in others, opened before and after, asked before or not."""
        group = ProcessGroup(context, SHAPES)
        # Interpreters of their own: what differs between two of them must not be part of a name.
        writer, early = group.worker("writer", fresh=True), group.worker("early")
        keys, later = group.new_keys(8), group.new_keys(8)
        for pool in SHAPES:
            early.get(keys, pool)
        early.exists(keys)
        values = {pool: group.store(writer, keys, "SET-1", pool) for pool in SHAPES}
        late = group.worker("late")
        for reader in (writer, early, late):
            for pool, value in values.items():
                group.expect(reader, keys, value, "ID-2", pool)
            group.expect_existing(reader, keys, "ID-2")
        value = group.store(early, later, "SET-1")
        for reader in (early, writer, late):
            group.expect(reader, later, value, "ID-2")
        own = context.storage(group.identity, pools=make_pools(SHAPES))
        for pool, value in values.items():
            own.expect(keys, pool, generation=value, rule="ID-2")

    @covers("SET-1", levels=ALSO_SHARED, needs=(*BETWEEN_PROCESSES, "deletes"))
    def test_what_another_process_deleted(self, context: CaseContext) -> None:
        """Pages that another process deletes, and that are set anew."""
        _remove_and_set_anew(context, lambda worker, keys: worker.delete(keys), "SET-1")

    @covers(
        "LC-4",
        "SET-1",
        levels=[Level.CORE, Level.IDENTITY, Level.SHARED],
        needs=(*BETWEEN_PROCESSES, "clears"),
    )
    def test_what_another_process_cleared(self, context: CaseContext) -> None:
        """Pages that another process clears, and that are set anew."""
        _remove_and_set_anew(context, lambda worker, keys: worker.clear(), "LC-4")

    @covers("GET-7", "EX-9", "SET-3", levels=ALSO_SHARED, needs=BETWEEN_PROCESSES, corrupts=True)
    def test_damage_found_by_one_and_repaired_by_another(self, context: CaseContext) -> None:
        """One process finds a page damaged, one sets it anew: both read it then."""
        group = ProcessGroup(context)
        one, two, own = group.worker("one"), group.worker("two"), context.storage(group.identity)
        context.require_checksums(own)
        for finders, mender in (((one,), one), ((one,), two), ((one, two), two)):
            keys = group.new_keys(3)
            for key in keys:
                context.corrupt_page(own, key)
            for finder in finders:
                _expect_missing(group, finder, keys)
            value = group.store(mender, keys, "SET-3")
            for reader in (mender, one, two):
                group.expect(reader, keys, value, "SET-3")
                group.expect_existing(reader, keys, "EX-9")


def _remove_and_set_anew(
    context: CaseContext, remove: Callable[[WorkerProcess, list[str]], object], rule: str
) -> None:
    group = ProcessGroup(context)
    one, two, keys = group.worker("one"), group.worker("two"), group.new_keys(6)
    # Both have set, read and looked for the pages, so that whatever can be remembered of them is.
    for worker in (one, two):
        group.store(worker, keys, "SET-1")
        worker.get(keys)
        worker.exists(keys)
    remove(one, keys)
    for worker in (two, one):
        worker.exists(keys)
        worker.get(keys)
    # What was delivered until now is judged first: a page that is still there is not set anew.
    group.judge(rule)
    value = group.store(two, keys[:3], "SET-1")
    others = group.store(one, keys[3:], "SET-1")
    for worker in (one, two):
        group.expect(worker, keys[:3], value, "SET-1")
        group.expect(worker, keys[3:], others, "SET-1")
    group.judge(rule)


def _expect_missing(group: ProcessGroup, worker: WorkerProcess, keys: list[str]) -> None:
    missed = [found is None for found in worker.get(keys)]
    check_each(keys, missed, "GET-5", f"is damaged, and is delivered to process {worker.name}")
    check(
        not worker.exists(keys),
        "EX-9",
        f"process {worker.name} has found {len(keys)} pages damaged, and says that they exist",
    )


LONG: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=24, components=(10_000, 14_000))
}
"""Long enough for a page to be seen half written."""
SMALL: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=32, components=(300, 500)),
    PoolName.MAMBA: PoolShape(pages=32, page_size=1, components=(200, 100)),
}
PROCESSES: Final = 3
RACED_BYTES: Final = 4 * 8_000
"""Of the pages of a race."""
RACES: Final = 12
MAX_RACES: Final = 48
RACED_PAGES: Final = 32
"""Pages that all writers set at the same moment, until which races go on. On a busy machine writers
miss each other in most races, and such a race shows nothing."""
ACT_CALLS: Final = 20
"""Calls of each thread until all go on to fresh keys; a page soon exists, and then nothing happens
to it any more."""


class ProcessCases:
    """SET-2, SET-4 and CC-2."""

    @covers("SET-2", levels=Level.SHARED, needs=BETWEEN_PROCESSES)
    def test_writers_are_killed(self, context: CaseContext) -> None:
        """Writers are killed under readers, again and again; others set the pages anew."""
        group, random = ProcessGroup(context, LONG), context.chance("strikes")
        readers = [group.worker(f"reader{number}") for number in range(2)]
        for kill in range(context.profile.kills):
            writer, keys = group.worker(f"writer{kill}"), group.new_keys(24)
            works = {
                reader: group.work(keys, {Call.GET: 3, Call.EXISTS: 1}, calls=30, max_keys=4)
                for reader in readers
            }
            works[writer] = group.work(keys, {Call.SET: 1}, calls=24, max_keys=4)
            # Among the first calls, most of whose pages are new: a writer leaves those alone that
            # are there. Not in the very first one, at the beginning of which nothing is written.
            group.run(works, {writer: KillSchedule(random.randint(3, 5), random.random())})
            for reader in readers:
                group.expect_agreement(reader, keys, "SET-2")
            group.store(readers[kill % 2], keys, "SET-2")
            for reader in readers:
                reader.get(keys)
        # Nobody removes pages here: one that was lost was spoilt by a writer that was killed or
        # came second.
        group.judge("SET-2", rules={AnomalyKind.REWRITTEN: "SET-3"})
        group.expect_sound("SET-2")

    @covers("SET-4", levels=Level.SHARED, needs=BETWEEN_PROCESSES)
    def test_writers_race(self, context: CaseContext) -> None:
        """Three processes set the same new keys at the same time, each its own bytes."""
        group = ProcessGroup(context, {PoolName.KV: PoolShape(pages=24, components=(3_000, 5_000))})
        workers = [group.worker(f"writer{number}") for number in range(PROCESSES)]
        raced, sizes, payload, empties = 0, list[int](), 0, context.capabilities.clears
        for race in range(MAX_RACES):
            if race >= RACES and raced >= RACED_PAGES:
                break
            keys = group.new_keys(4) if race == 0 or not empties else group.keys
            mix = {Call.SET: 2, Call.GET: 1}
            at = group.run_together(workers, keys, mix, calls=6, max_keys=4)
            for worker in workers:
                group.expect_agreement(worker, keys, "SET-4")
            tried = {key for event in group.sets(since=at) for key in event.keys}
            workers[0].get(sorted(tried))
            raced += _raced(group.sets(since=at), keys)
            if empties:
                workers[0].clear()
            else:
                payload += RACED_BYTES
            sizes.append(disk_usage(context.config, context.tmp))
        # A page that was lost where writers met was lost by their meeting.
        group.judge("SET-4", rules={AnomalyKind.REWRITTEN: "SET-3"})
        group.expect_sound("SET-4")
        grown = sizes[-1] - sizes[0]
        check(
            grown <= 2 * payload + PROCESSES * RACED_BYTES,
            "SET-4",
            f"{len(sizes)} races of {PROCESSES} writers for the same pages made the store grow by "
            f"{grown} bytes; its pages take {payload}",
        )

    @covers("CC-2", levels=Level.SHARED, needs=BETWEEN_PROCESSES)
    def test_histories_of_processes(self, context: CaseContext) -> None:
        """Three processes of three threads set, read and look up the same keys of two pools."""
        _run_steps(context, {Call.SET: 3, Call.GET: 4, Call.EXISTS: 2})

    @covers("CC-2", levels=Level.SHARED, needs=(*BETWEEN_PROCESSES, "deletes"))
    def test_histories_with_deletes(self, context: CaseContext) -> None:
        """The same, with deletes."""
        _run_steps(context, {Call.SET: 4, Call.GET: 4, Call.EXISTS: 1, Call.DELETE: 2})

    @covers("CC-2", levels=Level.SHARED, needs=(*BETWEEN_PROCESSES, "clears"))
    def test_histories_with_clears(self, context: CaseContext) -> None:
        """The same, with clears."""
        _run_steps(context, {Call.SET: 9, Call.GET: 9, Call.EXISTS: 2, Call.CLEAR: 1})


def _run_steps(context: CaseContext, mix: Mapping[Call, int]) -> None:
    group = ProcessGroup(context, SMALL)
    workers = [group.worker(f"p{number}") for number in range(PROCESSES)]
    for _ in range(max(1, context.profile.process_calls // ACT_CALLS)):
        keys = group.new_keys(6)
        group.run_together(workers, keys, mix, calls=ACT_CALLS, clients=3, max_keys=4)
    group.judge("CC-2")
    group.expect_sound("CC-2")


def _raced(sets: Sequence[Event], keys: Sequence[str]) -> int:
    """Count the keys that all processes were setting at the same moment."""
    by_key = {key: [event for event in sets if key in event.keys] for key in keys}
    return sum(
        any(
            sum(other.is_running(event.began_at) for other in rivals) == PROCESSES
            for event in rivals
        )
        for rivals in by_key.values()
    )


SURVIVING: Final = ("durability>=process",)
WITNESSED: Final = (*SURVIVING, "sharing>=processes")
FT_5: Final[Mapping[AnomalyKind, str]] = {
    AnomalyKind.REWRITTEN: "SET-3",
    AnomalyKind.LOST: "FT-5",
    AnomalyKind.DENIED: "FT-5",
}
REMOVED_PAGES: Final = 24
PAGE_BYTES: Final = 64_000
LITTER_KEYS: Final = 48
LITTER_POOL: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=LITTER_KEYS, components=(PAGE_BYTES - 16_000, 16_000))
}
LITTER_KILLS: Final = 8
LITTER_NAMES: Final = 5
"""Files that a message names, the largest ones."""
STORE_PAGES: Final = 40
"""Of a store that evicts; all that a restarted process sets fit."""


class DurabilityCases:
    """FT-5."""

    @covers("FT-5", levels=Level.DURABLE, needs=SURVIVING)
    def test_the_engine_is_killed_while_it_sets(self, context: CaseContext) -> None:
        """Each restart sets what is missing, and is killed in turn."""
        _kill_and_restart(context, {Call.SET: 8, Call.GET: 2, Call.EXISTS: 1})

    @covers("FT-5", levels=Level.DURABLE, needs=(*SURVIVING, "deletes"))
    def test_the_engine_is_killed_while_it_deletes(self, context: CaseContext) -> None:
        """The same while pages are set and deleted again."""
        _kill_and_restart(context, {Call.SET: 6, Call.GET: 2, Call.DELETE: 3})

    @covers("FT-5", levels=Level.DURABLE, needs=(*SURVIVING, "clears"))
    def test_the_engine_is_killed_while_it_clears(self, context: CaseContext) -> None:
        """The same while the namespace is cleared again and again."""
        _kill_and_restart(context, {Call.SET: 8, Call.GET: 2, Call.CLEAR: 2})

    @covers("FT-5", levels=Level.DURABLE, needs=(*SURVIVING, "evicts", CAPACITY))
    def test_the_engine_is_killed_while_it_evicts(self, context: CaseContext) -> None:
        """The same in a full store: any page may be gone, none is wrong, new ones find room."""
        config = context.capped(capacity_of(STORE_PAGES))
        _kill_and_restart(context, {Call.SET: 6, Call.GET: 3, Call.EXISTS: 1}, config)

    @covers("FT-5", "SET-1", levels=Level.DURABLE, needs=(*WITNESSED, "evicts", CAPACITY))
    def test_an_evictor_is_killed_at_a_step(self, context: CaseContext) -> None:
        """A page that a killed process may have evicted is set by one that knew it."""
        _kill_removers(context, Call.SET, context.capped(capacity_of(REMOVED_PAGES)))

    @covers("FT-5", "SET-1", levels=Level.DURABLE, needs=(*WITNESSED, "deletes"))
    def test_a_delete_is_killed_at_a_step(self, context: CaseContext) -> None:
        """The same for pages that a killed process was deleting."""
        _kill_removers(context, Call.DELETE)

    @covers("FT-5", "SET-1", levels=Level.DURABLE, needs=(*WITNESSED, "clears"))
    def test_a_clear_is_killed_at_a_step(self, context: CaseContext) -> None:
        """The same for pages that a killed process was clearing."""
        _kill_removers(context, Call.CLEAR)

    @covers("FT-5", levels=Level.DURABLE, needs=SURVIVING)
    def test_killed_writers_leave_no_litter(self, context: CaseContext) -> None:
        """Processes killed in the middle of long writes, one after another."""
        group, random = ProcessGroup(context, LITTER_POOL), context.chance("strikes")
        engine, files, payload = group.worker("engine0"), list[dict[str, int]](), 0
        for kill in range(LITTER_KILLS):
            # Of fresh keys, and more than are set, because a set of pages that exist writes
            # nothing; of several calls, which tell how long one takes.
            keys = group.new_keys(LITTER_KEYS)
            work = group.work(keys, {Call.SET: 1}, calls=12, max_keys=2)
            group.run({engine: work}, {engine: KillSchedule(random.randint(2, 6), random.random())})
            engine = group.worker(f"engine{kill + 1}")
            group.store(engine, keys[:2], "FT-5")
            # Cleared where that is possible, so that what is left on the disk is litter and not
            # pages.
            if context.capabilities.clears:
                engine.clear()
            elif kill:
                payload += PAGE_BYTES * sum(content is not None for content in engine.get(keys))
            files.append(store_files(context.config, context.tmp))
        group.judge("FT-5", rules=FT_5)
        first, last = files[0], files[-1]
        grown = sum(last.values()) - sum(first.values())
        # Three pages of slack, because the store's own files grow too. A call writes two pages at
        # most, so that eight kills leave up to sixteen in a store that collects none.
        allowed = payload + 3 * PAGE_BYTES
        new = sorted(last.keys() - first.keys(), key=lambda name: -last[name])
        check(
            grown <= allowed,
            "FT-5",
            f"{LITTER_KILLS} killed writers made the store grow by {grown} bytes, must be {allowed} "
            f"at most; its pages take {payload}, and {len(new)} files are new, such as "
            f"{', '.join(f'{name} ({last[name]} bytes)' for name in new[:LITTER_NAMES])}",
        )


def _kill_and_restart(
    context: CaseContext, mix: Mapping[Call, int], config: Mapping[str, object] | None = None
) -> None:
    group, random = ProcessGroup(context, LONG_PAGES, config), context.chance("strikes")
    # Stays open over all kills, where two processes may use one store.
    witnesses = (
        [group.worker("witness")] if declares(context.capabilities, "sharing>=processes") else []
    )
    engine, older = group.worker("engine0"), list[str]()
    for kill in range(context.profile.kills):
        keys = group.new_keys(16)
        work = group.work(keys, mix, calls=30, clients=2, max_keys=5)
        # Drawn anew for each restart, so that the kill falls early and late in the workload.
        group.run({engine: work}, {engine: KillSchedule(random.randint(2, 24), random.random())})
        engine = group.worker(f"engine{kill + 1}")
        for reader in (engine, *witnesses):
            reader.get(keys)
            reader.exists(keys)
        group.store(engine, keys, "FT-5")
        for reader in (engine, *witnesses):
            reader.get(keys)
            # Pages of earlier lives too: a restart may repair what it finds by dropping what it
            # does not know.
            reader.get(random.sample(older, min(len(older), 16)))
        older += keys
    for worker in (engine, *witnesses):
        worker.close()
    # Opened when nobody else has the store open, so that it has only what is on the disk.
    last = group.worker("last")
    for start in range(0, len(older), 32):
        last.get(older[start : start + 32])
    # Misses are legal in a full store; wrong bytes are not.
    group.judge("FT-5", keeps=None if config is None else False, rules=FT_5)


def _kill_removers(
    context: CaseContext, call: Call, config: Mapping[str, object] | None = None
) -> None:
    """Kill processes that remove the oldest pages, at steps from the first to the last."""
    group, random, steps = ProcessGroup(context, LONG_PAGES, config), context.chance("steps"), 0
    witness = group.worker("witness")
    kills = context.profile.kills // 2
    for kill in range(kills + 1):
        keys = group.new_keys(REMOVED_PAGES)
        for start in range(0, len(keys), BATCH):
            witness.set(keys[start : start + BATCH], group.value())
        remover = group.worker(f"remover{kill}", options=NO_LAYERS)
        removed = keys if call is not Call.SET else group.new_keys(REMOVED_PAGES // 2)
        # The first one, which lives, tells the number of steps.
        at = kill and 1 + int((kill - 1 + random.random()) / kills * steps)
        steps = remover.call_killed(call, removed, group.value(), at) or steps
        if not steps:
            raise Inconclusive(f"a {call} of this driver calls nothing outside of Python")
        checked("FT-5")
        # A server may carry out a request of the killed process after the witness's first set.
        for _ in range(2 if context.capabilities.networked else 1):
            # A page alone: to store a second one, the first might rightly be evicted.
            group.store(witness, keys[:1], "FT-5")
            reader = context.storage(group.identity, pools=make_pools(LONG_PAGES), config=config)
            found = reader.get(keys[:1])
            reader.storage.close()
            if found != [None]:
                break
        else:
            raise Violation(
                "FT-5",
                f"process {remover.name} was killed after step {at} of {steps} of a {call} that "
                f"removes page key {short(keys[0])}; a set of it by another process after that "
                f"answered True, and a storage that was opened later does not find it",
            )
    group.judge("FT-5", keeps=False, rules=FT_5)
