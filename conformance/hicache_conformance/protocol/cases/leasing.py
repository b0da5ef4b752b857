"""Leases: given, committed, renewed, aborted, left to end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Inconclusive, Violation
from hicache_conformance.protocol.context import SLACK_SECONDS
from hicache_conformance.protocol.rules import Need
from hicache_conformance.protocol.v2_client import V2Client, V2Scope
from hicache_metadata_server.protocol import Reserved

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext


class LeasingCases:
    """`reserve`, `commit`, `renew`, `abort`."""

    @covers("MD-LEASE-1", needs=[Need.NATIVE])
    def test_what_reserve_says_of_each_key(self, context: ServerContext) -> None:
        """Stored keys exist, keys twice in a batch are busy, new ones are leased.

        Until there is no room: then they are full.
        """
        slots = context.number(6, 12)
        scope, stored, new = context.v2_scope(slots), context.keys(2), context.keys(slots)
        pages = scope.store(stored)
        # Pinned, so that nothing is evicted for those who find no room.
        scope.pinned_lookup(stored, 20.0)
        asked = [stored[0], new[0], new[0], *new[1:], stored[1]]
        answer = scope.reserve(asked, lease_seconds=20.0)
        room = slots - 2
        wanted = [
            "exists",
            "leased",
            "busy",
            *["leased"] * (room - 1),
            *["full"] * (slots - room),
            "exists",
        ]
        if list(map(str, answer.states)) != wanted:
            raise Violation(
                "MD-LEASE-1", f"reserve answers {list(map(str, answer.states))}; expected {wanted}"
            )
        if [answer.slots[0], answer.slots[-1]] != [page.slot for page in pages]:
            raise Violation(
                "MD-LEASE-1",
                f"keys that exist in {[page.slot for page in pages]} are told to be in "
                f"{answer.slots[:: len(asked) - 1]}",
            )
        leased = [
            (s, lease)
            for state, s, lease in zip(answer.states, answer.slots, answer.leases, strict=True)
            if state is Reserved.LEASED
        ]
        given = {s for s, _ in leased}
        if (
            len(given) != room
            or given & {page.slot for page in pages}
            or not given < set(range(slots))
        ):
            raise Violation(
                "MD-LEASE-1",
                f"slots {sorted(given)} of {slots} are leased while "
                f"{[page.slot for page in pages]} are live",
            )
        if len({lease for _, lease in leased}) != room or 0 in {lease for _, lease in leased}:
            raise Violation(
                "MD-LEASE-1",
                f"leases {[lease for _, lease in leased]} are not all different and positive",
            )

    @covers("MD-LEASE-1", levels=[Level.CORE, Level.SHARED], needs=[Need.NATIVE])
    def test_the_second_writer_is_told(self, context: ServerContext) -> None:
        """A key that one client has leased is busy to another, and exists once it is committed."""
        scope, keys = context.v2_scope(8), context.keys(3)
        leases = scope.reserve(keys, lease_seconds=20.0).leases
        client = V2Client(context.client())
        other = V2Scope(client, scope.name, scope.slots, scope.slot_bytes, context.chance)
        for state, when in ((Reserved.BUSY, "leased"), (Reserved.EXISTS, "committed")):
            found = other.reserve(keys).states
            if any(told is not state for told in found):
                raise Violation(
                    "MD-LEASE-1",
                    f"keys that another client has {when} are {list(map(str, found))}; expected "
                    f"{state}",
                )
            scope.commit(leases)

    @covers("MD-LEASE-2", needs=[Need.NATIVE])
    def test_stale_leases(self, context: ServerContext) -> None:
        """Leases that were aborted, cleared or never given commit nothing.

        A held one in the same call does.
        """
        scope, keys = context.v2_scope(32), context.keys(6)
        aborted, held, invented, cleared = (
            scope.reserve(keys[i : i + 1], lease_seconds=20.0).leases[0] for i in range(4)
        )
        scope.abort([aborted, invented])
        done = scope.commit([aborted, held, invented + 10**9])
        if done != [False, True, False] or scope.live(keys[:3]) != [False, True, False]:
            raise Violation(
                "MD-LEASE-2",
                f"commit of an aborted, a held and an unknown lease: done {done}, live "
                f"{scope.live(keys[:3])}",
            )
        scope.clear()
        if scope.commit([cleared]) != [False] or any(scope.live(keys)):
            raise Violation(
                "MD-LEASE-2", "a lease was committed that had been given before a clear"
            )

    @covers("MD-LEASE-2", needs=[Need.NATIVE])
    def test_committing_again(self, context: ServerContext) -> None:
        """A repeated commit is done while the page is live, and changes nothing.

        With other values, or when the page is gone, it is stale.
        """
        scope, keys = context.v2_scope(8), context.keys(2)
        page = scope.store(keys[:1])[0]
        if scope.commit([page.lease], [page.length], [page.checksum]) != [True]:
            raise Violation(
                "MD-LEASE-2", "a commit that is repeated while its page is live is stale"
            )
        if scope.commit([page.lease], [page.length], [page.checksum ^ 1]) != [False]:
            raise Violation("MD-LEASE-2", "a lease is committed again with another checksum")
        if scope.lookup(keys[:1]).checksums != [page.checksum]:
            raise Violation("MD-LEASE-2", "a repeated commit changes the checksum of a live page")
        scope.delete(keys[:1])
        if scope.commit([page.lease], [page.length], [page.checksum]) != [False] or any(
            scope.live(keys)
        ):
            raise Violation(
                "MD-LEASE-2", "a commit that is repeated after its page was deleted brings it back"
            )

    @covers("MD-LEASE-3", "MD-LEASE-2", needs=[Need.NATIVE])
    def test_a_lease_ends(self, context: ServerContext) -> None:
        """Until its end a lease keeps its key busy.

        Then it is stale, and key and slot can be leased again.
        """
        seconds = max(0.6, context.server_info.limits.min_lease_seconds)
        context.can_wait(seconds, "the shortest lease")
        slots = context.number(3, 6)
        scope, keys = context.v2_scope(slots), context.keys(slots)
        begin = time.monotonic()
        first = scope.reserve(keys, lease_seconds=seconds)
        states = scope.reserve(keys).states
        early = time.monotonic() - begin < seconds
        if early and any(state is not Reserved.BUSY for state in states):
            raise Violation(
                "MD-LEASE-3",
                f"leases of {seconds:g} s end before their time: their keys are "
                f"{list(map(str, states))}",
            )
        time.sleep(max(0.0, begin + seconds + SLACK_SECONDS - time.monotonic()))
        if any(scope.commit(first.leases)) or any(scope.live(keys)):
            raise Violation(
                "MD-LEASE-3",
                f"leases of {seconds:g} s are committed {time.monotonic() - begin:.1f} s after "
                f"they were given",
            )
        again = context.lease_soon(scope, keys, "MD-LEASE-3", f"{slots} leases have ended")
        if set(again) & set(first.leases):
            raise Violation(
                "MD-LEASE-3",
                f"leases {sorted(set(again) & set(first.leases))} are given a second time",
            )

    @covers("MD-LEASE-4", needs=[Need.NATIVE])
    def test_renewing(self, context: ServerContext) -> None:
        """A renewed lease can be committed after its first end.

        One that was not renewed in time cannot be renewed any more.
        """
        seconds = max(0.6, context.server_info.limits.min_lease_seconds)
        context.can_wait(seconds, "the shortest lease")
        scope, keys = context.v2_scope(8), context.keys(2)
        begin = time.monotonic()
        kept, left = scope.reserve(keys, lease_seconds=seconds).leases
        renewed = scope.renew([kept], 20.0)
        if time.monotonic() - begin > seconds:
            raise Inconclusive(f"it took longer than {seconds:g} s to renew a lease")
        if renewed != [True]:
            raise Violation("MD-LEASE-4", "a lease that is held cannot be renewed")
        time.sleep(max(0.0, begin + seconds + SLACK_SECONDS - time.monotonic()))
        if scope.renew([left], 20.0) != [False]:
            raise Violation("MD-LEASE-4", "a lease that has ended is renewed")
        if scope.commit([left, kept]) != [False, True]:
            raise Violation(
                "MD-LEASE-4",
                "of a lease that ended and one that was renewed, not just the second can be "
                "committed",
            )

    @covers("MD-LEASE-5", needs=[Need.NATIVE])
    def test_aborting(self, context: ServerContext) -> None:
        """After an abort the key is leased anew, in another slot or after the quarantine.

        A second abort is stale.
        """
        scope, keys = context.v2_scope(8), context.keys(3)
        leases = scope.reserve(keys, lease_seconds=20.0).leases
        if scope.abort(leases) != [True] * 3 or scope.abort(leases) != [False] * 3:
            raise Violation("MD-LEASE-5", "an abort is not done once and stale the second time")
        context.lease_soon(scope, keys, "MD-LEASE-5", "three leases were aborted")

    @covers("MD-GEN-1", needs=[Need.NATIVE])
    def test_generations_grow(self, context: ServerContext) -> None:
        """A slot's generation grows with each lease, however the last lease ended."""
        context.can_wait(3 * context.rest_seconds, "three times the quarantine")
        slots = 4
        scope, last = context.v2_scope(slots), dict[int, int]()
        for _ in range(3):
            keys = context.keys(slots)
            leases = context.lease_soon(scope, keys, "MD-GEN-1", "all slots were let go")
            for status in filter(None, scope.inspect(keys)):
                if status.generation <= last.get(status.slot, 0):
                    raise Violation(
                        "MD-GEN-1",
                        f"slot {status.slot} is leased as generation {status.generation} after "
                        f"{last[status.slot]}",
                    )
                last[status.slot] = status.generation
            if context.chance.random() < 0.5:
                scope.commit(leases)
                scope.delete(keys)
            else:
                scope.abort(leases)
