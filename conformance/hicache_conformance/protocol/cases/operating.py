"""Requests of operators."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import expect
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import (
    Commit,
    CommitScope,
    Describe,
    Drain,
    Draining,
    Drop,
    Dropped,
    Fsck,
    FsckReport,
    Lookup,
    LookupScope,
    Reserve,
    ReserveScope,
    SlotState,
)

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext
    from hicache_conformance.protocol.v2_client import V2Scope

SAMPLE: Final = re.compile(r"[a-zA-Z_:][\w:]*(\{.*\})? [-+0-9.eEinfNa]+( \d+)?")


class OperatingCases:
    """`scopes`, `describe`, `inspect`, `fsck`, `drain`, `drop`, health and metrics."""

    @covers("MD-OPS-1", needs=[Need.NATIVE])
    def test_scopes_are_listed(self, context: ServerContext) -> None:
        """The list tells the scope's geometry, and how many slots are in each state.

        They add up.
        """
        slots = context.number(8, 20)
        scope, keys = context.v2_scope(slots), context.keys(6)
        scope.store(keys[:4])
        scope.reserve(keys[4:], lease_seconds=20.0)
        scope.delete(keys[:1])
        status, geometry = scope.status(), scope.geometry
        if any(
            getattr(status, name) != getattr(geometry, name)
            for name in ("slots", "slot_bytes", "geometry", "identity")
        ):
            raise Violation("MD-OPS-1", f"a scope of {geometry} is listed as {status}")
        if status.free + status.leased + status.live + status.quarantined != slots or (
            status.leased,
            status.live,
        ) != (2, 3):
            raise Violation(
                "MD-OPS-1",
                f"a scope of {slots} slots with 3 live and 2 leased is listed as {status}",
            )

    @covers("MD-OPS-1", needs=[Need.NATIVE])
    def test_the_name_of_a_model_is_listed(self, context: ServerContext) -> None:
        """With `describe`, the list has the last name of the model, also after a clear."""
        scope, other = context.v2_scope(4), context.v2_scope(4)
        for model in ("org/model", 'a "second" \\ näme', 'a "second" \\ näme'):
            reply = context.native.send("/v2/describe", Describe(scope=scope.name, model=model))
            if reply.status == 404:
                return
            expect(reply, "MD-OPS-1", 204, because="the model of a scope was named")
            scope.clear()
            if (found := scope.status().model) != model:
                raise Violation("MD-OPS-1", f"the model {model!r} is listed as {found!r}")
        if found := other.status().model:
            raise Violation("MD-OPS-1", f"a model that was not named is listed as {found!r}")

    @covers("MD-OPS-2", needs=[Need.NATIVE])
    def test_inspecting(self, context: ServerContext) -> None:
        """A live, a leased, a free and an unknown one, by slot and by key."""
        scope, keys = context.v2_scope(8), context.keys(3)
        page = scope.store(keys[:1])[0]
        leased = scope.reserve(keys[1:2], [keys[0]], lease_seconds=20.0)
        free = next(slot for slot in range(8) if slot not in (page.slot, leased.slots[0]))
        by_slot = scope.inspect(slots=[page.slot, leased.slots[0], free])
        by_key = scope.inspect(keys=keys)
        live, held, unused = by_slot
        if by_key[2] is not None or by_key[0] != live:
            raise Violation("MD-OPS-2", f"inspect by key answers {by_key}, by slot {by_slot}")
        if live is None or (live.state, live.key, live.generation, live.length, live.checksum) != (
            SlotState.LIVE,
            page.key,
            page.generation,
            page.length,
            page.checksum,
        ):
            raise Violation("MD-OPS-2", f"{page} is inspected as {live}")
        if held is None or (held.state, held.key, held.owner, held.generation) != (
            SlotState.LEASED,
            keys[1],
            "conformance",
            leased.generations[0],
        ):
            raise Violation(
                "MD-OPS-2",
                f"a slot that 'conformance' has leased for {keys[1][:8]}... is inspected as {held}",
            )
        if unused is None or unused.state is not SlotState.FREE or unused.key:
            raise Violation("MD-OPS-2", f"a slot that was never used is inspected as {unused}")

    @covers("MD-OPS-3", needs=[Need.NATIVE])
    def test_fsck(self, context: ServerContext) -> None:
        """After a history of everything fsck looks at every slot and finds nothing wrong."""
        scope = context.v2_scope(12)
        for _ in range(10):
            keys = context.keys(3)
            answer = scope.reserve(keys, lease_seconds=20.0)
            leases = [lease for lease in answer.leases if lease]
            scope.commit(leases[:2])
            scope.abort(leases[2:])
            scope.delete(keys[:1])
        checked = context.native.call("/v2/fsck", Fsck(scopes=[scope.name]), FsckReport)
        if checked.problems or checked.slots != 12:
            raise Violation("MD-OPS-3", f"fsck of a scope of 12 slots answers {checked}")

    @covers("MD-OPS-4", needs=[Need.NATIVE])
    def test_draining(self, context: ServerContext) -> None:
        """While it drains, leases that are out can be committed and pages be found.

        No new leases are given.
        """
        scope, keys = context.v2_scope(8), context.keys(3)
        page = scope.store(keys[:1])[0]
        lease = scope.reserve(keys[1:2], lease_seconds=20.0).leases[0]
        try:
            drained = context.native.call("/v2/drain", Drain(enabled=True), Draining)
            if not drained.enabled or drained.leases < 1:
                raise Violation("MD-OPS-4", f"with a lease out, drain answers {drained}")
            reply = context.native.send(
                "/v2/reserve", Reserve(scopes=[ReserveScope(scope=scope.name, keys=keys[2:])])
            )
            expect(reply, "MD-OPS-4", 503, because="a reserve while the server drains")
            expect(context.http.get("/readyz"), "MD-OPS-5", 503, because="while the server drains")
            part = CommitScope(scope=scope.name, leases=[lease], lengths=[1], checksums=[1])
            expect(
                context.native.send("/v2/commit", Commit(scopes=[part])),
                "MD-OPS-4",
                200,
                because="a commit while the server drains",
            )
            if scope.lookup(keys[:1]).slots != [page.slot] or scope.live(keys[1:2]) != [True]:
                raise Violation(
                    "MD-OPS-4",
                    "while the server drains, a page is not found or a lease that was out cannot "
                    "be committed",
                )
        finally:
            context.native.call("/v2/drain", Drain(enabled=False), Draining)
        if scope.reserve(keys[2:]).leases == [0]:
            raise Violation("MD-OPS-4", "after a drain was ended there are still no leases")

    @covers("MD-OPS-5", needs=[Need.NATIVE])
    def test_health_and_metrics(self, context: ServerContext) -> None:
        """Health and readiness answer 200, metrics are lines that Prometheus reads."""
        context.v2_scope(4)
        for path in ("/healthz", "/readyz"):
            expect(context.http.get(path), "MD-OPS-5", 200)
        reply = expect(context.http.get("/metrics"), "MD-OPS-5", 200)
        lines = [
            line
            for line in reply.body.decode("utf-8", "replace").splitlines()
            if line and not line.startswith("#")
        ]
        wrong = next((line for line in lines if not SAMPLE.fullmatch(line)), None)
        if (
            wrong is not None
            or not lines
            or reply.content_type not in ("text/plain", "application/openmetrics-text")
        ):
            raise Violation(
                "MD-OPS-5",
                f"/metrics is {reply.content_type} with {len(lines)} samples; not one of "
                f"Prometheus': {wrong!r}",
            )

    @covers("MD-OPS-6", needs=[Need.NATIVE])
    def test_scopes_in_use_are_not_dropped(self, context: ServerContext) -> None:
        """A live, a leased and a quarantined slot each keep their scope.

        And with it those that are named beside it.
        """
        empty, live, leased = (context.v2_scope(4) for _ in range(3))
        live.store(context.keys(1))
        leases = leased.reserve(context.keys(1), lease_seconds=20.0).leases
        for state, scope in (("live", live), ("leased", leased)):
            self._stays(context, f"with a slot that is {state}", empty, scope)
            self._stays(context, f"with a slot that is {state}", scope)
        quarantine, begin = context.server_info.limits.quarantine_seconds, time.monotonic()
        leased.abort(leases)
        reply = context.native.send("/v2/drop", Drop(scopes=[leased.name]))
        if time.monotonic() - begin < quarantine:
            expect(
                reply, "MD-OPS-6", 409, because=f"a drop within the quarantine of {quarantine:g} s"
            )

    @covers("MD-OPS-6", needs=[Need.NATIVE])
    def test_scopes_that_give_no_slot_yet_are_not_dropped(self, context: ServerContext) -> None:
        """Else whoever makes it anew would open it while leases of an earlier server last."""
        scope = context.v2_scope(4, earlier_lease_seconds=20.0)
        # A server that serves for long knows that they are over.
        if scope.status().quarantined == scope.slots:
            self._stays(
                context, "with slots that are quarantined for leases of an earlier server", scope
            )

    @covers("MD-OPS-6", needs=[Need.NATIVE])
    def test_dropped_scopes_are_made_anew(self, context: ServerContext) -> None:
        """Two scopes that are empty go together.

        One of another size under the name has no page, and refuses the leases of the first.
        """
        scope, other, keys = context.v2_scope(6), context.v2_scope(3), context.keys(4)
        limit = context.rest_seconds
        pages = scope.store(keys)
        scope.clear()
        dropped = list[list[int]]()

        def is_gone() -> bool:
            reply = context.native.send("/v2/drop", Drop(scopes=[scope.name, other.name]))
            if (
                expect(
                    reply, "MD-OPS-6", 200, 409, because="a drop of scopes that were cleared"
                ).status
                == 200
            ):
                dropped.append(context.native.understood(reply, Dropped).slots)
            return bool(dropped)

        context.eventually(
            "MD-OPS-6",
            lambda: "scopes that were cleared are not dropped after their quarantine",
            is_gone,
            limit,
        )
        if dropped != [[6, 3]]:
            raise Violation("MD-OPS-6", f"a drop of scopes of 6 and 3 slots answers {dropped[0]}")
        lookup = Lookup(scopes=[LookupScope(scope=scope.name, keys=keys)])
        expect(
            context.native.send("/v2/lookup", lookup),
            "MD-OPS-6",
            404,
            because="a lookup in a scope that was dropped",
        )
        scope.slots = 4
        if not scope.initialize():
            raise Violation("MD-OPS-6", "a scope that was dropped is not made anew")
        if any(scope.live(keys)) or scope.status().free != 4:
            raise Violation(
                "MD-OPS-6",
                f"a scope that was dropped and made anew with 4 slots is listed as {scope.status()}",
            )
        again = scope.reserve(context.keys(4), lease_seconds=20.0)
        most = max(page.lease for page in pages)
        if (
            min(again.leases) <= 0
            or set(again.leases) & {page.lease for page in pages}
            or any(scope.commit([most]))
        ):
            raise Violation(
                "MD-OPS-6",
                f"leases up to {most} were given before the scope was dropped, and then "
                f"{again.leases}",
            )

    def _stays(self, context: ServerContext, because: str, *scopes: V2Scope) -> None:
        reply = context.native.send("/v2/drop", Drop(scopes=[scope.name for scope in scopes]))
        expect(reply, "MD-OPS-6", 409, because=f"a drop of a scope {because}")
        lookup = Lookup(
            scopes=[LookupScope(scope=scope.name, keys=context.keys(1)) for scope in scopes]
        )
        expect(
            context.native.send("/v2/lookup", lookup),
            "MD-OPS-6",
            200,
            because="a lookup after a drop that was refused",
        )
