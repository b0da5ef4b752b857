"""Existence and hit policies: every presence map of small chains, asked of the driver itself."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from hicache_conformance.harness.oracle import PoolQuery, check
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.harness.storage_under_test import (
    StorageUnderTest,
    all_pages,
    block_groups,
    trailing,
)
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_storage.spec import PoolHitPolicy, PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_storage.spec import PoolTransfer, PoolTransferResult

SIDE, OTHER = "mamba", "indexer"
_STORED_AT_ONCE = 32


class ExistenceCases:
    """EX-1 to EX-8."""

    @covers("EX-1", "EX-2", "EX-5", "EX-6")
    def test_kv_prefixes(self, context: CaseContext) -> None:
        """Every presence map of up to 6 KV pages."""
        library = _Library(context, [PoolName.KV], length=6)
        for length in range(1, 7):
            for pattern in product(range(2), repeat=length):
                library.ask(pattern, [])

    @covers("EX-1", "EX-2", "EX-3", "EX-4", "EX-5", "EX-6")
    def test_one_side_pool(self, context: CaseContext) -> None:
        """Every presence map of 4 pages in KV and one side pool, under each policy."""
        library = _Library(context, [PoolName.KV, SIDE], length=4)
        for pattern in product(range(4), repeat=4):
            for transfer in _policies(
                SIDE, windows=(0, 1, 2, 3, 5), groups=((1, 0), (2, 0), (2, 1), (3, 2))
            ):
                library.ask(pattern, [transfer])

    @covers("EX-1", "EX-2", "EX-3", "EX-4", "EX-5", "EX-6", levels=[Level.POOLS])
    def test_two_side_pools(self, context: CaseContext) -> None:
        """Every presence map of 3 pages in KV and two side pools, under each pair of policies."""
        library = _Library(context, [PoolName.KV, SIDE, OTHER], length=3)
        pairs = list(
            product(
                _policies(SIDE, windows=(1, 2), groups=((2, 1),)),
                _policies(OTHER, windows=(1, 2), groups=((2, 1),)),
            )
        )
        for pattern in product(range(8), repeat=3):
            for pair in pairs:
                library.ask(pattern, pair)

    @covers("EX-1", "EX-2", "EX-3", "EX-4", "EX-5", "EX-6", levels=[Level.POOLS])
    def test_long_chains(self, context: CaseContext) -> None:
        """Random chains of up to 16 pages over three side pools with random windows and groups."""
        side = [SIDE, OTHER, "swa"]
        library = _Library(context, [PoolName.KV, *side], length=16)
        for _ in range(context.profile.chains):
            # Mostly present, so that prefixes are long enough to tell policies apart.
            pattern = [
                context.random.choice([15, 15, 15, context.random.randrange(16)])
                for _ in range(context.random.randint(1, 16))
            ]
            asked = context.random.sample(side, context.random.randint(1, len(side)))
            library.ask(
                pattern, [context.random.choice(_random_policies(context, pool)) for pool in asked]
            )

    @covers("EX-1", levels=[Level.CORE, Level.POOLS])
    def test_the_greatest_common_endpoint(self, context: CaseContext) -> None:
        """The hit is the greatest common endpoint.

        Here each pool's own greatest one is legal for no other.
        """
        library = _Library(context, [PoolName.KV, SIDE, OTHER], length=8)
        kv, state, index = 1, 2, 4
        # KV ends after 7 pages, the index after 5; a state was kept after 2, 6 and 8.
        # The minimum of the pools' own endpoints is 5 with the index, where no state was kept; the
        # answer of EX-1 is 2.
        pages = [
            kv | index,
            kv | index | state,
            kv | index,
            kv | index,
            kv | index,
            kv | state,
            kv,
            state,
        ]
        for transfers, wanted in (
            ([trailing(SIDE, 1)], 6),
            ([trailing(SIDE, 1), all_pages(OTHER)], 2),
        ):
            hit = library.answer(pages, transfers).kv_hit_pages
            if hit != wanted:
                raise Violation(
                    "EX-1",
                    f"kv has 7 pages, {SIDE} is there after 2, 6 and 8 pages, {OTHER} has 5: with "
                    f"{' and '.join(transfer.name for transfer in transfers)} kv_hit_pages is "
                    f"{hit}, must be {wanted}",
                )

    @covers("EX-7", levels=[Level.CORE, Level.POOLS])
    def test_unknown_pool(self, context: CaseContext) -> None:
        """A pool that nobody registered makes the hit 0, and its verdict is 0."""
        sut, keys = context.storage(), context.keys(3)
        sut.store(keys)
        for transfer in (all_pages("never_registered"), trailing("never_registered", 2)):
            answer = sut.exists(keys, transfer)
            if answer.kv_hit_pages or answer.restorable_prefix_pages:
                raise Violation(
                    "EX-7",
                    f"with an unregistered pool ({transfer.hit_policy}) the hit is "
                    f"{answer.kv_hit_pages}, must be 0",
                )
            if answer.extra_pool_hit_pages.get(PoolName("never_registered")) != 0:
                raise Violation(
                    "EX-7",
                    f"the unregistered pool is not reported as 0: "
                    f"{dict(answer.extra_pool_hit_pages)}",
                )

    @covers("EX-8", levels=[Level.CORE, Level.POOLS])
    def test_no_keys(self, context: CaseContext) -> None:
        """An empty chain is a hit of 0 pages, with side pools or without."""
        sut = context.storage(pools={PoolName.KV: GuardedPool(), SIDE: GuardedPool(page_size=1)})
        for transfers in ([], [all_pages(SIDE)], [trailing(SIDE, 2)], [block_groups(SIDE, 2, 1)]):
            answer = sut.exists([], *transfers)
            if answer.kv_hit_pages != 0 or answer.restorable_prefix_pages != []:
                raise Violation("EX-8", f"no keys gave {answer}")

    @covers("EX-8", levels=[Level.CORE, Level.POOLS])
    def test_keys_that_stand_twice(self, context: CaseContext) -> None:
        """A chain may name a page twice."""
        sut = context.storage()
        stored, missing = context.keys(2), context.keys(1)
        sut.store(stored)
        for chain in (
            [stored[0], stored[0]],
            [stored[0], stored[1], stored[0]],
            [stored[0], missing[0], stored[0]],
            missing * 2,
        ):
            hit, wanted = sut.exists(chain).kv_hit_pages, _leading(chain, stored)
            if hit != wanted:
                raise Violation(
                    "EX-8",
                    f"a chain with a repeated key has {wanted} leading pages; kv_hit_pages is {hit}",
                )

    @covers("EX-2", levels=[Level.CORE])
    def test_existence_is_of_the_chain_asked(self, context: CaseContext) -> None:
        """The same stored pages in another order, behind a missing page, or in part."""
        sut, keys, missing = context.storage(), context.keys(8), context.keys(1)
        sut.store(keys)
        for chain, wanted in (
            # Reversed, it has the same set of keys: a driver that looks up a chain by its last key
            # only answers wrong.
            (keys[::-1], 8),
            (keys[3:], 5),
            (missing + keys, 0),
            (keys[:4] + missing + keys[4:], 4),
        ):
            hit = sut.exists(chain).kv_hit_pages
            if hit != wanted:
                raise Violation(
                    "EX-2", f"{wanted} leading pages of the chain are stored; kv_hit_pages is {hit}"
                )


class _Library:
    """Pages stored in every combination of pools.

    Any presence map is a choice of keys, and needs no new set.

    Bit b of a pattern says whether the page is in pool b.
    """

    def __init__(self, context: CaseContext, pools: Sequence[str], length: int) -> None:
        self._pools = list(pools)
        self._profile = context.interface_profile
        self._sut: StorageUnderTest = context.storage(
            pools={pool: GuardedPool(components=(48,)) for pool in pools}
        )
        self._keys = [
            context.keys(1 << len(pools), prefix=f"at{place}-") for place in range(length)
        ]
        for bit, pool in enumerate(pools):
            present = [
                key for row in self._keys for pattern, key in enumerate(row) if pattern >> bit & 1
            ]
            # In batches, because the host pool is smaller than the library of pages.
            for start in range(0, len(present), _STORED_AT_ONCE):
                keys = present[start : start + _STORED_AT_ONCE]
                self._sut.store(keys, pool)
                if self._profile.keeps_bytes:
                    self._sut.expect(keys, pool)

    def ask(self, patterns: Sequence[int], transfers: Sequence[PoolTransfer]) -> None:
        """Ask for the chain that has these patterns, and check the answer."""
        if not self._profile.block_groups:
            transfers = [
                transfer
                for transfer in transfers
                if transfer.hit_policy is not PoolHitPolicy.BLOCK_GROUPS
            ]
        present = {
            pool: [bool(pattern >> bit & 1) for pattern in patterns]
            for bit, pool in enumerate(self._pools)
        }
        answer = self.answer(patterns, transfers)
        asked = [PoolQuery(transfer, present[transfer.name]) for transfer in transfers]
        check(answer, present[PoolName.KV], asked, verdicts=self._profile.pool_verdicts)

    def answer(
        self, patterns: Sequence[int], transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        """Ask for the chain that has these patterns."""
        return self._sut.exists(
            [self._keys[place][pattern] for place, pattern in enumerate(patterns)], *transfers
        )


def _policies(
    pool: str, windows: Sequence[int], groups: Sequence[tuple[int, int]]
) -> list[PoolTransfer]:
    return [
        all_pages(pool),
        *(trailing(pool, window) for window in windows),
        *(block_groups(pool, block, group) for block, group in groups),
    ]


def _random_policies(context: CaseContext, pool: str) -> list[PoolTransfer]:
    block = context.random.randint(1, 5)
    return _policies(
        pool,
        windows=[context.random.randint(1, 8)],
        groups=[(block, context.random.randint(0, block))],
    )


def _leading(chain: Sequence[str], stored: Sequence[str]) -> int:
    return next((index for index, key in enumerate(chain) if key not in stored), len(chain))
