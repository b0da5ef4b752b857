"""A rank group over torch.distributed.

All collectives are made by the scheduler's thread in program order, which is the same on every
rank. A rank on which something fails takes part with zeros, so that no other rank waits for it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Self, cast

import torch
import torch.distributed as dist

from hicache_storage.hybrid.ranks.group import AXES, RankGroupError, check_consistent
from hicache_storage.spec import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.hybrid.ranks.group import ParallelConfig

TIMEOUT_SECONDS = 300.0
"""Default time that a rank waits for the others in a collective."""


class TorchRankGroup:
    """Rank group over a process group of torch.distributed, on the CPU (gloo).

    Args:
        group: used by no other code, so that collectives of two threads cannot mix; None for the
            default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._owned: dist.ProcessGroup | None = None
        self._broken: Exception | None = None
        self.size: int = dist.get_world_size(group)

    @classmethod
    def of(cls, parallel: ParallelConfig, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Self:
        """Make the group of this rank's replica.

        A collective of the whole world, whose ranks are those of `parallel`.

        Args:
            timeout_seconds: how long a rank waits for the others.

        Raises:
            ConfigError: torch.distributed has another rank or size than `parallel`, or another rank
                has other sizes.
            OtherRankError: the first is so on another rank.
        """
        world = cls._over(None, timeout_seconds)
        try:
            sizes = {f"{axis}_size": getattr(parallel, f"{axis}_size") for axis in AXES}
            check_consistent(world, sizes, _placement_error(parallel))
        except BaseException:
            world.close()
            raise
        if parallel.dp_size == 1:
            return world
        # `dist.new_group` is a collective of the whole world: every rank makes every group.
        groups = [cls._over(ranks, timeout_seconds) for ranks in parallel.replicas]
        # After the groups are made: it was only needed for the comparison.
        world.close()
        return groups[parallel.dp_rank]

    @classmethod
    def _over(cls, ranks: list[int] | None, timeout_seconds: float) -> Self:
        """Make a process group of these ranks, None for the whole world, and own it."""
        timeout = timedelta(seconds=timeout_seconds)
        # gloo, because the vectors are on the CPU, where NCCL has no collectives. A group of its
        # own, so that its collectives cannot mix with those of the engine.
        group = cast("dist.ProcessGroup", dist.new_group(ranks, timeout=timeout, backend="gloo"))
        rank_group = cls(group)
        rank_group._owned = group
        return rank_group

    def close(self) -> None:
        """Destroy the process group if `of` made it. Idempotent."""
        group = self._owned
        self._owned = None
        if group is not None:
            self._broken = self._broken or RuntimeError("the rank group was closed")
            dist.destroy_process_group(group)

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        # After a failed collective, ranks may disagree on which collective comes next.
        if self._broken is not None:
            message = f"the rank group is unusable: {self._broken}"
            raise RankGroupError(message) from self._broken
        vector = torch.tensor(values, dtype=torch.int64)
        try:
            dist.all_reduce(vector, dist.ReduceOp.MIN, group=self._group)
        except Exception as error:
            self._broken = error
            raise RankGroupError(f"a collective of the ranks failed: {error}") from error
        return cast("list[int]", vector.tolist())


def _placement_error(parallel: ParallelConfig) -> ConfigError | None:
    """Error where torch.distributed and `parallel` place this rank differently."""
    found = (dist.get_rank(), dist.get_world_size())
    expected = (parallel.rank, parallel.replica_size * parallel.dp_size)
    if found == expected:
        return None
    return ConfigError(
        f"torch.distributed has rank {found[0]} of {found[1]}, parallel has {expected[0]} of "
        f"{expected[1]}"
    )
