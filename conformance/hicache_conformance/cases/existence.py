"""Existence and hit policies: every presence map of small chains, asked of the driver itself."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from hicache_conformance.fixtures.context import NO_LAYERS, CaseContext
from hicache_conformance.harness.oracle import PoolQuery, check_exists
from hicache_conformance.harness.pools import GuardedPool, kv_and_state
from hicache_conformance.harness.storage_under_test import (
    PageGroup,
    StorageUnderTest,
    all_pages,
    block_groups,
    trailing,
)
from hicache_conformance.model.case import check, covers
from hicache_conformance.model.rules import Level
from hicache_storage.spec import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.interfaces.interface import InterfaceProfile

SIDE, OTHER = "mamba", "indexer"
_STORED_AT_ONCE = 32


class ExistenceCases:
    """EX-1 to EX-8, and EX-11."""

    @covers("EX-1", "EX-2", "EX-5", "EX-6")
    def test_kv_prefixes(self, context: CaseContext) -> None:
        """Every presence map of up to 6 KV pages."""
        library = _Library(context, [PoolName.KV], length=6)
        for length in range(1, 7):
            for pattern in product(range(2), repeat=length):
                library.ask(pattern, [])

    @covers("EX-1", "EX-2", "EX-3", "EX-4", "EX-5", "EX-6")
    def test_one_side_pool(self, context: CaseContext) -> None:
        """Every presence map of 4 pages in KV and one side pool, each under several policies."""
        library = _Library(context, [PoolName.KV, SIDE], length=4)
        policies = _policies(SIDE, windows=(0, 1, 2, 3, 5), groups=((1, 0), (2, 0), (2, 1), (3, 2)))
        count = min(context.profile.policies, len(policies))
        for pattern in product(range(4), repeat=4):
            for transfer in context.random.sample(policies, count):
                library.ask(pattern, [transfer])

    @covers("EX-1", "EX-2", "EX-3", "EX-4", "EX-5", "EX-6", levels=Level.POOLS)
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
        """Pools whose own greatest endpoints are legal for no other pool."""
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
            check(
                hit == wanted,
                "EX-1",
                f"kv has 7 pages, {SIDE} is there after 2, 6 and 8 pages, {OTHER} has 5: with "
                f"{' and '.join(transfer.name for transfer in transfers)} kv_hit_pages is "
                f"{hit}, must be {wanted}",
            )

    @covers("EX-1", "EX-5", "EX-6")
    def test_the_form_of_a_hit(self, context: CaseContext) -> None:
        """Numbers and lists of an answer, which does not change with later calls."""
        # Without the layers, whose counters add up numbers of any type.
        sut, keys = context.storage(pools=kv_and_state(), options=NO_LAYERS), context.keys(4)
        for pool in sut.memories:
            sut.store(keys[:3], pool)
        for chain in (keys, keys[3:]):
            answer = sut.exists(chain, all_pages(SIDE))
            _check_form(answer, context.interface_profile)
            before = (list(answer.restorable_prefix_pages), dict(answer.extra_pool_hit_pages))
            sut.exists(keys[:2])
            sut.exists(context.keys(1))
            after = (answer.restorable_prefix_pages, answer.extra_pool_hit_pages)
            check(
                after == before,
                "EX-5",
                f"an answer changed with later calls: endpoints and pools' verdicts were {before}, "
                f"and are {after}",
            )

    @covers("EX-1", "EX-2", "EX-3", "EX-5")
    def test_chains_longer_than_a_request(self, context: CaseContext) -> None:
        """A chain of 300 pages, of which a side pool lacks some, with windows of up to 150 pages."""
        pools = {pool: GuardedPool(pages=320, components=(32,)) for pool in (PoolName.KV, SIDE)}
        sut, keys = context.storage(pools=pools), context.keys(300)
        there = [place not in (20, 100, 220, 299) for place in range(300)]
        sut.store(keys)
        sut.store([key for key, ok in zip(keys, there, strict=True) if ok], SIDE)
        verdicts = context.interface_profile.is_native
        check_exists(sut.exists(keys), [True] * 300, verdicts=verdicts)
        for transfer in (all_pages(SIDE), *(trailing(SIDE, window) for window in (1, 9, 150))):
            asked = [PoolQuery(transfer, there)]
            check_exists(sut.exists(keys, transfer), [True] * 300, asked, verdicts=verdicts)

    @covers("EX-7", "EX-6", levels=[Level.CORE, Level.POOLS])
    def test_unknown_pool(self, context: CaseContext) -> None:
        """A pool that nobody registered, KV among them, alone and beside others."""
        both, keys = context.stored(3, pools=kv_and_state())
        alone = context.storage(pools={SIDE: GuardedPool(page_size=1)})
        both.store(keys[:2], SIDE)
        alone.store(keys, SIDE)
        unknown = "never_registered"
        for sut, transfers, wanted in (
            (both, [all_pages(unknown)], {"kv": 3, unknown: 0}),
            (both, [trailing(unknown, 2)], {"kv": 3, unknown: 0}),
            (both, [all_pages(unknown), all_pages(SIDE)], {"kv": 3, SIDE: 2, unknown: 0}),
            (alone, [], {"kv": 0}),
            (alone, [all_pages(SIDE)], {"kv": 0, SIDE: 3}),
        ):
            answer = sut.exists(keys, *transfers)
            told = dict(answer.extra_pool_hit_pages)
            check(
                not answer.kv_hit_pages and not answer.restorable_prefix_pages,
                "EX-7",
                f"beside an unregistered pool the hit is {answer.kv_hit_pages}, must be 0",
            )
            check(
                told == wanted,
                "EX-6",
                f"beside an unregistered pool the pools' verdicts are {told}, must be {wanted}",
            )

    @covers("EX-7", levels=[Level.CORE, Level.POOLS])
    def test_a_pool_that_was_asked_for_before(self, context: CaseContext) -> None:
        """A pool that an exists named before it was registered is known afterwards."""
        sut, keys = context.stored(3)
        sut.exists(keys, all_pages(SIDE))
        later = context.with_pool(sut, SIDE, GuardedPool(page_size=1))
        later.store(keys, SIDE)
        hit = later.exists(keys, all_pages(SIDE)).kv_hit_pages
        check(
            hit == 3,
            "EX-7",
            f"pool {SIDE!r} was registered after an exists had named it, and has 3 pages; "
            f"kv_hit_pages is {hit}",
        )

    @covers("EX-8", levels=[Level.CORE, Level.POOLS])
    def test_an_empty_chain(self, context: CaseContext) -> None:
        """An empty chain is a hit of 0 pages, with side pools or without, also after a hit."""
        sut, keys = context.stored(2, pools=kv_and_state())
        sut.exists(keys)
        for transfers in ([], [all_pages(SIDE)], [trailing(SIDE, 2)], [block_groups(SIDE, 2, 1)]):
            answer = sut.exists([], *transfers)
            check(
                answer.kv_hit_pages == 0 and answer.restorable_prefix_pages == [],
                "EX-8",
                f"no keys gave {answer}",
            )

    @covers("EX-8", "EX-2", levels=[Level.CORE, Level.POOLS])
    def test_keys_that_stand_twice(self, context: CaseContext) -> None:
        """A chain may name a page twice, and the stored pages in any order, or in part."""
        sut, keys = context.stored(6)
        missing = context.keys(1)
        for chain, wanted in (
            ([keys[0], keys[0]], 2),
            ([keys[0], keys[1], keys[0]], 3),
            ([keys[0], missing[0], keys[0]], 1),
            (missing * 2, 0),
            # A driver that looks up a chain by its last key alone answers wrong.
            (keys[::-1], 6),
            (keys[3:], 3),
            (keys[:4] + missing + keys[4:], 4),
        ):
            hit = sut.exists(chain).kv_hit_pages
            check(
                hit == wanted,
                "EX-8" if len(set(chain)) < len(chain) else "EX-2",
                f"{wanted} leading pages of a chain are stored; kv_hit_pages is {hit}",
            )

    @covers("EX-2", "EX-11")
    def test_keys_in_a_tuple(self, context: CaseContext) -> None:
        """Keys are a sequence: a tuple of them is looked up, set and read as a list is."""
        sut, keys = context.storage(), tuple(context.keys(4))
        check(sut.present(keys) == [False] * 4, "EX-11", "pages that were never set are present")
        [transfer] = sut.transfers([PageGroup(keys)], [sut.own_pages(keys)])
        transfer.keys = keys
        sut.fill(PageGroup(keys), sut.own_pages(keys))
        for name, move in (
            ("batch_set_v2", sut.storage.batch_set_v2),
            ("batch_get_v2", sut.storage.batch_get_v2),
        ):
            answer = sut.call(name, partial(move, [transfer]))
            check(answer == {PoolName.KV: [True] * 4}, "EX-11", f"{name} of a tuple: {answer}")
        sut.expect_existing(keys, rule="EX-2")
        check(sut.present(keys) == [True] * 4, "EX-11", "pages that were set are not present")

    @covers("EX-11")
    def test_presence_of_each_key(self, context: CaseContext) -> None:
        """Holes and repeated keys in any order; pages that are set and removed then."""
        sut, keys = context.storage(), context.keys(12)
        stored = context.random.sample(keys, 5)
        _check_presence(sut, keys, [])
        sut.store(stored)
        for asked in (
            keys,
            keys[::-1],
            context.random.sample(keys, 12),
            [*stored[:2], *keys[:3], stored[0]],
            *([key] for key in keys[:4]),
            [],
        ):
            _check_presence(sut, asked, stored)
        if sut.storage.capabilities.deletes:
            sut.delete(stored[1:3])
            _check_presence(sut, keys, [stored[0], *stored[3:]])
        if sut.storage.capabilities.clears and not sut.clear():
            _check_presence(sut, keys, [])

    @covers("EX-11", levels=[Level.CORE, Level.POOLS])
    def test_presence_in_each_pool(self, context: CaseContext) -> None:
        """A side pool has pages of its own, with KV or without; an unknown pool has none."""
        sut, keys = context.storage(pools=kv_and_state()), context.keys(6)
        sut.store(keys[:3])
        sut.store(keys[2:5], SIDE)
        for _ in range(2):
            _check_presence(sut, keys, keys[:3])
            _check_presence(sut, keys, keys[2:5], SIDE)
            _check_presence(sut, keys, [], "never_registered")


def _check_presence(
    sut: StorageUnderTest, keys: Sequence[str], stored: Sequence[str], pool: str = PoolName.KV
) -> None:
    wanted = [key in stored for key in keys]
    found = sut.present(keys, pool)
    check(
        found == wanted,
        "EX-11",
        f"batch_present of {len(keys)} keys in {pool!r} is {found}, must be {wanted}",
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
                if self._profile.setup.keeps_bytes:
                    self._sut.expect(keys, pool)

    def ask(self, patterns: Sequence[int], transfers: Sequence[PoolTransfer]) -> None:
        """Ask for the chain that has these patterns, and check the answer."""
        if not self._profile.is_native:
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
        check_exists(answer, present[PoolName.KV], asked, verdicts=self._profile.is_native)

    def answer(
        self, patterns: Sequence[int], transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        """Ask for the chain that has these patterns."""
        return self._sut.exists(
            [self._keys[place][pattern] for place, pattern in enumerate(patterns)], *transfers
        )


def _check_form(answer: PoolTransferResult, profile: InterfaceProfile) -> None:
    """Check the types in an answer."""
    hit: object = answer.kv_hit_pages
    check(type(hit) is int, "EX-1", f"kv_hit_pages is {hit!r}, must be of type int")
    endpoints: object = answer.restorable_prefix_pages
    check(
        type(endpoints) is list and not any(type(end) is not int for end in endpoints),
        "EX-5",
        f"restorable_prefix_pages is {endpoints!r:.200}, must be a list of int",
    )
    verdicts: object = answer.extra_pool_hit_pages
    check(
        not profile.is_native
        or (
            isinstance(verdicts, dict)
            and not any(type(pages) is not int for pages in verdicts.values())
        ),
        "EX-6",
        f"extra_pool_hit_pages is {verdicts!r:.200}, must be a dict with values of int",
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
