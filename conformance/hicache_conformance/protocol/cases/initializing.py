"""Scopes: creation and isolation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import expect, refused
from hicache_conformance.protocol.sglang_client import SglangScope

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext

BAD_SIZES: Final[tuple[Any, ...]] = (-1, 0, "16", 1.5, None, [16], True)


class InitializingCases:
    """`initialize`, and the names of scopes."""

    @covers("MD-INIT-1")
    def test_a_new_scope_has_all_its_slots(self, context: ServerContext) -> None:
        """A new scope gives each of its slots to one key."""
        pages = context.number(3, 40)
        with context.while_held():
            slots = [index for _, index in context.scope(pages).reserve(context.keys(pages))]
            if sorted(slots) != list(range(pages)):
                raise Violation(
                    "MD-INIT-1",
                    f"{pages} keys reserved in a new scope of {pages} slots get the slots "
                    f"{sorted(slots)}",
                )

    @covers("MD-INIT-1")
    def test_initializing_again_changes_nothing(self, context: ServerContext) -> None:
        """Keys keep their slots when another engine initializes the scope with the same number."""
        scope, keys = context.scope(16), context.keys(5)
        slots = scope.store(keys)
        scope.initialize(16)
        if (now := scope.indices(keys)) != slots:
            raise Violation(
                "MD-INIT-1",
                f"slots {slots} became {now} when the scope was initialized again with the same "
                f"number",
            )

    @covers("MD-INIT-2")
    def test_another_size_is_refused(self, context: ServerContext) -> None:
        """Another number of slots is refused with 409, and keys keep their slots."""
        scope, keys = context.scope(16), context.keys(5)
        slots = scope.store(keys)
        # One more, one less, and a number of another magnitude: a server may compare digits, or
        # refuse only what shrinks.
        for pages in (17, 15, context.number(100, 10**6)):
            reply = scope.post("initialize", num_pages=pages)
            expect(
                reply, "MD-INIT-2", 409, because=f"a scope of 16 slots is initialized with {pages}"
            )
            refused(reply, "MD-INIT-2", f"{pages} slots for a scope of 16", names="num_pages")
        if (now := scope.indices(keys)) != slots:
            raise Violation(
                "MD-INIT-2",
                f"slots {slots} became {now} when the scope was initialized with other numbers",
            )

    @covers("MD-INIT-3", levels=[Level.FAULTS])
    def test_a_bad_size_is_refused(self, context: ServerContext) -> None:
        """Sizes that are no positive integer are refused, and leave no scope behind."""
        for size in BAD_SIZES:
            scope = context.unused_scope()
            refused(
                scope.post("initialize", num_pages=size),
                "MD-INIT-3",
                f"num_pages {size!r}",
                names="num_pages",
            )
            # Refused and made all the same would show here: an unknown scope is answered with 404.
            expect(
                scope.post("exists", keys=context.keys(1)),
                "MD-INIT-3",
                404,
                because=f"after num_pages {size!r} was refused",
            )

    @covers("MD-SCOPE-1")
    def test_scopes_do_not_show_in_each_other(self, context: ServerContext) -> None:
        """The same keys in another rank, or another namespace, are other keys.

        Deleting and clearing there leaves these alone.
        """
        scope, keys = context.scope(8), context.keys(4)
        other_rank = SglangScope(context.http, scope.rank + 1, scope.namespace)
        other_space = SglangScope(context.http, scope.rank, f"{scope.namespace}-mamba")
        slots = scope.store(keys)
        for other in (other_rank, other_space):
            other.initialize(8)
            if any(other.exists(keys)):
                raise Violation(
                    "MD-SCOPE-1", f"keys stored in {scope.name} are there in {other.name}"
                )
            other.store(keys)
            # Deleting and clearing under the same keys: a server that keys its maps by the key
            # alone loses the first scope's pages.
            other.delete(keys[:2])
            other.clear()
            if (now := scope.indices(keys)) != slots:
                raise Violation(
                    "MD-SCOPE-1",
                    f"slots {slots} of {scope.name} became {now} by deleting and clearing in "
                    f"{other.name}",
                )

    @covers("MD-SCOPE-1")
    def test_the_namespace_is_kv_where_none_is_named(self, context: ServerContext) -> None:
        """A body without a namespace means `kv`."""
        # A rank that nobody uses, since the namespace has to be `kv` itself here and the server may
        # be in use.
        rank = context.number(10**5, 10**8)
        kv = SglangScope(context.http, rank, "kv")
        expect(context.http.post(f"/{rank}/initialize", {"num_pages": 8}), "MD-SCOPE-1", 204)
        keys = context.keys(3)
        slots = kv.store(keys, rule="MD-SCOPE-1")
        reply = context.http.post(f"/{rank}/get_page_indices", {"keys": keys})
        if (
            reply.status != 200
            or SglangScope(context.http, rank, "kv").indices(keys) != slots
            or f"{slots[0]}" not in str(reply)
        ):
            raise Violation(
                "MD-SCOPE-1",
                f"keys stored in namespace 'kv' are not found without a namespace: {reply}",
            )
        kv.clear()

    @covers("MD-SCOPE-2")
    def test_an_unknown_scope_is_not_found(self, context: ServerContext) -> None:
        """Every call but initialize answers 404 for an unknown scope, and does not make it."""
        scope, keys = context.unused_scope(), context.keys(2)
        bodies: dict[str, dict[str, Any]] = {
            "exists": {"keys": keys},
            "get_page_indices": {"keys": keys},
            "reserve_and_allocate_page_indices": {"keys": [[key, ""] for key in keys]},
            "confirm_write": {"written_keys_to_confirm": [[keys[0], 0]], "pages_to_release": []},
            "delete_keys": {"keys": keys},
            "clear": {},
        }
        # Each operation twice, because a server may make the scope on the first call and find it on
        # the second.
        for operation, body in [*bodies.items(), *bodies.items()]:
            expect(
                scope.post(operation, **body),
                "MD-SCOPE-2",
                404,
                because=f"{operation} on a scope that nobody has initialized",
            )
