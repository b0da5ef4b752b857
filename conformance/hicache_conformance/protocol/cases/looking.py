"""Lookups, and deletion by generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.rules import Need
from hicache_metadata_server.protocol import NO_SLOT

if TYPE_CHECKING:
    from hicache_conformance.protocol.context import ServerContext


class LookingCases:
    """`lookup` and `delete`."""

    @covers("MD-LOOK-1", needs=[Need.NATIVE])
    def test_lookups_give_back_what_was_committed(self, context: ServerContext) -> None:
        """Slot, generation, length and checksum of stored keys, -1 and zeros for others.

        In any order and twice.
        """
        scope, missing = context.v2_scope(40), context.keys(5)
        pages = {page.key: page for page in scope.store(context.keys(10))}
        for _ in range(5):
            asked = context.chance.choices([*pages, *missing], k=context.number(1, 20))
            found = scope.lookup(asked)
            rows = zip(
                asked, found.slots, found.generations, found.lengths, found.checksums, strict=True
            )
            for key, *row in rows:
                page = pages.get(key)
                wanted = (
                    [page.slot, page.generation, page.length, page.checksum]
                    if page
                    else [NO_SLOT, 0, 0, 0]
                )
                if row != wanted:
                    raise Violation(
                        "MD-LOOK-1",
                        f"key {key[:8]}... is looked up as {row} (slot, generation, length, "
                        f"checksum), not {wanted}",
                    )

    @covers("MD-LOOK-1", needs=[Need.NATIVE])
    def test_extreme_values(self, context: ServerContext) -> None:
        """Checksums of 0 and 2**64-1 and lengths of 1 and the whole slot come back."""
        scope, keys = context.v2_scope(8), context.keys(4)
        lengths, checksums = [1, scope.slot_bytes, 1, scope.slot_bytes], [0, 0, 2**64 - 1, 2**63]
        scope.commit(scope.reserve(keys).leases, lengths, checksums)
        found = scope.lookup(keys)
        if (found.lengths, found.checksums) != (lengths, checksums):
            raise Violation(
                "MD-LOOK-1",
                f"committed were {lengths} and {checksums}; looked up are {found.lengths} and "
                f"{found.checksums}",
            )

    @covers("MD-DEL-3", needs=[Need.NATIVE])
    def test_deleting_by_generation(self, context: ServerContext) -> None:
        """A page of another generation stays, one of this generation goes.

        Without generations all go.
        """
        scope, keys = context.v2_scope(16), context.keys(6)
        pages = scope.store(keys)
        meant = [page.generation if i % 2 else page.generation + 1 for i, page in enumerate(pages)]
        done = scope.delete(keys, meant)
        wanted = [bool(i % 2) for i in range(6)]
        if done != wanted or scope.live(keys) != [not gone for gone in wanted]:
            raise Violation(
                "MD-DEL-3",
                f"delete by generation answers {done} and leaves {scope.live(keys)}; expected to "
                f"delete {wanted}",
            )
        if scope.delete(keys) != [not gone for gone in wanted] or any(scope.live(keys)):
            raise Violation("MD-DEL-3", f"a delete without generations leaves {scope.live(keys)}")
