"""A process is killed at a random instant: what it had acknowledged is there, whole, and the store goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.open_context import CAPACITY
from hicache_conformance.fixtures.process_group import Stage
from hicache_conformance.harness.disk_usage import Footprint
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.history.events import Call
from hicache_conformance.history.findings import Kind
from hicache_conformance.model.case import covers
from hicache_conformance.model.requirements import declares
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_conformance.processes.messages import PoolShape
from hicache_conformance.processes.supervisor import Strike
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.processes.worker import Peer

DURABLE: Final = [Level.DURABLE]
SURVIVING: Final = ("durability>=process",)
FT_5: Final[Mapping[Kind, str]] = {Kind.REWRITTEN: "SET-3", Kind.LOST: "FT-5", Kind.DENIED: "FT-5"}
PAGES: Final[Mapping[str, PoolShape]] = {PoolName.KV: PoolShape(pages=48, components=(3_000, 5_000))}
PAGE_BYTES: Final = 64_000
LITTER_KEYS: Final = 48
LONG: Final[Mapping[str, PoolShape]] = {PoolName.KV: PoolShape(pages=LITTER_KEYS, components=(PAGE_BYTES - 16_000, 16_000))}
LITTER_KILLS: Final = 8
CAPACITY_BYTES: Final = 2 << 20


class DurabilityCases:
    """FT-5."""

    @covers("FT-5", levels=DURABLE, needs=SURVIVING)
    def test_the_engine_is_killed_while_it_sets(self, lab: Lab) -> None:
        """Each restart finds every acknowledged page and no half one, sets what is missing, and is killed in turn."""
        _kill_and_restart(lab, {Call.SET: 8, Call.GET: 2, Call.EXISTS: 1})

    @covers("FT-5", levels=DURABLE, needs=(*SURVIVING, "deletes"))
    def test_the_engine_is_killed_while_it_deletes(self, lab: Lab) -> None:
        """The same while pages are set and deleted again: what was deleted does not come back, nor do others' bytes."""
        _kill_and_restart(lab, {Call.SET: 6, Call.GET: 2, Call.DELETE: 3})

    @covers("FT-5", levels=DURABLE, needs=(*SURVIVING, "clears"))
    def test_the_engine_is_killed_while_it_clears(self, lab: Lab) -> None:
        """The same while the namespace is cleared again and again."""
        _kill_and_restart(lab, {Call.SET: 8, Call.GET: 2, Call.CLEAR: 2})

    @covers("FT-5", levels=DURABLE, needs=(*SURVIVING, "evicts", CAPACITY))
    def test_the_engine_is_killed_while_it_evicts(self, lab: Lab) -> None:
        """The same in a store that is full: any page may be gone, none is wrong, and new ones find room."""
        stage, random = Stage(lab, PAGES, config=lab.capped(CAPACITY_BYTES)), lab.chance("strikes")
        engine = stage.peer("engine0")
        for kill in range(lab.profile.kills):
            keys = stage.new_keys(200)
            work = stage.work(keys, {Call.SET: 6, Call.GET: 3, Call.EXISTS: 1}, calls=60, lanes=2, longest=16)
            stage.play({engine: work}, {engine: Strike(random.randint(20, 60), random.random())})
            engine = stage.peer(f"engine{kill + 1}")
            engine.get(keys[:48])
            fresh = stage.new_keys(4)
            stage.expect(engine, fresh, stage.store(engine, fresh, "FT-5"), "FT-5")
        stage.judge("FT-5", keeps=False, rules=FT_5)

    @covers("FT-5", levels=DURABLE, needs=SURVIVING)
    def test_killed_writers_leave_no_litter(self, lab: Lab) -> None:
        """Processes killed in the middle of long writes, one after another; where a store is a directory, it does not grow by what they left."""
        stage, random = Stage(lab, LONG), lab.chance("strikes")
        engine, sizes, payload = stage.peer("engine0"), list[int](), 0
        for kill in range(LITTER_KILLS):
            # Of fresh keys, and more than are set, because a set of pages that exist writes nothing; of several calls, which tell
            # how long one takes.
            keys = stage.new_keys(LITTER_KEYS)
            work = stage.work(keys, {Call.SET: 1}, calls=12, longest=2)
            stage.play({engine: work}, {engine: Strike(random.randint(2, 6), random.random())})
            engine = stage.peer(f"engine{kill + 1}")
            stage.store(engine, keys[:2], "FT-5")
            if lab.capabilities.clears:
                engine.clear()
            elif kill:
                payload += PAGE_BYTES * sum(content is not None for content in engine.get(keys))
            footprint = Footprint.of(lab.config, lab.tmp)
            sizes += [footprint.bytes] if footprint else []
        stage.judge("FT-5", rules=FT_5)
        grown = sizes[-1] - sizes[0] if sizes else 0
        if grown > payload + 3 * PAGE_BYTES:
            raise Violation(
                "FT-5", f"{LITTER_KILLS} killed writers made the store grow by {grown} bytes; its pages take {payload}"
            )


def _kill_and_restart(lab: Lab, mix: Mapping[Call, int]) -> None:
    stage, random = Stage(lab, PAGES), lab.chance("strikes")
    # Stays open over all kills, where two processes may use one store.
    witnesses = [stage.peer("witness")] if declares(lab.capabilities, "sharing>=processes") else []
    engine, older = stage.peer("engine0"), list[str]()
    for kill in range(lab.profile.kills):
        keys = stage.new_keys(16)
        work = stage.work(keys, mix, calls=30, lanes=2, longest=5)
        stage.play({engine: work}, {engine: Strike(random.randint(2, 24), random.random())})
        engine = stage.peer(f"engine{kill + 1}")
        for reader in (engine, *witnesses):
            reader.get(keys)
            reader.exists(keys)
        stage.store(engine, keys, "FT-5")
        for reader in (engine, *witnesses):
            _expect_delivered(reader, keys)
            reader.get(random.sample(older, min(len(older), 16)))
        older += keys
    for peer in (engine, *witnesses):
        peer.close()
    last = stage.peer("last")
    for start in range(0, len(older), 32):
        last.get(older[start : start + 32])
    stage.judge("FT-5", rules=FT_5)


def _expect_delivered(peer: Peer, keys: list[str]) -> None:
    for index, (key, found) in enumerate(zip(keys, peer.get(keys), strict=True)):
        if found is None:
            raise Violation(
                "FT-5",
                f"page {index} key {short(key)} was set after a restart (True), and a get of process {peer.name} answers False",
            )
