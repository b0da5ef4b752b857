"""The native part as a whole.

The server's self-description, message types, several scopes in a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import expect, refused
from hicache_conformance.protocol.rules import Need
from hicache_conformance.protocol.v2_client import V2Client, V2Scope
from hicache_metadata_server.protocol import (
    MSGPACK,
    PROTOCOL,
    About,
    Commit,
    CommitScope,
    Initialize,
    Initialized,
    Leases,
    LookedUp,
    Lookup,
    LookupScope,
    Reserve,
    ReserveScope,
    SettledLeases,
)

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext


class DocumentCases:
    """Documents in and out."""

    @covers("MD-API-2", needs=[Need.NATIVE])
    def test_the_server_introduces_itself(self, context: ServerContext) -> None:
        """GET /v2 tells protocol, name, instance and limits, the same twice."""
        one, two = context.native.call("/v2", None, About), context.native.call("/v2", None, About)
        if one.protocol != PROTOCOL or not one.server or not one.instance or one != two:
            raise Violation("MD-API-2", f"GET /v2 answers {one}, then {two}")
        limits = one.limits
        if not limits.min_lease_seconds <= limits.lease_seconds <= limits.max_lease_seconds:
            raise Violation(
                "MD-API-2",
                f"a lease lasts {limits.lease_seconds} s by default, which is not within the "
                f"limits {limits}",
            )
        # What ID-5 promises to engines.
        if limits.key_bytes < 512:
            raise Violation("MD-API-2", f"keys of {limits.key_bytes} bytes only; 512 is the least")

    @covers("MD-API-2", needs=[Need.NATIVE])
    def test_the_instance_changes_with_a_start(self, context: ServerContext) -> None:
        """After a restart GET /v2 names another instance."""
        before = context.native.call("/v2", None, About).instance
        context.restart()
        if context.native.call("/v2", None, About).instance == before:
            raise Violation(
                "MD-API-2",
                f"the server was killed and started again, and is still instance {before!r}",
            )

    @covers("MD-API-1", needs=[Need.NATIVE])
    def test_msgpack_says_the_same(self, context: ServerContext) -> None:
        """Pages written by JSON are found by msgpack, and the other way round.

        64-bit checksums included.
        """
        scope = context.v2_scope(16)
        packed = V2Scope(
            V2Client(context.http, MSGPACK),
            scope.name,
            scope.slots,
            scope.slot_bytes,
            context.chance,
        )
        if packed.initialize():
            raise Violation(
                "MD-API-1", "a scope that was made by JSON is new when it is initialized by msgpack"
            )
        keys = context.keys(8)
        pages = [*scope.store(keys[:4]), *packed.store(keys[4:])]
        by_json, by_msgpack = scope.lookup(keys), packed.lookup(keys)
        if by_json != by_msgpack or by_json.checksums != [page.checksum for page in pages]:
            raise Violation(
                "MD-API-1",
                f"lookup by JSON answers {by_json}, by msgpack {by_msgpack}; stored were {pages}",
            )
        refusal = packed.client.send(
            "/v2/lookup", Lookup(scopes=[LookupScope(scope="0:unknown-to-all", keys=keys)])
        )
        if refusal.status != 404 or refusal.content_type != MSGPACK:
            raise Violation(
                "MD-API-1",
                f"a refusal of a msgpack request: {refusal.status} {refusal.content_type}; "
                f"expected 404 {MSGPACK}",
            )

    @covers("MD-API-3", needs=[Need.NATIVE])
    def test_several_scopes_in_a_call(self, context: ServerContext) -> None:
        """Reserve, commit and lookup of three scopes in one call each, the same keys in all."""
        scopes, keys = [context.v2_scope(context.number(8, 16)) for _ in range(3)], context.keys(5)
        request = Reserve(
            scopes=[ReserveScope(scope=scope.name, keys=keys[i:]) for i, scope in enumerate(scopes)]
        )
        leases = context.native.call("/v2/reserve", request, Leases).scopes
        commit = Commit(
            scopes=[
                CommitScope(
                    scope=scope.name,
                    leases=part.leases,
                    lengths=[10 + i] * (5 - i),
                    checksums=[i] * (5 - i),
                )
                for i, (scope, part) in enumerate(zip(scopes, leases, strict=True))
            ]
        )
        context.native.call("/v2/commit", commit, SettledLeases)
        asked = Lookup(scopes=[LookupScope(scope=scope.name, keys=keys) for scope in scopes])
        found = context.native.call("/v2/lookup", asked, LookedUp).scopes
        for i, (scope, part) in enumerate(zip(scopes, found, strict=True)):
            if (
                part.lengths != [0] * i + [10 + i] * (5 - i)
                or part != scope.lookup(keys)
                or part.slots[i:] != leases[i].slots
            ):
                raise Violation(
                    "MD-API-3",
                    f"scope {i} of a lookup of three answers {part}; alone it answers "
                    f"{scope.lookup(keys)}",
                )

    @covers("MD-API-3", needs=[Need.NATIVE])
    def test_one_unknown_scope_among_several(self, context: ServerContext) -> None:
        """A call with an unknown scope is refused by its place, and does nothing in the others."""
        scope, keys = context.v2_scope(8), context.keys(3)
        request = Reserve(
            scopes=[
                # The known scope stands first, so that a server which begins before it has checked
                # all has leased something.
                ReserveScope(scope=name, keys=keys)
                for name in (scope.name, context.unused_scope().name)
            ]
        )
        reply = context.native.send("/v2/reserve", request)
        expect(reply, "MD-API-3", 404, because="a reserve in a known and an unknown scope")
        refused(reply, "MD-API-3", "an unknown scope", names="scopes[1]")
        if (left := scope.status().leased) != 0:
            raise Violation(
                "MD-API-3",
                f"a reserve was refused because of another scope, and {left} slots of this one are "
                f"leased",
            )

    @covers("MD-API-4", needs=[Need.NATIVE])
    def test_both_parts_see_one_state(self, context: ServerContext) -> None:
        """Pages written by one part are found by the other, and leases of one bind the other."""
        scope, compatible, keys = context.v2_scope(16), context.unused_scope(), context.keys(6)
        rank, _, namespace = scope.name.partition(":")
        compatible = type(compatible)(context.http, int(rank), namespace)
        compatible.initialize(16)
        native = [page.slot for page in scope.store(keys[:3])]
        other = compatible.store(keys[3:], rule="MD-API-4")
        if compatible.indices(keys) != [*native, *other]:
            raise Violation(
                "MD-API-4",
                f"{[*native, *other]} was stored; get_page_indices answers "
                f"{compatible.indices(keys)}",
            )
        found = scope.lookup(keys)
        if (
            found.slots != [*native, *other]
            or found.lengths[3:] != [0, 0, 0]
            or 0 in found.generations
        ):
            raise Violation(
                "MD-API-4",
                f"{[*native, *other]} was stored, the last three by the compatible part; lookup "
                f"answers {found}",
            )
        with context.while_held():
            key = context.keys(1)[0]
            compatible.reserve([key])
            # Busy, and not `exists`: the page is not written yet, and a reader must not be sent
            # there.
            if (state := scope.reserve([key]).states[0]) != "busy":
                raise Violation(
                    "MD-API-4",
                    f"a key that the compatible part has reserved is {state} to the native part",
                )

    @covers("MD-GEO-1", needs=[Need.NATIVE])
    def test_another_geometry_is_refused(self, context: ServerContext) -> None:
        """Other slots, slot bytes, geometry or identity are refused by name.

        The call's new scope is not made.
        """
        import msgspec

        scope, keys = context.v2_scope(16), context.keys(3)
        pages, right = scope.store(keys), scope.geometry
        for field, value in {
            "slots": 17,
            "slot_bytes": 8192,
            "geometry": "layer_first",
            "identity": "cf-other",
        }.items():
            fresh = context.unused_scope().name
            wrong = msgspec.structs.replace(right, **{field: value})
            reply = context.native.send(
                "/v2/initialize",
                # The new scope comes first: a server that works through the list has made it when
                # it meets the wrong one.
                Initialize(scopes=[msgspec.structs.replace(right, scope=fresh), wrong]),
            )
            expect(
                reply,
                "MD-GEO-1",
                409,
                because=f"a scope with {field} {getattr(right, field)!r} is initialized with "
                f"{value!r}",
            )
            refused(reply, "MD-GEO-1", f"{field} {value!r}", names=f"scopes[1].{field}")
            reply = context.native.send(
                "/v2/lookup", Lookup(scopes=[LookupScope(scope=fresh, keys=keys)])
            )
            expect(
                reply,
                "MD-GEO-1",
                404,
                because="the call that would have made this scope was refused",
            )
        if context.native.call(
            "/v2/initialize", Initialize(scopes=[right]), Initialized
        ).created != [False]:
            raise Violation("MD-GEO-1", "a scope that exists is new when it is initialized again")
        if scope.lookup(keys).slots != [page.slot for page in pages]:
            raise Violation(
                "MD-GEO-1", "pages moved when the scope was initialized with other values"
            )
