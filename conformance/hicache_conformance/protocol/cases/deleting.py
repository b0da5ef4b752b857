"""How pages go: deleted, cleared, evicted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Untestable, Violation
from hicache_conformance.protocol.http_client import expect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.protocol.context import ServerLab
    from hicache_conformance.protocol.sglang_client import CompatibleScope


class DeletingCases:
    """`delete_keys`, `clear`, and eviction."""

    @covers("MD-DEL-1")
    def test_deleting_some(self, lab: ServerLab) -> None:
        """Deleted keys are gone, the others keep their slots, unknown ones are no error, and all slots return."""
        pages = lab.number(6, 20)
        scope, keys = lab.scope(pages), lab.keys(pages)
        slots = scope.store(keys)
        gone = lab.chance.sample(keys, pages // 2)
        scope.delete([*gone, *lab.keys(2), *gone])
        wanted = [None if key in gone else index for key, index in zip(keys, slots, strict=True)]
        if (found := scope.indices(keys)) != wanted:
            raise Violation("MD-DEL-1", f"after {len(gone)} of {pages} keys were deleted, {found} is found; expected {wanted}")
        scope.delete(keys)
        lab.reserve_soon(scope, lab.keys(pages), "MD-DEL-1", f"{pages} keys were deleted")

    @covers("MD-DEL-2")
    def test_clearing(self, lab: ServerLab) -> None:
        """After a clear nothing is there, and every slot can be reserved again: those that were reserved when their reservation would have ended."""
        with lab.while_held():
            pages = lab.number(6, 20)
            scope, keys, held = lab.scope(pages), lab.keys(pages // 2), lab.keys(pages - pages // 2)
            scope.store(keys)
            scope.reserve(held)
            scope.clear()
            if any(scope.exists([*keys, *held])):
                raise Violation("MD-DEL-2", f"after a clear some keys are there: {scope.exists([*keys, *held])}")
            # Their slots are not given out yet, but others are.
            lab.reserve_soon(scope, held[: len(keys)], "MD-DEL-2", "a scope was cleared in which these keys were reserved")
        if lab.cleared_seconds is not None:
            scope.clear()
            # By then all that was reserved before has ended as well.
            seconds = 2 * lab.cleared_seconds
            lab.reserve_soon(scope, lab.keys(pages), "MD-DEL-2", "a scope with reservations was cleared", seconds)

    @covers("MD-EV-1")
    def test_what_was_read_stays(self, lab: ServerLab) -> None:
        """A full scope makes room, and takes no page that get_page_indices has found while there are others."""
        self._keeps_what_was_used(lab, "MD-EV-1", lambda scope, keys: scope.indices(keys))

    @covers("MD-EV-2")
    def test_what_exists_stays(self, lab: ServerLab) -> None:
        """A full scope takes no page that exists has found while there are others."""
        self._keeps_what_was_used(lab, "MD-EV-2", lambda scope, keys: scope.exists(keys))

    @covers("MD-BIG-2", levels=[Level.BUDGET])
    def test_freeing_costs_the_same_however_many_are_free(self, lab: ServerLab) -> None:
        """Batches of released slots take no longer when most of 30,000 slots are free than when few are."""
        batch, pages = 2000, 30_000
        scope = lab.scope(pages)
        slots = list[list[int]]()
        for _ in range(pages // batch):
            reply = scope.post("reserve_and_allocate_page_indices", keys=[[key, ""] for key in lab.keys(batch)])
            if reply.status == 413:
                raise Untestable(f"this server does not take batches of {batch} keys")
            expect(reply, "MD-BIG-2", 200)
            slots.append([index for _, index in _pairs(reply.body)])
        seconds = list[float]()
        for indices in slots:
            begin = time.perf_counter()
            scope.try_confirm([], indices)
            seconds.append(time.perf_counter() - begin)
        # The third slowest: a machine that is busy elsewhere slows one or two.
        few, many = min(seconds[:2]), sorted(seconds)[-3]
        if many > 6 * few + 0.15:
            raise Violation(
                "MD-BIG-2",
                f"to release {batch} slots takes {few * 1e3:.0f} ms when few are free, and up to {many * 1e3:.0f} ms later",
            )

    def _keeps_what_was_used(self, lab: ServerLab, rule: str, use: Callable[[CompatibleScope, Sequence[str]], object]) -> None:
        pages = 2 * lab.number(4, 8)
        scope, keys = lab.scope(pages), lab.keys(pages)
        scope.store(keys)
        # The oldest ones are used, so that no order of insertion explains that they stay.
        used, others = keys[: pages // 2], keys[pages // 2 :]
        use(scope, used)
        new = lab.keys(pages // 4)
        with lab.while_held():
            lab.reserve_soon(scope, new, rule, f"{len(new)} new keys want room in a full scope of {pages}")
        # The question itself may count as use: it is put about all, and last.
        there = dict(zip(keys, scope.exists(keys), strict=True))
        lost = [key for key in used if not there[key]]
        if lost and any(there[key] for key in others):
            stayed = sum(there[key] for key in others)
            raise Violation(
                rule, f"{len(lost)} of {len(used)} pages that were just used were evicted, and {stayed} that were not stayed"
            )


def _pairs(body: bytes) -> list[tuple[bool, int]]:
    import msgspec

    answer = msgspec.json.decode(body, type=dict[str, list[tuple[bool, int]]])
    return answer["indices"]
