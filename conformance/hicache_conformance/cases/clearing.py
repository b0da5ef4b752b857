"""clear() removes what its own namespaces hold, and nothing of anybody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.pools import PoolMemory

IDENTITY = [Level.IDENTITY]


class ClearingCases:
    """LC-4."""

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_clear_removes_its_own(self, lab: Lab) -> None:
        """Every page of every registered pool is gone, and can be set anew."""
        subject, keys = lab.storage(pools=_pools()), lab.keys(6)
        for pool in subject.memories:
            subject.store(keys, pool)
        subject.call("clear", subject.storage.clear)
        for pool in subject.memories:
            subject.expect_missing(keys, pool, rule="LC-4", why="was cleared")
            subject.store(keys, pool, generation=1)
            subject.expect(keys, pool, generation=1)

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_clear_leaves_others_alone(self, lab: Lab) -> None:
        """Other models, tenants, ranks and salts keep their pages."""
        own, keys = lab.storage(lab.identity(tp_size=2), pools=_pools()), lab.keys(4)
        changes: list[dict[str, object]] = [
            {"model": "conformance/model2"}, {"model": "conformance"}, {"tenant": "other"}, {"tp_rank": 1}, {"salt": "other"},
            {"kv_dtype": "float16"}, {"revision": "2"},
        ]  # fmt: skip
        changes = [change for change in changes if lab.dialect.tells(change)]
        others = [lab.storage(replace(own.identity, **change), pools=_pools()) for change in changes]  # type: ignore[arg-type]
        for subject in (own, *others):
            for pool in subject.memories:
                subject.store(keys, pool)
        own.call("clear", own.storage.clear)
        for change, other in zip(changes, others, strict=True):
            for pool in other.memories:
                for index, content in enumerate(other.get(keys, pool)):
                    if content is None:
                        raise Violation(
                            "LC-4",
                            f"page {index} key {short(keys[index])} of pool {pool!r} belongs to {change}; another's clear removed it",
                        )

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_clear_leaves_strangers_files_alone(self, lab: Lab) -> None:
        """Files that somebody else put beside the store's own are still there."""
        subject, keys = lab.storage(), lab.keys(2)
        subject.store(keys)
        strangers = [_stranger(directory) for directory in _directories(lab)]
        subject.call("clear", subject.storage.clear)
        for path in strangers:
            if not path.exists():
                raise Violation("LC-4", f"clear removed {path.name}, which no driver has written, from {path.parent.name}/")
            path.unlink()

    @covers("LC-4", levels=IDENTITY, needs=["clears"])
    def test_an_empty_namespace_can_be_cleared(self, lab: Lab) -> None:
        """clear() of what holds nothing, twice, and before anything was set."""
        subject, keys = lab.storage(), lab.keys(2)
        for _ in range(2):
            subject.call("clear", subject.storage.clear)
        subject.store(keys)
        subject.expect(keys)


def _pools() -> dict[str, PoolMemory]:
    return {PoolName.KV: GuardedPool(), PoolName.MAMBA: GuardedPool(page_size=1, components=(80, 24))}


def _directories(lab: Lab) -> list[Path]:
    """The directory given to the driver, and those that its options name in there."""
    named = [lab.tmp / value for value in lab.config.values() if isinstance(value, str) and value.startswith(str(lab.tmp))]
    return [directory for directory in dict.fromkeys([lab.tmp, *named]) if directory.is_dir()]


def _stranger(directory: Path) -> Path:
    path = directory / "a file of somebody else"
    path.write_bytes(b"not a page")
    return path
