"""clear(): removes what its own namespaces hold, and nothing of others."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hicache_conformance.cases.writing import expect_content, store_content
from hicache_conformance.harness.pools import kv_and_state
from hicache_conformance.harness.storage_under_test import check_each
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import check
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_conformance.fixtures.context import CaseContext

IDENTITY = [Level.IDENTITY]
LATE_SECONDS: Final = 0.1
"""How long late effects of a clear are waited for."""


class ClearingCases:
    """LC-4."""

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_clear_removes_its_own(self, context: CaseContext) -> None:
        """Every page of every registered pool is gone, and can be set anew.

        A clear of nothing is one, too. One that has returned removes nothing any more.
        """
        sut, keys = context.storage(pools=kv_and_state()), context.keys(6)
        for _ in range(2):
            sut.call("clear", sut.storage.clear)
        for pool in sut.memories:
            sut.store(keys, pool)
        sut.call("clear", sut.storage.clear)
        for pool in sut.memories:
            sut.expect_missing(keys, pool, rule="LC-4", why="was cleared")
            # Other bytes under the same keys: a clear that hides pages and keeps them would deliver
            # the old ones here.
            sut.store(keys, pool, generation=1)
        time.sleep(LATE_SECONDS)
        for pool in sut.memories:
            gone = f"of pool {pool!r} was set after a clear had returned, and is gone"
            check_each(keys, sut.get(keys, pool), "LC-4", gone)
            sut.expect(keys, pool, generation=1)

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_clear_removes_what_was_read(self, context: CaseContext) -> None:
        """Pages that were looked up and read are gone too, and so they are the second time."""
        sut, keys = context.storage(pools=kv_and_state()), context.keys(4)
        for generation in range(2):
            for pool in sut.memories:
                sut.store(keys, pool, generation=generation)
                if context.interface_profile.setup.clears_at_once:
                    for key in keys:
                        sut.has(key, pool)
                    sut.expect(keys, pool, generation=generation)
            sut.call("clear", sut.storage.clear)
            for pool in sut.memories:
                sut.expect_missing(
                    keys, pool, rule="LC-4", why=f"was cleared by clear {generation} of 2"
                )

    @covers("LC-4", levels=IDENTITY, needs=["clears", "sharing>=process"])
    def test_clear_reaches_other_storages(self, context: CaseContext) -> None:
        """Pages that another storage of equal identity has read are gone for it too."""
        one, keys = context.storage(pools=kv_and_state()), context.keys(4)
        two = context.storage(replace(one.identity), pools=kv_and_state())
        for pool in one.memories:
            one.store(keys, pool)
            if context.interface_profile.setup.clears_at_once:
                two.expect(keys, pool)
                for key in keys:
                    two.has(key, pool)
        one.call("clear", one.storage.clear)
        for pool in two.memories:
            two.expect_missing(keys, pool, rule="LC-4", why="was cleared by another storage")

    @covers("LC-4", levels=IDENTITY, needs=["clears", "durability>=reopen"])
    def test_cleared_pages_stay_gone(self, context: CaseContext) -> None:
        """A storage that is opened when all others are closed finds no page that was cleared."""
        one, keys = context.storage(), context.keys(4)
        one.store(keys)
        one.call("clear", one.storage.clear)
        one.call("close", one.storage.close)
        two = context.storage(replace(one.identity))
        two.expect_missing(keys, rule="LC-4", why="was cleared before the store was reopened")

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_clear_leaves_pages_of_equal_bytes(self, context: CaseContext) -> None:
        """Another model has stored the same bytes under the same key."""
        own = context.storage()
        other = context.storage(replace(own.identity, model="conformance/model2"))
        key, words = context.keys(1)[0], "another model's page, of equal bytes,"
        content = context.random.randbytes(own.memories[PoolName.KV].page_bytes)
        for sut in (own, other):
            store_content(sut, key, content, words)
        own.call("clear", own.storage.clear)
        expect_content(other, key, content, words, rule="LC-4")

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_clear_leaves_others_alone(self, context: CaseContext) -> None:
        """Other models, tenants, ranks and salts keep their pages."""
        own, keys = (
            context.storage(context.identity(tp_size=2), pools=kv_and_state()),
            context.keys(4),
        )
        changes: list[dict[str, object]] = [
            {"model": "conformance/model2"},
            # A prefix of the cleared model's name. A driver that clears by the beginning of a name
            # takes this one along, or is cleared by it.
            {"model": "conformance"},
            {"tenant": "other"},
            {"tp_rank": 1},
            {"salt": "other"},
            {"kv_dtype": "float16"},
            {"revision": "2"},
        ]
        changes = [change for change in changes if context.interface_profile.distinguishes(change)]
        others = [
            context.storage(
                replace(own.identity, **change),  # type: ignore[arg-type]
                pools=kv_and_state(),
            )
            for change in changes
        ]
        for sut in (own, *others):
            for pool in sut.memories:
                sut.store(keys, pool)
        own.call("clear", own.storage.clear)
        for change, other in zip(changes, others, strict=True):
            for pool in other.memories:
                taken = f"of pool {pool!r} belongs to {change}; another's clear removed it"
                check_each(keys, other.get(keys, pool), "LC-4", taken)

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_a_clear_without_pools(self, context: CaseContext) -> None:
        """A storage of another model that has no pools has nothing to clear."""
        sut, keys = context.storage(), context.keys(3)
        sut.store(keys)
        other = context.storage(replace(sut.identity, model="conformance/model2"), pools={})
        other.call("clear", other.storage.clear)
        taken = "was removed by another's clear, which has no pools and is of another model"
        check_each(keys, sut.get(keys), "LC-4", taken)

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_clear_leaves_strangers_files_alone(self, context: CaseContext) -> None:
        """Files that somebody else put beside the store's own are still there."""
        sut, keys = context.storage(), context.keys(2)
        sut.store(keys)
        strangers = [_stranger(directory) for directory in _directories(context)]
        sut.call("clear", sut.storage.clear)
        for path in strangers:
            check(
                path.exists(),
                "LC-4",
                f"clear removed {path.name}, which no driver has written, from {path.parent.name}/",
            )
            # The sandbox is shared by all cases of the class, and the file would be in the way of
            # others.
            path.unlink()


def _directories(context: CaseContext) -> list[Path]:
    """The directory given to the driver, and those that its options name in there."""
    named = [
        context.tmp / value
        for value in context.config.values()
        if isinstance(value, str) and value.startswith(str(context.tmp))
    ]
    return [directory for directory in dict.fromkeys([context.tmp, *named]) if directory.is_dir()]


def _stranger(directory: Path) -> Path:
    path = directory / "a file of somebody else"
    path.write_bytes(b"not a page")
    return path
