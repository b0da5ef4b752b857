"""Confirmation and release of reserved slots, valid and invalid."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.context import SLACK_SECONDS
from hicache_conformance.protocol.http_client import refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.protocol.context import ServerContext
    from hicache_conformance.protocol.http_client import Reply
    from hicache_conformance.protocol.sglang_client import SglangScope


class ConfirmingCases:
    """`confirm_write`."""

    @covers("MD-CONF-1")
    def test_confirming_twice_is_harmless(self, context: ServerContext) -> None:
        """A confirm that is repeated leaves keys where they are."""
        scope, keys = context.scope(16), context.keys(5)
        slots = scope.store(keys)
        _no_fault(
            scope.try_confirm(list(zip(keys, slots, strict=True))),
            "MD-CONF-1",
            "a repeated confirm",
        )
        if (now := scope.indices(keys)) != slots:
            raise Violation(
                "MD-CONF-1", f"slots {slots} became {now} when they were confirmed again"
            )

    @covers("MD-CONF-2")
    def test_a_slot_that_was_never_reserved(self, context: ServerContext) -> None:
        """Confirming free slots maps nothing; a right pair in the same call is done."""
        with context.while_held():
            scope, keys = context.scope(16), context.keys(4)
            right = scope.reserve(keys[:1])[0][1]
            free = [index for index in range(16) if index != right]
            pairs = list(zip(keys[1:], context.chance.sample(free, 3), strict=True))
            _no_fault(
                # The right pair stands between wrong ones: a server that stops at the first wrong
                # one loses it, one that stops at the last maps too much.
                scope.try_confirm([pairs[0], (keys[0], right), *pairs[1:]]),
                "MD-CONF-2",
                "a confirm of free slots",
            )
            _check_unmapped(scope, keys[1:], "slots that nobody had reserved were confirmed")
            if scope.indices(keys[:1]) != [right]:
                raise Violation(
                    "MD-CONF-2",
                    "a right confirm is lost because others in the same call were wrong",
                )

    @covers("MD-CONF-2", "MD-SLOT-1")
    def test_a_slot_of_another_key(self, context: ServerContext) -> None:
        """Confirming what is live, or reserved, for another key maps nothing."""
        with context.while_held():
            scope, live, held, wrong = (
                context.scope(16),
                context.keys(3),
                context.keys(3),
                context.keys(6),
            )
            slots = scope.store(live)
            reserved = [index for _, index in scope.reserve(held)]
            reply = scope.try_confirm(list(zip(wrong, [*slots, *reserved], strict=True)))
            _no_fault(reply, "MD-CONF-2", "a confirm of other keys' slots")
            _check_unmapped(scope, wrong, "other keys' slots were confirmed")
            if scope.indices(live) != slots:
                raise Violation(
                    "MD-CONF-2",
                    f"slots {slots} became {scope.indices(live)} when others confirmed them",
                )
            # The rightful reservations still hold: a wrong confirm must not have used them up.
            scope.confirm(list(zip(held, reserved, strict=True)))

    @covers("MD-CONF-2", "MD-DEL-2")
    def test_a_confirm_after_a_clear(self, context: ServerContext) -> None:
        """A reservation that a clear has ended cannot be confirmed.

        Also where another key has the slot by now.
        """
        with context.while_held():
            pages = context.number(4, 10)
            scope, late = context.scope(pages), context.keys(pages)
            slots = [index for _, index in scope.reserve(late)]
            scope.clear()
            _no_fault(
                scope.try_confirm([(late[0], slots[0])]), "MD-CONF-2", "a confirm after a clear"
            )
            _check_unmapped(
                scope, late, "a slot was confirmed that had been reserved before a clear"
            )
        # Reservations last longer than the case may wait, so that the slots are with nobody else
        # yet.
        if context.cleared_seconds is None:
            return
        keys, because = context.keys(pages), "a scope with everything reserved was cleared"
        scope.confirm(
            [],
            context.reserve_soon(
                scope, context.keys(1), "MD-DEL-2", because, context.cleared_seconds
            ),
        )
        with context.while_held():
            # The late confirm now meets slots of others, which is how it does harm.
            now = context.reserve_soon(scope, keys, "MD-DEL-2", because)
            scope.confirm(list(zip(keys, now, strict=True)))
            _no_fault(
                scope.try_confirm(list(zip(late, slots, strict=True))),
                "MD-CONF-2",
                "a confirm after a clear",
            )
            _check_unmapped(
                scope, late, "slots were confirmed that had been reserved before a clear"
            )
            if scope.indices(keys) != now:
                raise Violation(
                    "MD-CONF-2", "a confirm after a clear took slots that since belong to others"
                )

    @covers("MD-CONF-2")
    def test_a_confirm_after_a_release(self, context: ServerContext) -> None:
        """A reservation that was released cannot be confirmed."""
        with context.while_held():
            scope, keys = context.scope(8), context.keys(4)
            slots = [index for _, index in scope.reserve(keys)]
            scope.confirm([], slots)
            _no_fault(
                scope.try_confirm(list(zip(keys, slots, strict=True))),
                "MD-CONF-2",
                "a confirm after a release",
            )
            _check_unmapped(scope, keys, "slots were confirmed after they had been released")

    @covers("MD-CONF-3", levels=[Level.FAULTS])
    def test_a_slot_outside_the_file(self, context: ServerContext) -> None:
        """Slots beyond the end or below zero are refused, for confirm and for release.

        They are never handed out.
        """
        scope, keys = context.scope(8), context.keys(8)
        # The first one outside, negative ones that a Python list would take from its end, and one
        # that no signed 64-bit integer holds.
        for index in (8, 9, -1, -8, 10**9, 2**63):
            for pairs, released in (([(keys[0], index)], []), ([], [index])):
                reply = scope.try_confirm(pairs, released)
                field = "written_keys_to_confirm" if pairs else "pages_to_release"
                refused(reply, "MD-CONF-3", f"slot {index} in a scope of 8", names=field)
            if scope.indices(keys[:1]) != [None]:
                raise Violation(
                    "MD-CONF-3",
                    f"slot {index} was refused in a scope of 8, and the key is there in "
                    f"{scope.indices(keys[:1])}",
                )
        with context.while_held():
            given = [
                index for _, index in scope.reserve([*keys, *context.keys(4)], rule="MD-CONF-3")
            ]
            if any(index >= 8 for index in given):
                raise Violation(
                    "MD-CONF-3",
                    f"a scope of 8 slots gives out {given} after others had been released",
                )

    @covers("MD-CONF-4", "MD-SLOT-1")
    def test_releasing_a_live_slot(self, context: ServerContext) -> None:
        """A live slot that somebody releases stays its key's, and is given to nobody."""
        with context.while_held():
            scope, keys, more = context.scope(8), context.keys(4), context.keys(4)
            slots = scope.store(keys)
            _no_fault(scope.try_confirm([], slots), "MD-CONF-4", "a release of live slots")
            answer = [index for _, index in scope.reserve(more)]
            left = scope.indices(keys)
            if set(answer) & {index for index in left if index is not None}:
                raise Violation(
                    "MD-CONF-4",
                    f"live slots {slots} were released; they are still announced as {left} and "
                    f"given out: {answer}",
                )
            if left != slots:
                raise Violation(
                    "MD-CONF-4",
                    f"live slots {slots} were released, and their keys are now at {left}",
                )

    @covers("MD-CONF-4", "MD-SLOT-1")
    def test_releasing_twice(self, context: ServerContext) -> None:
        """A slot released twice, in one call or in two, is given to one key only."""
        with context.while_held():
            pages = context.number(4, 10)
            scope, keys = context.scope(pages), context.keys(pages)
            slots = [index for _, index in scope.reserve(keys)]
            _no_fault(
                scope.try_confirm([], [*slots, *slots]),
                "MD-CONF-4",
                "a slot released twice in one call",
            )
            _no_fault(scope.try_confirm([], slots), "MD-CONF-4", "a slot released again")
        # After the quarantine: a server that has put a slot into its free list twice gives it out
        # twice only then.
        time.sleep(context.rest_seconds - SLACK_SECONDS)
        with context.while_held():
            again = context.reserve_soon(
                scope, context.keys(pages), "MD-CONF-4", f"{pages} slots were released twice"
            )
            more = [index for _, index in scope.reserve(context.keys(pages)) if index >= 0]
            if len({*again, *more}) != len(again) + len(more):
                raise Violation(
                    "MD-CONF-4",
                    f"{pages} slots that were released twice are given out as {again} and {more}",
                )


def _no_fault(reply: Reply, rule: str, because: str) -> None:
    """Refused or ignored, as the server likes: but not broken."""
    if reply.status >= 500:
        raise Violation(rule, f"{because} is taken for a fault of the server: {reply}")


def _check_unmapped(scope: SglangScope, keys: Sequence[str], because: str) -> None:
    flags, indices = scope.exists(keys), scope.indices(keys)
    if any(flags) or any(index is not None for index in indices):
        raise Violation(
            "MD-CONF-2",
            f"{because}, and their keys are there: exists {flags}, get_page_indices {indices}",
        )
