"""Writing: the meaning of True, and pages that a set must not touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.storage_under_test import PageGroup
from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext


class WritingCases:
    """SET-1, SET-3, SET-6 and SET-7."""

    @covers("SET-1", "GET-1")
    def test_stored_pages_stay(self, context: CaseContext) -> None:
        """Pages are there right after the set, and still after many other sets and gets."""
        sut, first = context.storage(), context.keys(16)
        sut.store(first)
        for _ in range(10):
            others = context.keys(16)
            sut.store(others)
            sut.expect(others)
        sut.expect(first)
        for key in first:
            if not sut.has(key):
                raise Violation(
                    "SET-1",
                    f"key {short(key)} was stored and can be read, and exists says that it is not "
                    f"there",
                )

    @covers("SET-1", needs=["deletes"])
    def test_deleted_pages_are_gone(self, context: CaseContext) -> None:
        """delete() removes what it is told, and makes room for other bytes.

        It says where there was something.
        """
        sut, keys, missing = context.storage(), context.keys(6), context.keys(1)
        sut.store(keys)
        doomed = [keys[1], missing[0], keys[4]]
        removed = sut.call("delete", lambda: sut.storage.delete(doomed))
        if list(removed) != [True, False, True]:
            raise Violation(
                "SET-1", f"deleting a stored, a missing and a stored page answered {removed}"
            )
        sut.expect_missing([keys[1], keys[4]], rule="SET-1", why="was deleted")
        sut.expect([keys[0], keys[2], keys[3], keys[5]])
        sut.store([keys[1]], generation=1)
        sut.expect([keys[1]], generation=1)

    @covers("SET-3", "SET-1")
    def test_existing_pages_are_not_rewritten(self, context: CaseContext) -> None:
        """A second set of a key answers True, and the first bytes stay."""
        sut, keys = context.storage(), context.keys(6)
        sut.store(keys[:3])
        again = sut.set(keys, generation=1)
        for index, ok in enumerate(again):
            if not ok:
                rule = "SET-3" if index < 3 else "SET-6"
                raise Violation(
                    rule,
                    f"page {index} key {short(keys[index])} was answered with False in a batch of "
                    f"existing and new pages",
                )
        found = sut.get(keys)
        for index, content in enumerate(found[:3]):
            if (
                content is not None
                and sut.generation_of(keys[index], content, PoolName.KV, [1]) == 1
            ):
                raise Violation(
                    "SET-3",
                    f"page {index} key {short(keys[index])} existed, and a set wrote it anew",
                )
        sut.compare(keys[:3], found[:3], generation=0)
        sut.compare(keys[3:], found[3:], generation=1)

    @covers("SET-3")
    def test_a_key_that_stands_twice_in_a_set(self, context: CaseContext) -> None:
        """A key repeated in one set, in one transfer and in two, is stored once.

        Every place is answered with True.
        """
        sut, keys = context.storage(), context.keys(3)
        chain = [keys[0], keys[1], keys[0], keys[2], keys[0]]
        sut.store(chain)
        sut.expect(keys)
        more = context.keys(2)
        sut.store_many([PageGroup(more), PageGroup(more[::-1], generation=1)])
        for index, (key, content) in enumerate(zip(more, sut.get(more), strict=True)):
            if content is None or sut.generation_of(key, content, PoolName.KV, [0, 1]) is None:
                held = "is not there" if content is None else sut.explain(key, content)
                raise Violation(
                    "GET-1", f"page {index} key {short(key)}, set twice in one call, {held}"
                )

    @covers("SET-6")
    def test_each_page_is_answered_by_itself(self, context: CaseContext) -> None:
        """Batches of existing pages, repeated keys and new pages: all are stored.

        Each under its own key.
        """
        sut, stored = context.storage(), context.keys(8)
        sut.store(stored)
        for _ in range(10):
            new = context.keys(6)
            chain = context.random.sample(stored, 4) + new + context.random.sample(new, 2)
            context.random.shuffle(chain)
            for index, (key, ok) in enumerate(zip(chain, sut.set(chain), strict=True)):
                if not ok:
                    raise Violation(
                        "SET-6",
                        f"page {index} key {short(key)} of a batch of existing, repeated and new "
                        f"pages was refused",
                    )
            sut.expect(chain, rule="SET-6")

    @covers("SET-7")
    def test_host_pages_are_reused_at_once(self, context: CaseContext) -> None:
        """The source pages of each set are overwritten when it returns.

        They are the next set's source at once.
        """
        sut, batches = context.storage(), [context.keys(60) for _ in range(8)]
        for keys in batches:
            # 60 of 64 pages: every batch reuses the pages of the one before.
            sut.store(keys)
        for keys in batches:
            found = sut.get(keys)
            for index, (key, content) in enumerate(zip(keys, found, strict=True)):
                wrong = sut.explain(key, content) if content is not None else ""
                if wrong:
                    raise Violation("SET-7", f"page {index} key {short(key)} {wrong}")
            sut.compare(keys, found)
