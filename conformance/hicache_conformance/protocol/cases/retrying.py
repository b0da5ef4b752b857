"""Requests that are sent again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import expect, refused
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import (
    Clear,
    Delete,
    DeleteScope,
    Marked,
    Reserve,
    ReserveScope,
)

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext


class RetryingCases:
    """Idempotency keys."""

    @covers("MD-IDEM-1", needs=[Need.NATIVE])
    def test_a_reserve_sent_again(self, context: ServerContext) -> None:
        """The second time the same leases are answered, and no more slots are leased.

        Also to another connection.
        """
        scope, keys, once = context.v2_scope(8), context.keys(3), context.keys(1)[0]
        first = scope.reserve(keys, lease_seconds=20.0, once=once)
        context.http.drop()
        again = scope.reserve(keys, lease_seconds=20.0, once=once)
        if again != first:
            raise Violation(
                "MD-IDEM-1",
                f"a reserve answers {first}; sent again with its idempotency key it answers {again}",
            )
        if (leased := scope.status().leased) != 3:
            raise Violation(
                "MD-IDEM-1", f"a reserve of 3 keys that was sent twice has leased {leased} slots"
            )
        other = scope.reserve(context.keys(1), lease_seconds=20.0, once=context.keys(1)[0])
        if set(other.leases) & set(first.leases) or 0 in other.leases:
            raise Violation(
                "MD-IDEM-1", f"another reserve with another idempotency key answers {other}"
            )

    @covers("MD-IDEM-1", needs=[Need.NATIVE])
    def test_a_delete_sent_again(self, context: ServerContext) -> None:
        """A delete that is sent again tells what the first one did.

        It spares a page that was stored in between.
        """
        scope, keys, once = context.v2_scope(8), context.keys(2), context.keys(1)[0]
        scope.store(keys[:1])
        request = Delete(scopes=[DeleteScope(scope=scope.name, keys=keys)])
        first = context.native.call("/v2/delete", request, Marked, once=once)
        scope.store(keys)
        again = context.native.call("/v2/delete", request, Marked, once=once)
        if again != first or scope.live(keys) != [True, True]:
            raise Violation(
                "MD-IDEM-1",
                f"a delete answers {first}, sent again {again}; pages stored in between: "
                f"{scope.live(keys)}",
            )

    @covers("MD-IDEM-1", needs=[Need.NATIVE])
    def test_an_idempotency_key_for_another_request(self, context: ServerContext) -> None:
        """An idempotency key with another body or route is refused with 422, and does nothing."""
        scope, keys, once = context.v2_scope(8), context.keys(3), context.keys(1)[0]
        scope.store(keys[:1])
        scope.reserve(keys[1:2], once=once)
        for path, request in (
            ("/v2/reserve", Reserve(scopes=[ReserveScope(scope=scope.name, keys=keys[2:])])),
            ("/v2/clear", Clear(scopes=[scope.name])),
        ):
            reply = context.native.send(path, request, once=once)
            expect(reply, "MD-IDEM-1", 422, because="an idempotency key comes with another request")
            refused(reply, "MD-IDEM-1", "an idempotency key with another request")
        if scope.live(keys[:1]) != [True]:
            raise Violation("MD-IDEM-1", "a clear was refused for its idempotency key, and done")
