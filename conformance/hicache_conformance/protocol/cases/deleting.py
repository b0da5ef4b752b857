"""Removal of pages: deleted, cleared, evicted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Inconclusive, Violation
from hicache_conformance.protocol.http_client import expect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.protocol.context import ServerContext
    from hicache_conformance.protocol.sglang_client import SglangScope


class DeletingCases:
    """`delete_keys`, `clear`, and eviction."""

    @covers("MD-DEL-1")
    def test_deleting_some(self, context: ServerContext) -> None:
        """Deleted keys are gone, the others keep their slots, and all slots return.

        Unknown keys are no error.
        """
        pages = context.number(6, 20)
        scope, keys = context.scope(pages), context.keys(pages)
        slots = scope.store(keys)
        gone = context.chance.sample(keys, pages // 2)
        # Twice in one call, since freeing a slot twice would give it to two keys.
        scope.delete([*gone, *context.keys(2), *gone])
        wanted = [None if key in gone else index for key, index in zip(keys, slots, strict=True)]
        if (found := scope.indices(keys)) != wanted:
            raise Violation(
                "MD-DEL-1",
                f"after {len(gone)} of {pages} keys were deleted, {found} is found; expected "
                f"{wanted}",
            )
        scope.delete(keys)
        context.reserve_soon(scope, context.keys(pages), "MD-DEL-1", f"{pages} keys were deleted")

    @covers("MD-DEL-2")
    def test_clearing(self, context: ServerContext) -> None:
        """After a clear nothing is there, and every slot can be reserved again.

        Those that were reserved come back when their reservation would have ended.
        """
        with context.while_held():
            pages = context.number(6, 20)
            scope, keys, held = (
                context.scope(pages),
                context.keys(pages // 2),
                context.keys(pages - pages // 2),
            )
            scope.store(keys)
            scope.reserve(held)
            scope.clear()
            if any(scope.exists([*keys, *held])):
                raise Violation(
                    "MD-DEL-2", f"after a clear some keys are there: {scope.exists([*keys, *held])}"
                )
            # Their slots are not given out yet, but others are.
            context.reserve_soon(
                scope,
                held[: len(keys)],
                "MD-DEL-2",
                "a scope was cleared in which these keys were reserved",
            )
        if context.cleared_seconds is not None:
            scope.clear()
            # By then all that was reserved before has ended as well.
            seconds = 2 * context.cleared_seconds
            context.reserve_soon(
                scope,
                context.keys(pages),
                "MD-DEL-2",
                "a scope with reservations was cleared",
                seconds,
            )

    @covers("MD-EV-1")
    def test_what_was_read_stays(self, context: ServerContext) -> None:
        """A full scope takes no page that get_page_indices has found while there are others."""
        self._keeps_what_was_used(context, "MD-EV-1", lambda scope, keys: scope.indices(keys))

    @covers("MD-EV-2")
    def test_what_exists_stays(self, context: ServerContext) -> None:
        """A full scope takes no page that exists has found while there are others."""
        self._keeps_what_was_used(context, "MD-EV-2", lambda scope, keys: scope.exists(keys))

    @covers("MD-BIG-2", levels=[Level.BUDGET])
    def test_freeing_costs_the_same_however_many_are_free(self, context: ServerContext) -> None:
        """To release a batch takes no longer with most of 30,000 slots free than with few."""
        batch, pages = 2000, 30_000
        scope = context.scope(pages)
        slots = list[list[int]]()
        for _ in range(pages // batch):
            reply = scope.post(
                "reserve_and_allocate_page_indices", keys=[[key, ""] for key in context.keys(batch)]
            )
            if reply.status == 413:
                raise Inconclusive(f"this server does not take batches of {batch} keys")
            expect(reply, "MD-BIG-2", 200)
            slots.append([index for _, index in _pairs(reply.body)])
        seconds = list[float]()
        for indices in slots:
            begin = time.perf_counter()
            scope.try_confirm([], indices)
            seconds.append(time.perf_counter() - begin)
        # The third slowest: a machine that is busy elsewhere slows one or two.
        # Reserved batch by batch and released in the same order, so that the free list grows from
        # batch to batch.
        few, many = min(seconds[:2]), sorted(seconds)[-3]
        if many > 6 * few + 0.15:
            raise Violation(
                "MD-BIG-2",
                f"to release {batch} slots takes {few * 1e3:.0f} ms when few are free, and up to "
                f"{many * 1e3:.0f} ms later",
            )

    def _keeps_what_was_used(
        self, context: ServerContext, rule: str, use: Callable[[SglangScope, Sequence[str]], object]
    ) -> None:
        pages = 2 * context.number(4, 8)
        scope, keys = context.scope(pages), context.keys(pages)
        scope.store(keys)
        # The oldest ones are used, so that no order of insertion explains that they stay.
        used, others = keys[: pages // 2], keys[pages // 2 :]
        use(scope, used)
        new = context.keys(pages // 4)
        with context.while_held():
            context.reserve_soon(
                scope, new, rule, f"{len(new)} new keys want room in a full scope of {pages}"
            )
        # The question itself may count as use: it is put about all, and last.
        there = dict(zip(keys, scope.exists(keys), strict=True))
        lost = [key for key in used if not there[key]]
        if lost and any(there[key] for key in others):
            stayed = sum(there[key] for key in others)
            raise Violation(
                rule,
                f"{len(lost)} of {len(used)} pages that were just used were evicted, and {stayed} "
                f"that were not stayed",
            )


def _pairs(body: bytes) -> list[tuple[bool, int]]:
    import msgspec

    answer = msgspec.json.decode(body, type=dict[str, list[tuple[bool, int]]])
    return answer["indices"]
