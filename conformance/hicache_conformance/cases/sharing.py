"""What one process does to a page, seen by another that is open all the while."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.process_group import Stage
from hicache_conformance.harness.corruption import Damage
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Untestable, Violation
from hicache_conformance.processes.messages import PoolShape
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.processes.worker import Peer

SHARED: Final = [Level.SHARED]
ALSO_SHARED: Final = [Level.CORE, Level.SHARED]
BETWEEN_PROCESSES: Final = ("sharing>=processes",)
SHAPES: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=32),
    PoolName.MAMBA: PoolShape(pages=32, page_size=1, components=(80, 24)),
}


class SharingCases:
    """ID-2 between processes; SET-1, SET-3, LC-4, GET-7 and EX-9 as a second process sees them."""

    @covers("ID-2", levels=SHARED, needs=BETWEEN_PROCESSES)
    def test_processes_share_pages(self, lab: Lab) -> None:
        """What one process sets, others find: opened before the set or after it, and having asked before."""
        stage = Stage(lab, SHAPES)
        # Interpreters of their own: what differs between two of them must not be part of a name.
        writer, early = stage.peer("writer", fresh=True), stage.peer("early")
        keys, later = stage.new_keys(8), stage.new_keys(8)
        for pool in SHAPES:
            early.get(keys, pool)
        early.exists(keys)
        values = {pool: stage.store(writer, keys, "SET-1", pool) for pool in SHAPES}
        late = stage.peer("late")
        for reader in (writer, early, late):
            for pool, value in values.items():
                stage.expect(reader, keys, value, "ID-2", pool)
            stage.expect_existing(reader, keys, "ID-2")
        value = stage.store(early, later, "SET-1")
        for reader in (early, writer, late):
            stage.expect(reader, later, value, "ID-2")
        own = lab.storage(stage.identity, pools={pool: GuardedPool(**_arguments(shape)) for pool, shape in SHAPES.items()})  # type: ignore[arg-type]
        for pool, value in values.items():
            own.expect(keys, pool, generation=value, rule="ID-2")

    @covers("ID-2", levels=SHARED, needs=(*BETWEEN_PROCESSES, "durability>=reopen"))
    def test_pages_outlive_their_process(self, lab: Lab) -> None:
        """A process sets pages and ends; one that starts afterwards finds them."""
        stage = Stage(lab)
        writer, keys = stage.peer("writer"), stage.new_keys(8)
        value = stage.store(writer, keys, "SET-1")
        writer.close()
        heir = stage.peer("heir")
        stage.expect(heir, keys, value, "ID-2")
        stage.expect_existing(heir, keys, "ID-2")

    @covers("SET-3", levels=ALSO_SHARED, needs=BETWEEN_PROCESSES)
    def test_what_another_process_set_is_not_rewritten(self, lab: Lab) -> None:
        """A set of what another process has stored answers True, and the first bytes stay for both."""
        stage = Stage(lab)
        one, two, keys = stage.peer("one"), stage.peer("two"), stage.new_keys(8)
        two.exists(keys)
        value = stage.store(one, keys, "SET-1")
        stage.store(two, keys, "SET-3")
        for reader in (one, two):
            stage.expect(reader, keys, value, "SET-1")
        stage.judge("SET-3")

    @covers("SET-1", levels=ALSO_SHARED, needs=(*BETWEEN_PROCESSES, "deletes"))
    def test_what_another_process_deleted(self, lab: Lab) -> None:
        """Pages that another process deletes are gone at once, and can be set anew by whoever had known them."""
        _remove_and_set_anew(lab, lambda peer, keys: peer.delete(keys), "SET-1")

    @covers("LC-4", "SET-1", levels=[Level.CORE, Level.IDENTITY, Level.SHARED], needs=(*BETWEEN_PROCESSES, "clears"))
    def test_what_another_process_cleared(self, lab: Lab) -> None:
        """Pages that another process clears are gone at once, and can be set anew by whoever had known them."""
        _remove_and_set_anew(lab, lambda peer, keys: peer.clear(), "LC-4")

    @covers("GET-7", "EX-9", "SET-3", levels=ALSO_SHARED, needs=BETWEEN_PROCESSES, damages=True)
    def test_damage_found_by_one_and_repaired_by_another(self, lab: Lab) -> None:
        """Whichever process has found a page damaged, and whichever has set it anew: both read it then."""
        stage = Stage(lab)
        one, two, own = stage.peer("one"), stage.peer("two"), lab.storage(stage.identity)
        if not own.call("get_stats", own.storage.get_stats).verifies_checksums:
            raise Untestable("the options leave checksums unverified, as get_stats() says; nothing can notice damaged bytes")
        for finders, mender in (((one,), one), ((one,), two), ((one, two), two)):
            keys = stage.new_keys(3)
            for key in keys:
                if not lab.damage(own, key, Damage.FLIPPED_BIT):
                    raise Untestable("the driver could not be made to hold a damaged page; override tamper()")
            for finder in finders:
                _expect_missing(stage, finder, keys)
            value = stage.store(mender, keys, "SET-3")
            for reader in (mender, one, two):
                stage.expect(reader, keys, value, "SET-3")
                stage.expect_existing(reader, keys, "EX-9")


def _remove_and_set_anew(lab: Lab, remove: Callable[[Peer, list[str]], object], rule: str) -> None:
    stage = Stage(lab)
    one, two, keys = stage.peer("one"), stage.peer("two"), stage.new_keys(6)
    # Both have set, read and looked for the pages, so that whatever can be remembered of them is.
    for peer in (one, two):
        stage.store(peer, keys, "SET-1")
        peer.get(keys)
        peer.exists(keys)
    remove(one, keys)
    for peer in (two, one):
        peer.exists(keys)
        peer.get(keys)
    # What was delivered until now is judged first: a page that is still there is not set anew.
    stage.judge(rule)
    value = stage.store(two, keys[:3], "SET-1")
    others = stage.store(one, keys[3:], "SET-1")
    for peer in (one, two):
        stage.expect(peer, keys[:3], value, "SET-1")
        stage.expect(peer, keys[3:], others, "SET-1")
    stage.judge(rule)


def _expect_missing(stage: Stage, peer: Peer, keys: list[str]) -> None:
    for index, (key, found) in enumerate(zip(keys, peer.get(keys), strict=True)):
        if found is not None:
            raise Violation("GET-5", f"page {index} key {short(key)} is damaged, and is delivered to process {peer.name}")
    if peer.exists(keys):
        raise Violation("EX-9", f"process {peer.name} has found {len(keys)} pages damaged, and says that they exist")


def _arguments(shape: PoolShape) -> dict[str, object]:
    return {"pages": shape.pages, "page_size": shape.page_size, "components": shape.components}
