"""Pages in shards of KV heads: what one TP size has stored is there for any other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from hicache_conformance.cases.budget import BATCH, check_calls
from hicache_conformance.harness.driver_calls import STEPS, counted, require_steps
from hicache_conformance.harness.pools import GuardedPool, HeadsPool, PoolMemory, short
from hicache_conformance.harness.storage_under_test import (
    PageGroup,
    StorageUnderTest,
    all_pages,
    trailing,
)
from hicache_conformance.model.case import check, covers
from hicache_conformance.model.rules import Level
from hicache_storage.spec import PoolName, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.fixtures.context import CaseContext

HEADS: Final = 8
"""KV heads of the model, and shards of its store."""
SIZES: Final = (1, 2, 4, 8)
SHARED: Final = ["head_shards", "sharing>=process"]
IDENTITY: Final = [Level.POOLS, Level.IDENTITY]


class ShardCases:
    """ID-7, ID-8, EX-12, GET-10 and SET-9."""

    @covers("ID-7", levels=IDENTITY, needs=SHARED)
    @pytest.mark.parametrize("layout", HeadsPool.LAYOUTS)
    def test_every_tp_size_reads_every_other(self, context: CaseContext, layout: str) -> None:
        """Pages set by the ranks of TP 1, 2, 4 and 8, each read by all of them."""
        model = _model(context, layout)
        sizes = {size: model.ranks(size) for size in SIZES}
        for ranks in sizes.values():
            keys = context.keys(3)
            for rank in ranks:
                rank.store(keys)
            for readers in sizes.values():
                for rank in readers:
                    rank.expect_own(keys, rule="ID-7")
                    rank.expect_existing(keys, rule="ID-7")

    @covers("ID-7", levels=IDENTITY, needs=["head_shards"])
    def test_stores_of_another_number_of_shards(self, context: CaseContext) -> None:
        """4 shards, 8 shards and none are three stores, also for a rank that holds all heads."""
        model = _model(context)
        stores = [model.ranks(1, store_tp_size=number)[0] for number in (8, 4, 0)]
        for writer in stores:
            keys = context.keys(3)
            writer.store(keys)
            writer.expect(keys)
            why = f"was set with store_tp_size={writer.identity.store_tp_size}"
            for reader in stores:
                if reader is not writer:
                    reader.expect_missing(keys, rule="ID-7", why=why)

    @covers("ID-7", levels=IDENTITY, needs=SHARED)
    def test_a_hit_needs_the_pools_of_every_kind(self, context: CaseContext) -> None:
        """KV in shards, an indexer for all ranks, and states bound to the rank."""
        model = _model(context, side_pools=_side_pools)
        replicated = {"tp_replicated_pools": frozenset({PoolName.INDEXER})}
        keys = context.keys(4)
        groups = [PageGroup(keys, pool) for pool in ("kv", PoolName.INDEXER, PoolName.MAMBA)]
        for rank in model.ranks(2, **replicated):
            rank.set_many(groups)
        windows = (all_pages(PoolName.INDEXER), trailing(PoolName.MAMBA, 1))
        for rank in model.ranks(2, **replicated):
            check(
                rank.exists(keys, *windows).kv_hit_pages == len(keys),
                "ID-7",
                f"{_name(rank)} has set pages of 3 pools, and has no hit",
            )
        for rank in model.ranks(4, **replicated):
            answer = rank.exists(keys, *windows)
            found = {str(pool): pages for pool, pages in answer.extra_pool_hit_pages.items()}
            check(
                not answer.kv_hit_pages and found == {"kv": 4, "indexer": 4, "mamba": 0},
                "ID-7",
                f"TP 2 has set 4 pages of kv, indexer and mamba; {_name(rank)} holds no state, "
                f"and finds kv_hit_pages={answer.kv_hit_pages} and {found}",
            )
            rank.expect_own(keys, rule="ID-7")
            rank.store(keys, PoolName.MAMBA)
            check(
                rank.exists(keys, *windows).kv_hit_pages == len(keys),
                "ID-7",
                f"{_name(rank)} has set its states, and has no hit",
            )

    @covers("ID-8", levels=IDENTITY, needs=SHARED)
    def test_replicated_heads_have_one_writer(self, context: CaseContext) -> None:
        """Two KV heads on eight ranks: ranks 0 and 4 write, the others answer what exists."""
        model = _model(context, heads=2)
        ranks, [whole], keys = model.ranks(8), model.ranks(1), context.keys(3)
        for rank in ranks:
            check(
                not (rank.identity.tp_rank % 4) or not any(rank.set(keys)),
                "ID-8",
                f"{_name(rank)} is not the first that holds its head, and its set writes",
            )
        for rank in (*ranks, whole):
            rank.expect_missing(keys, rule="ID-8", why="was set by ranks that are not the writer")
        for writer in (ranks[0], ranks[4]):
            check(
                all(writer.set(keys)),
                "ID-8",
                f"{_name(writer)} is the writer, and its set answers False",
            )
        for rank in ranks:
            rank.expect(keys, rule="ID-8")
            check(
                all(rank.set(keys)),
                "ID-8",
                f"{_name(rank)} sets pages that exist, and answers False",
            )
        whole.expect(keys, rule="ID-8")

    @covers("EX-12", "GET-10", levels=Level.POOLS, needs=SHARED)
    def test_a_hole_in_one_shard(self, context: CaseContext) -> None:
        """A page without one of its shards is there only for ranks that do not hold that shard."""
        model = _model(context)
        eight = model.ranks(8)
        readers = [*eight, *(rank for size in (1, 2, 4) for rank in model.ranks(size))]
        for hole in range(HEADS):
            keys = context.keys(3)
            _store_with_hole(eight, keys, hole)
            for rank in readers:
                there = hole not in rank.identity.shards(PoolName.KV)
                hit, answers = rank.exists(keys).kv_hit_pages, rank.present(keys)
                lacks = f"page 1 key {short(keys[1])} lacks shard {hole}"
                check(
                    hit == (3 if there else 1) and answers == [True, there, True],
                    "EX-12",
                    f"{lacks}; for {_name(rank)} kv_hit_pages is {hit}, and batch_present answers "
                    f"{answers}",
                )
                found = rank.get(keys)
                check(
                    (found[1] is not None) == there,
                    "GET-10",
                    f"{lacks}, and a get of {_name(rank)} answers {not there}",
                )
                wanted = keys if there else keys[::2]
                rank.compare(wanted, [page for page in found if page], rule="GET-10")

    @covers("SET-9", levels=Level.POOLS, needs=SHARED)
    def test_a_set_fills_the_hole_alone(self, context: CaseContext) -> None:
        """A set of a page that lacks a shard stores that shard and leaves the others."""
        model = _model(context)
        eight, [one] = model.ranks(8), model.ranks(1)
        for hole in range(HEADS):
            keys = context.keys(3)
            _store_with_hole(eight, keys, hole, generation=1)
            before = one.stats().bytes_written
            one.store(keys, generation=2)
            written = one.stats().bytes_written - before
            for shard, rank in enumerate(eight):
                rank.expect(keys[::2], generation=1, rule="SET-9")
                found = rank.get(keys[1:2])[0]
                was = found and rank.generation_of(keys[1], found)
                check(
                    was == (2 if shard == hole else 1),
                    "SET-9",
                    f"page 1 key {short(keys[1])} lacked shard {hole}, and was set; shard "
                    f"{shard} has the bytes of set number {was}",
                )
            check(
                written == one.memories["kv"].page_bytes // HEADS,
                "SET-9",
                f"a set of 3 pages that lacked one shard of {HEADS} counts {written} bytes",
            )

    @covers("GET-10", "SET-9", levels=Level.POOLS, needs=SHARED, corrupts=True)
    @pytest.mark.parametrize("shard", [0, 3, 7])
    def test_damage_in_one_shard(self, context: CaseContext, shard: int) -> None:
        """The page is no hit, its other shards remain, and a set repairs the one."""
        model = _model(context)
        eight, [one] = model.ranks(8), model.ranks(1)
        keys = context.keys(3)
        for rank in eight:
            rank.store(keys, generation=1)
        context.corrupt_page(eight[shard], keys[1])
        found = one.get(keys)
        check(
            [page is not None for page in found] == [True, False, True],
            "GET-10",
            f"page 1 key {short(keys[1])} has a flipped bit in shard {shard}; a get of "
            f"{_name(one)} answers {[page is not None for page in found]}",
        )
        one.compare(keys[::2], [page for page in found if page], generation=1)
        for number, rank in enumerate(eight):
            if number != shard:
                rank.expect(keys, generation=1, rule="GET-10")
        one.store(keys, generation=2)
        one.expect_existing(keys, rule="SET-9")
        for number, rank in enumerate(eight):
            rank.expect(keys[::2], generation=1, rule="SET-9")
            rank.expect([keys[1]], generation=2 if number == shard else 1, rule="SET-9")

    @covers("ID-7", "LC-4", levels=IDENTITY, needs=[*SHARED, "clears"])
    def test_a_clear_takes_the_shards_that_a_rank_holds(self, context: CaseContext) -> None:
        """Ranks of any TP size lose them; the shards of other ranks and stores remain."""
        model = _model(context)
        [one], eight = model.ranks(1), model.ranks(8)
        [other] = model.ranks(1, store_tp_size=4)
        keys = context.keys(3)
        one.store(keys)
        other.store(keys)
        error = model.ranks(2)[0].clear()
        check(not error, "LC-7", f"a clear of an idle store failed: {error}")
        for shard, rank in enumerate(eight):
            if shard < HEADS // 2:
                rank.expect_missing(keys, rule="LC-4", why="was cleared by TP rank 0 of 2")
            else:
                rank.expect(keys, rule="LC-4")
        other.expect(keys, rule="LC-4")

    @covers("ID-7", "SET-1", levels=IDENTITY, needs=[*SHARED, "deletes"])
    def test_a_deleted_page_is_gone_for_every_tp_size(self, context: CaseContext) -> None:
        """A page that TP 1 has deleted is missing for the ranks of TP 8; its neighbours remain."""
        model = _model(context)
        [one], keys = model.ranks(1), context.keys(3)
        one.store(keys)
        check(
            one.delete([keys[1]]) == [True],
            "SET-1",
            "a delete of a page in shards, which exists, answers False",
        )
        for rank in (one, *model.ranks(8)):
            rank.expect_missing([keys[1]], rule="SET-1", why="was deleted")
            rank.expect(keys[::2])

    @covers("BU-1", levels=Level.BUDGET, needs=["head_shards"])
    def test_one_batch_for_all_shards(self, context: CaseContext) -> None:
        """128 pages of 8 shards each: an exists, a set and a get ask the driver once each."""
        [sut] = _model(context, pages=BATCH).ranks(1)
        require_steps(sut.storage)
        keys = context.keys(BATCH)
        for what, ask in (
            ("set", partial(sut.store, keys)),
            ("exists", partial(sut.expect_existing, keys, rule="BU-1")),
            ("get", partial(sut.expect, keys)),
        ):
            with counted(sut.storage) as calls:
                ask()
            check_calls(calls, f"{what} of {BATCH} pages of 8 shards", *STEPS)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model with its KV in shards, and the ranks that serve it."""

    context: CaseContext
    base: StorageIdentity
    """As a rank has it that holds all heads."""
    heads: int = HEADS
    side_pools: Callable[[], Mapping[str, PoolMemory]] = dict
    """Makes the pools of a rank beside KV."""
    pages: int = 12

    def ranks(self, size: int, **changes: Any) -> list[StorageUnderTest]:
        """Open the storages of all ranks of a TP size."""
        return [self._rank(rank, size, changes) for rank in range(size)]

    def _rank(self, rank: int, size: int, changes: Mapping[str, Any]) -> StorageUnderTest:
        held, first = max(1, self.heads // size), rank * self.heads // size
        identity = replace(
            self.base, tp_rank=rank, tp_size=size, head_start=first, head_end=first + held
        )
        pool = HeadsPool(heads=held, first=first, layout=self.base.layout, pages=self.pages)
        sut = self.context.storage(
            replace(identity, **changes), pools={PoolName.KV: pool, **self.side_pools()}
        )
        # Ranks of any TP size that hold the same heads hold the same bytes.
        sut.model = self.base
        return sut


def _model(context: CaseContext, layout: str = "page_head", **changes: Any) -> _Model:
    heads = changes.get("heads", HEADS)
    return _Model(context, context.identity(layout=layout, store_tp_size=heads), **changes)


def _side_pools() -> dict[str, PoolMemory]:
    return {
        PoolName.INDEXER: GuardedPool(components=(48,)),
        PoolName.MAMBA: GuardedPool(page_size=1, components=(80, 24)),
    }


def _store_with_hole(
    ranks: Sequence[StorageUnderTest], keys: Sequence[str], hole: int, generation: int = 0
) -> None:
    """Store 3 pages, of which the second one lacks a shard."""
    for shard, rank in enumerate(ranks):
        rank.store(keys[::2] if shard == hole else keys, generation=generation)


def _name(rank: StorageUnderTest) -> str:
    return f"TP rank {rank.identity.tp_rank} of {rank.identity.tp_size}"
