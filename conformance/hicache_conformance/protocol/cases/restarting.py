"""kill -9 of the server, and its state after the restart."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.context import BATCH
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import Reserved

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext
    from hicache_conformance.protocol.sglang_client import SglangScope

SETTLE_SECONDS = 1.5
"""So long a server that writes snapshots every second is left alone, so that it has one that is out
of date when it is killed."""


class RestartingCases:
    """Durability over a restart."""

    @covers("MD-DUR-1", levels=[Level.DURABLE], needs=[Need.DURABLE])
    def test_confirmed_keys_are_there_after_a_kill(self, context: ServerContext) -> None:
        """Keys confirmed a moment before kill -9 are there after the restart, in their slots."""
        # Asked first, so that a case on a server that cannot be killed is told apart before it
        # writes anything.
        context.must_be_ours()
        scope, keys = context.scope(32), context.keys(12)
        slots = scope.store(keys)
        context.restart()
        if (now := scope.indices(keys, rule="MD-DUR-1")) != slots:
            raise Violation(
                "MD-DUR-1",
                f"slots {slots} were confirmed before kill -9; after the restart they are {now}",
            )

    @covers("MD-DUR-1", "MD-DUR-2", levels=[Level.DURABLE], needs=[Need.DURABLE])
    def test_deleted_keys_do_not_come_back(self, context: ServerContext) -> None:
        """Keys deleted before kill -9 are not back after the restart.

        Their slots were given to others by then.
        """
        context.must_be_ours()
        pages = context.number(8, 16)
        scope, old, new = context.scope(pages), context.keys(pages), context.keys(pages)
        scope.store(old)
        # The snapshot now holds the old keys. A server that restores it as it is puts them onto
        # slots that belong to others by then (the fault that MD-DUR-1 is about).
        time.sleep(SETTLE_SECONDS)
        scope.delete(old)
        slots = context.reserve_soon(scope, new, "MD-DUR-1", f"{pages} keys were deleted")
        scope.confirm(list(zip(new, slots, strict=True)))
        context.restart()
        back = [index for index in scope.indices(old, rule="MD-DUR-1") if index is not None]
        if back:
            raise Violation(
                "MD-DUR-1",
                f"{len(back)} keys that were deleted before kill -9 are back, in slots {back} that "
                f"hold other pages",
            )
        if (now := scope.indices(new)) != slots:
            raise Violation(
                "MD-DUR-1",
                f"slots {slots} were confirmed before kill -9; after the restart they are {now}",
            )

    @covers("MD-DUR-2", "MD-DUR-1", levels=[Level.DURABLE], needs=[Need.DURABLE])
    def test_killed_under_load(self, context: ServerContext) -> None:
        """kill -9 at a random instant while clients write and delete.

        Afterwards all that was acknowledged holds, and all slots are there.
        """
        context.must_be_ours()
        # So many that nothing is evicted while they write.
        pages = 2048
        scope = context.scope(pages)
        writers = [_Writer(scope.through(context.client()), context.keys(16)) for _ in range(3)]
        for writer in writers:
            writer.start()
        # Drawn, so that the kill falls into a write, a sync or a snapshot, and not always into the
        # same one.
        time.sleep(context.chance.uniform(0.05, 0.5))
        context.restart()
        for writer in writers:
            writer.join()
        for writer in writers:
            writer.check_survivors(scope)
        keys = [key for writer in writers for key in writer.keys]
        found = [index for index in scope.indices(keys) if index is not None]
        fresh = context.keys(pages)
        # Reserving everything that the server takes for free: a slot of its free list that is live
        # as well is handed out here.
        given = list(context.reserve_all(scope, fresh, "MD-DUR-2").values())
        left = [index for index in scope.indices(keys) if index is not None]
        if len(set(found)) != len(found) or set(given) & set(left):
            raise Violation(
                "MD-DUR-2",
                f"after kill -9 slots {sorted(found)} are live, and "
                f"{sorted(set(given) & set(left))} of them are given out",
            )
        for start in range(0, len(given), BATCH):
            scope.try_confirm([], given[start : start + BATCH])
        scope.delete(keys)
        wait = context.rest_seconds + (context.server_info.lease_seconds or 0.0)
        context.can_wait(wait, "what was reserved at the kill")
        got = dict[str, int]()

        def all_can_be_reserved() -> bool:
            got.update(
                context.reserve_all(scope, [key for key in fresh if key not in got], "MD-DUR-2")
            )
            return len(set(got.values())) == pages

        # By then the first of these reservations may have ended: their slots count once.
        context.eventually(
            "MD-DUR-2",
            lambda: f"after kill -9 only {len(set(got.values()))} of {pages} slots can be reserved",
            all_can_be_reserved,
            wait,
        )

    @covers("MD-IDEM-2", levels=[Level.DURABLE], needs=[Need.NATIVE, Need.DURABLE])
    def test_a_retry_over_a_restart(self, context: ServerContext) -> None:
        """A reserve that is sent again after kill -9 gets the leases of the first time.

        They can be committed.
        """
        context.must_be_ours()
        scope, keys, once = context.v2_scope(8), context.keys(3), context.keys(1)[0]
        # A minute, so that the lease outlasts a slow restart.
        first = scope.reserve(keys, lease_seconds=60.0, once=once)
        context.restart()
        again = scope.reserve(keys, lease_seconds=60.0, once=once)
        if again != first:
            raise Violation(
                "MD-IDEM-2",
                f"a reserve answered {first}; sent again after kill -9 it answers {again}",
            )
        if not all(scope.commit(first.leases)):
            raise Violation(
                "MD-IDEM-2", "leases that were given before kill -9 cannot be committed after it"
            )

    @covers("MD-GEN-1", levels=[Level.DURABLE], needs=[Need.NATIVE, Need.DURABLE])
    def test_generations_grow_over_a_restart(self, context: ServerContext) -> None:
        """After kill -9 slots and leases go on from where they were."""
        context.must_be_ours()
        scope, keys = context.v2_scope(4), context.keys(4)
        pages = {page.slot: page for page in scope.store(keys)}
        scope.delete(keys)
        context.restart()
        new = context.keys(4)
        leases = context.lease_soon(scope, new, "MD-GEN-1", "all pages were deleted")
        for status in filter(None, scope.inspect(new)):
            if status.generation <= pages[status.slot].generation:
                raise Violation(
                    "MD-GEN-1",
                    f"slot {status.slot} was of generation {pages[status.slot].generation} before "
                    f"kill -9, is {status.generation}",
                )
        if set(leases) & {page.lease for page in pages.values()}:
            raise Violation(
                "MD-GEN-1", "leases that were given before kill -9 are given again after it"
            )

    @covers("MD-LEASE-6", levels=[Level.DURABLE], needs=[Need.NATIVE])
    def test_no_lease_is_given_twice(self, context: ServerContext) -> None:
        """After kill -9 leases have other numbers than before, whatever is left of the scope.

        An old one names no new slot.
        """
        context.must_be_ours()
        scope, keys = context.v2_scope(8), context.keys(2)
        old = scope.reserve(keys, lease_seconds=60.0)
        context.restart()
        # The rule binds servers that keep nothing, too: they have to avoid old numbers without
        # knowing them.
        is_lost = scope.initialize()
        new = scope.reserve(context.keys(4), lease_seconds=60.0)
        again = set(old.leases) & set(new.leases)
        if again:
            raise Violation(
                "MD-LEASE-6",
                f"leases {sorted(again)} were given before kill -9, and are given again after it",
            )
        if is_lost and any(scope.commit(old.leases)):
            raise Violation(
                "MD-LEASE-6",
                "a lease of a scope that was lost at kill -9 is committed in the one that was made "
                "since",
            )

    @covers("MD-QUAR-3", levels=[Level.DURABLE], needs=[Need.NATIVE])
    def test_a_scope_of_earlier_leases_is_closed(self, context: ServerContext) -> None:
        """A scope made after a restart gives no slot while leases of an earlier server may last.

        If its client says so.
        """
        context.must_be_ours()
        seconds = 2.0
        limit = seconds + context.rest_seconds
        context.can_wait(limit, "earlier leases and a quarantine")
        # From before the kill, the earliest instant at which the server's own clock can begin.
        begin = time.monotonic()
        context.restart()
        fresh, closed = context.v2_scope(4), context.v2_scope(4, earlier_lease_seconds=seconds)
        if Reserved.LEASED not in fresh.reserve(context.keys(1)).states:
            raise Violation(
                "MD-QUAR-3",
                "a new scope, of which nothing is said of earlier leases, gives no slot",
            )
        got = set[int]()

        def all_are_given() -> bool:
            given = [
                slot
                for slot in closed.reserve(context.keys(4), lease_seconds=60.0).slots
                if slot >= 0
            ]
            took = time.monotonic() - begin
            if given and took < seconds + context.server_info.limits.quarantine_seconds:
                raise Violation(
                    "MD-QUAR-3",
                    f"slots {given} are given {took:.1f} s after kill -9; earlier leases may last "
                    f"{seconds:g} s",
                )
            got.update(given)
            return len(got) == 4

        context.eventually(
            "MD-QUAR-3",
            lambda: f"{len(got)} of 4 slots of a scope of earlier leases are given",
            all_are_given,
            limit,
        )


class _Writer(threading.Thread):
    """Stores and deletes its own keys one after the other, until the server is gone.

    It remembers what was acknowledged.
    """

    def __init__(self, scope: SglangScope, keys: list[str]) -> None:
        super().__init__(daemon=True)
        self.scope = scope
        self.keys = keys
        self.acknowledged: dict[str, int | None] = {}
        self.unsure: str = ""
        """The key of the request that had no answer."""

    def run(self) -> None:
        """Go on until there is no answer."""
        try:
            while True:
                for key in self.keys:
                    self.unsure = key
                    if self.acknowledged.get(key) is None:
                        self._store(key)
                    else:
                        self.scope.delete([key])
                        self.acknowledged[key] = None
        except Violation:
            # No answer any more; or what a restarted server says to the middle of a write, and that
            # is judged below.
            self.scope.http.drop()

    def _store(self, key: str) -> None:
        exists, index = self.scope.reserve([key])[0]
        if index >= 0 and not exists:
            self.scope.confirm([(key, index)])
            self.acknowledged[key] = index

    def check_survivors(self, scope: SglangScope) -> None:
        """Compare what was acknowledged with what is there."""
        for key, index in zip(self.keys, scope.indices(self.keys, rule="MD-DUR-1"), strict=True):
            # The request without an answer may have taken effect or not; both are right.
            if key != self.unsure and index != self.acknowledged.get(key):
                told = self.acknowledged.get(key)
                raise Violation(
                    "MD-DUR-1",
                    f"a key that was {'deleted' if told is None else f'confirmed in {told}'} "
                    f"before kill -9 is at {index} after it",
                )
