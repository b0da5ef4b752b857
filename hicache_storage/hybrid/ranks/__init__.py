"""Ranks of a replica, which take their decisions together; only `torch_group` imports torch."""

from hicache_storage.hybrid.ranks.group import (
    OtherRankError,
    ParallelConfig,
    RankGroup,
    RankGroupError,
    SingleRank,
    check_consistent,
    make_on_all_ranks,
    reduce_each,
)

__all__ = [
    "OtherRankError",
    "ParallelConfig",
    "RankGroup",
    "RankGroupError",
    "SingleRank",
    "check_consistent",
    "make_on_all_ranks",
    "reduce_each",
]
