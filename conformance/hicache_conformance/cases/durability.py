"""Crash durability: SIGKILL at random instants.

Acknowledged pages are there afterwards, and the store works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.context import NO_LAYERS, CaseContext
from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.fixtures.small_store import BATCH, COMPONENTS, capacity_of, pool
from hicache_conformance.fixtures.target import CAPACITY
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import PoolShape
from hicache_conformance.harness.store_files import disk_usage
from hicache_conformance.history.checker import AnomalyKind
from hicache_conformance.history.events import Call
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level, declares
from hicache_conformance.model.violation import Inconclusive, Violation, check, checked
from hicache_conformance.processes.worker import KillSchedule
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping


SURVIVING: Final = ("durability>=process",)
WITNESSED: Final = (*SURVIVING, "sharing>=processes")
FT_5: Final[Mapping[AnomalyKind, str]] = {
    AnomalyKind.REWRITTEN: "SET-3",
    AnomalyKind.LOST: "FT-5",
    AnomalyKind.DENIED: "FT-5",
}
PAGES: Final[Mapping[str, PoolShape]] = {PoolName.KV: PoolShape(pages=48, components=COMPONENTS)}
REMOVED_PAGES: Final = 24
PAGE_BYTES: Final = 64_000
LITTER_KEYS: Final = 48
LONG: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=LITTER_KEYS, components=(PAGE_BYTES - 16_000, 16_000))
}
LITTER_KILLS: Final = 8
CAPACITY_BYTES: Final = 2 << 20


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
        group = ProcessGroup(context, PAGES, config=context.capped(CAPACITY_BYTES))
        random = context.chance("strikes")
        engine = group.worker("engine0")
        for kill in range(context.profile.kills):
            # Fresh keys after every kill: the store of 2 MiB fills up over them, and from then on
            # sets have to evict.
            keys = group.new_keys(200)
            mix = {Call.SET: 6, Call.GET: 3, Call.EXISTS: 1}
            work = group.work(keys, mix, calls=60, clients=2, max_keys=16)
            # Killed after a drawn number of events and a drawn part of the next one: over several
            # kills every step of a write is hit.
            schedule = KillSchedule(random.randint(20, 60), random.random())
            group.run({engine: work}, {engine: schedule})
            engine = group.worker(f"engine{kill + 1}")
            engine.get(keys[:48])
            # New pages find room only if what the killed process had reserved or half written is
            # not counted for ever.
            fresh = group.new_keys(4)
            group.expect(engine, fresh, group.store(engine, fresh, "FT-5"), "FT-5")
        # Misses are legal in a full store; wrong bytes are not.
        group.judge("FT-5", keeps=False, rules=FT_5)

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
        group, random = ProcessGroup(context, LONG), context.chance("strikes")
        engine, sizes, payload = group.worker("engine0"), list[int](), 0
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
            sizes.append(disk_usage(context.config, context.tmp))
        group.judge("FT-5", rules=FT_5)
        grown = sizes[-1] - sizes[0]
        # Three pages of slack, because the store's own files grow too. A call writes two pages at
        # most, so that eight kills leave up to sixteen in a store that collects none.
        check(
            grown <= payload + 3 * PAGE_BYTES,
            "FT-5",
            f"{LITTER_KILLS} killed writers made the store grow by {grown} bytes; its pages "
            f"take {payload}",
        )


def _kill_and_restart(context: CaseContext, mix: Mapping[Call, int]) -> None:
    group, random = ProcessGroup(context, PAGES), context.chance("strikes")
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
            reader.expect_delivered(keys, "FT-5", "after a restart")
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
    group.judge("FT-5", rules=FT_5)


def _kill_removers(
    context: CaseContext, call: Call, config: Mapping[str, object] | None = None
) -> None:
    """Kill processes that remove the oldest pages, at steps from the first to the last."""
    group, random, steps = ProcessGroup(context, PAGES, config), context.chance("steps"), 0
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
            reader = context.storage(group.identity, pools=pool(), config=config)
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
