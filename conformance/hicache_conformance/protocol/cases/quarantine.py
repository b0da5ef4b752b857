"""Slots that must not be assigned yet: in quarantine, or pinned."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Inconclusive, Violation
from hicache_conformance.protocol.context import SLACK_SECONDS
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import Reserved, Unpin

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.protocol.context import ServerContext
    from hicache_conformance.protocol.v2_client import V2Scope

PIN_SECONDS = 20.0


class QuarantineCases:
    """Quarantine and pins."""

    @covers("MD-QUAR-1", needs=[Need.NATIVE])
    def test_deleted_slots_rest(self, context: ServerContext) -> None:
        """The slots of deleted pages are leased again after the quarantine, and not before."""
        self._rests(context, "deleted", lambda scope, keys: (scope.store(keys), scope.delete(keys)))

    @covers("MD-QUAR-1", needs=[Need.NATIVE])
    def test_cleared_slots_rest(self, context: ServerContext) -> None:
        """The same after a clear, for live and leased slots."""
        self._rests(context, "cleared", lambda scope, keys: self._clear(context, scope, keys))

    @covers("MD-QUAR-2", needs=[Need.NATIVE])
    def test_cleared_leases_rest_as_long_as_they_would_have_lasted(
        self, context: ServerContext
    ) -> None:
        """A slot that a clear takes from its writer rests as long as the lease would have lasted.

        A clear asks no writer. A slot that was live is given again before.
        """
        limits = context.server_info.limits
        seconds = max(limits.quarantine_seconds + SLACK_SECONDS + 1.0, limits.min_lease_seconds)
        context.can_wait(seconds + context.rest_seconds, "a lease and a quarantine")
        scope, keys = context.v2_scope(6), context.keys(6)
        scope.store(keys[:3])
        begin = time.monotonic()
        leased = set(scope.reserve(keys[3:], lease_seconds=seconds).slots)
        scope.clear()
        got = set[int]()

        def slots_are_given(count: int) -> bool:
            before = time.monotonic() - begin
            given = {
                slot
                for slot in scope.reserve(context.keys(6), lease_seconds=PIN_SECONDS).slots
                if slot >= 0
            }
            if given & leased and time.monotonic() - begin < seconds:
                raise Violation(
                    "MD-QUAR-2",
                    f"slots {sorted(given & leased)} are given {before:.1f} s after they were "
                    f"leased for {seconds:g} s, and cleared",
                )
            got.update(given)
            return len(got) >= count

        context.eventually(
            "MD-QUAR-2",
            lambda: f"{len(got)} of 3 slots of pages that were cleared come back",
            lambda: slots_are_given(3),
        )
        limit = seconds + context.rest_seconds
        context.eventually(
            "MD-QUAR-2",
            lambda: f"{len(got)} of 6 slots that were cleared come back",
            lambda: slots_are_given(6),
            limit,
        )

    @covers("MD-QUAR-1", needs=[Need.NATIVE])
    def test_aborted_slots_rest(self, context: ServerContext) -> None:
        """The same after an abort: the writer may still be writing."""
        self._rests(
            context,
            "aborted",
            lambda scope, keys: scope.abort(scope.reserve(keys, lease_seconds=PIN_SECONDS).leases),
        )

    @covers("MD-QUAR-1", "MD-EV-4", needs=[Need.NATIVE])
    def test_evicted_slots_rest(self, context: ServerContext) -> None:
        """A page that was evicted for another leaves a slot that rests."""
        quarantine, scope, keys = (
            context.server_info.limits.quarantine_seconds,
            context.v2_scope(6),
            context.keys(6),
        )
        context.can_wait(quarantine, "the quarantine")
        where = dict(
            zip(keys, scope.lookup([page.key for page in scope.store(keys)]).slots, strict=True)
        )
        new, begin = context.keys(3), time.monotonic()
        first = scope.reserve(new, lease_seconds=PIN_SECONDS)
        took = time.monotonic() - begin
        gone = {where[key] for key, live in zip(keys, scope.live(keys), strict=True) if not live}
        given = {
            slot
            for slot, state in zip(first.slots, first.states, strict=True)
            if state is Reserved.LEASED
        }
        if given - gone:
            raise Violation(
                "MD-EV-4", f"slots {sorted(given - gone)} of live pages are leased to others"
            )
        if given and took < quarantine:
            raise Violation(
                "MD-QUAR-1",
                f"slots {sorted(given)} are leased {took * 1e3:.0f} ms after their pages were "
                f"evicted: {quarantine:g} s is told",
            )

    @covers("MD-PIN-1", needs=[Need.NATIVE])
    def test_pinned_slots_stay(self, context: ServerContext) -> None:
        """Pinned slots are leased to nobody after a delete or a clear, until they are unpinned."""
        context.can_wait(2 * context.rest_seconds, "twice the quarantine")
        for way in ("delete", "clear"):
            slots = context.number(4, 8)
            scope, keys = context.v2_scope(slots), context.keys(slots)
            scope.store(keys)
            chosen = keys[: slots // 2]
            found, pin = scope.pinned_lookup(chosen, PIN_SECONDS)
            if pin == 0:
                raise Violation(
                    "MD-PIN-1", f"a lookup that asks for a pin of {PIN_SECONDS:g} s answers pin 0"
                )
            scope.delete(keys) if way == "delete" else scope.clear()
            time.sleep(context.server_info.limits.quarantine_seconds)
            self._gives_others(
                context,
                scope,
                set(found.slots),
                slots - len(chosen),
                f"pinned, and {way} made their keys go",
            )
            context.native.http.post("/v2/unpin", Unpin(pins=[pin]))
            context.lease_soon(scope, context.keys(len(chosen)), "MD-PIN-1", "slots were unpinned")

    @covers("MD-PIN-1", needs=[Need.NATIVE])
    def test_pins_end(self, context: ServerContext) -> None:
        """A pin that nobody lets go ends after its time."""
        scope, keys = context.v2_scope(4), context.keys(4)
        scope.store(keys)
        scope.pinned_lookup(keys, 0.5)
        scope.delete(keys)
        limit = context.rest_seconds + 0.5
        got = set[int]()

        def all_are_back() -> bool:
            got.update(
                slot
                for slot in scope.reserve(context.keys(4), lease_seconds=PIN_SECONDS).slots
                if slot >= 0
            )
            return len(got) == 4

        context.eventually(
            "MD-PIN-1",
            lambda: f"of 4 slots that were pinned for 0.5 s {len(got)} came back",
            all_are_back,
            limit,
        )

    @covers("MD-EV-4", needs=[Need.NATIVE])
    def test_eviction_spares_leased_and_pinned_slots(self, context: ServerContext) -> None:
        """In a scope of pinned, leased and other pages only the others make room."""
        scope, keys = context.v2_scope(9), context.keys(6)
        context.can_wait(2 * context.rest_seconds, "twice the quarantine")
        scope.store(keys)
        pinned, _ = scope.pinned_lookup(keys[:3], PIN_SECONDS, touch=False)
        scope.lookup(keys[3:])
        leased = scope.reserve(context.keys(3), lease_seconds=PIN_SECONDS)
        new, got = context.keys(9), set[int]()

        def others_are_given() -> bool:
            got.update(
                slot for slot in scope.reserve(new, lease_seconds=PIN_SECONDS).slots if slot >= 0
            )
            return len(got) >= 3

        context.eventually(
            "MD-EV-4", lambda: f"of 3 pages that may go only {len(got)} make room", others_are_given
        )
        taken = got & {*pinned.slots, *leased.slots}
        if taken:
            raise Violation(
                "MD-EV-4",
                f"slots {sorted(taken)} are given out; pinned are {pinned.slots}, leased are "
                f"{leased.slots}",
            )
        if not all(scope.commit(leased.leases)):
            raise Violation("MD-EV-4", "leases were taken away to make room for others")

    def _clear(self, context: ServerContext, scope: V2Scope, keys: list[str]) -> None:
        scope.store(keys[::2])
        scope.reserve(keys[1::2], lease_seconds=context.server_info.limits.min_lease_seconds)
        scope.clear()

    def _rests(
        self, context: ServerContext, how: str, let_go: Callable[[V2Scope, list[str]], object]
    ) -> None:
        quarantine = context.server_info.limits.quarantine_seconds
        context.can_wait(quarantine, "the quarantine")
        slots = context.number(4, 8)
        scope, keys = context.v2_scope(slots), context.keys(slots)
        begin = time.monotonic()
        let_go(scope, keys)
        answer = scope.reserve(context.keys(slots), lease_seconds=PIN_SECONDS)
        took = time.monotonic() - begin
        given = [slot for slot in answer.slots if slot >= 0]
        if given and took < quarantine:
            raise Violation(
                "MD-QUAR-1",
                f"slots {given} are leased {took * 1e3:.0f} ms after they were {how}; "
                f"{quarantine:g} s is told",
            )
        if given and quarantine > 0:
            raise Inconclusive(
                f"it took {took:.1f} s to let slots go, and the quarantine is {quarantine:g} s"
            )
        context.lease_soon(
            scope, context.keys(slots - len(given)), "MD-QUAR-1", f"slots were {how}"
        )

    def _gives_others(
        self, context: ServerContext, scope: V2Scope, spared: set[int], others: int, how: str
    ) -> None:
        """All slots but the spared ones are leased."""
        got = set[int]()

        def others_are_given() -> bool:
            got.update(
                slot
                for slot in scope.reserve(
                    context.keys(others + len(spared)), lease_seconds=PIN_SECONDS
                ).slots
                if slot >= 0
            )
            return len(got) >= others

        context.eventually(
            "MD-PIN-1",
            lambda: f"{len(got)} of {others} slots that are not pinned come back",
            others_are_given,
        )
        if got & spared:
            raise Violation(
                "MD-PIN-1", f"slots {sorted(got & spared)} are leased to others; they are {how}"
            )
