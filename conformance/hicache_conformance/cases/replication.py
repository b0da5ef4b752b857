"""Pools replicated over TP have one object and one writer.

Pools sharded over TP have one object for each rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import kv_and_state
from hicache_conformance.harness.storage_under_test import PageGroup, check_each
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import check
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest

LEVELS = [Level.POOLS, Level.IDENTITY]


class ReplicationCases:
    """ID-3."""

    @covers("ID-3", levels=LEVELS)
    def test_only_the_writer_writes(self, context: CaseContext) -> None:
        """A rank that is not the writer of replicated KV stores nothing and answers what exists."""
        writer, other = _ranks(context, 2)
        keys = context.keys(4)
        for index, ok in enumerate(other.set(keys)):
            check(
                not ok,
                "ID-3",
                f"page {index} key {short(keys[index])}: rank 1 is not the writer, and its set "
                f"answers True",
            )
        other.expect_missing(keys, rule="ID-3", why="was set by a rank that is not the writer")
        writer.expect_missing(keys, rule="ID-3", why="was set by a rank that is not the writer")

    @covers("ID-3", levels=LEVELS, needs=["sharing>=process"], probes=True)
    def test_all_ranks_read_the_writer_s_pages(self, context: CaseContext) -> None:
        """Pages set by rank 0 are found by every rank.

        A set by another rank then answers True and changes nothing.
        """
        ranks = _ranks(context, 4)
        keys = context.keys(4)
        ranks[0].store(keys[:3])
        ranks[0].expect(keys[:3])
        for rank in ranks[1:]:
            rank.expect(keys[:3], writer=ranks[0].identity, rule="ID-3")
            rank.expect_existing(keys[:3], rule="ID-3")
            answer = rank.set(keys)
            check(
                answer == [True, True, True, False],
                "ID-3",
                f"rank {rank.identity.tp_rank} sets 3 pages that exist and 1 that does not; it "
                f"answers {answer}",
            )
            rank.expect(keys[:3], writer=ranks[0].identity, rule="ID-3")

    @covers("ID-3", levels=LEVELS, needs=["sharing>=process"], probes=True)
    def test_replicated_pages_outlive_the_tp_size(self, context: CaseContext) -> None:
        """Replicated bytes are the same for every TP size, so another TP size finds them."""
        two = _ranks(context, 2)
        keys = context.keys(3)
        two[0].store(keys)
        two[0].expect(keys)
        eight = context.storage(
            replace(two[0].identity, tp_size=8, tp_rank=5), pools=kv_and_state()
        )
        eight.expect(keys, writer=two[0].identity, rule="ID-3")

    @covers("ID-3", levels=LEVELS)
    def test_sharded_state_beside_replicated_kv(self, context: CaseContext) -> None:
        """Every rank stores its own Mamba state under the same keys and reads back its own."""
        ranks = _ranks(context, 4)
        keys, alone = context.keys(3), context.keys(3)
        ranks[0].store(alone, PoolName.MAMBA)
        ranks[0].expect(alone, PoolName.MAMBA)
        for rank in ranks:
            refused = f"of a sharded pool was refused to TP rank {rank.identity.tp_rank}"
            check_each(keys, rank.set(keys, PoolName.MAMBA), "ID-3", refused)
        for rank in ranks:
            rank.expect_own(keys, PoolName.MAMBA, rule="ID-3")

    @covers("ID-3", levels=LEVELS)
    def test_sharded_state_of_another_rank(self, context: CaseContext) -> None:
        """A rank whose own state was never set finds no other's, nor one of another TP size."""
        one, two = _ranks(context, 2)
        keys = context.keys(3)
        one.store(keys, PoolName.MAMBA)
        two.expect_missing(
            keys, PoolName.MAMBA, rule="ID-3", why="was set by TP rank 0 in a pool that is sharded"
        )
        wider = context.storage(replace(one.identity, tp_size=4), pools=kv_and_state())
        wider.expect_missing(
            keys,
            PoolName.MAMBA,
            rule="ID-3",
            why="was set under TP size 2 in a pool that is sharded",
        )

    @covers("ID-3", levels=LEVELS)
    def test_one_call_for_both_kinds(self, context: CaseContext) -> None:
        """One set of a rank that is not the writer: its KV is left alone, its state is stored."""
        _, other = _ranks(context, 2)
        keys = context.keys(3)
        answer = other.set_many([PageGroup(keys), PageGroup(keys, PoolName.MAMBA)])
        check(
            answer == {"kv": [False] * 3, "mamba": [True] * 3},
            "ID-3",
            f"rank 1 sets replicated kv, which it must not write, and sharded mamba: it "
            f"answers {answer}",
        )

    @covers("ID-3", levels=LEVELS)
    def test_every_rank_writes_sharded_kv(self, context: CaseContext) -> None:
        """Without replication each TP rank has KV of its own."""
        base, keys = context.identity(tp_size=4), context.keys(3)
        ranks = [context.storage(replace(base, tp_rank=rank)) for rank in range(4)]
        ranks[0].store(keys)
        ranks[0].expect(keys)
        for rank in ranks[1:]:
            rank.store(keys)
        for rank in ranks:
            rank.expect_own(keys, rule="ID-3")


def _ranks(context: CaseContext, size: int) -> list[StorageUnderTest]:
    """All TP ranks of a model whose KV is replicated and whose Mamba state is not."""
    base = context.identity(kv_replicated=True, tp_size=size)
    return [
        context.storage(replace(base, tp_rank=rank), pools=kv_and_state()) for rank in range(size)
    ]
