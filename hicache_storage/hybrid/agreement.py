"""How ranks decide the same: element-wise minima of small vectors.

All collectives are made by the scheduler's thread, in the order of the program, which is the same on every rank. Whatever
fails on a rank, it takes part with zeros, so that no rank waits for another.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, Self, cast

import torch
import torch.distributed as dist

from hicache_storage.hybrid.alike import check_alike
from hicache_storage.hybrid.parallel import AXES
from hicache_storage.spec import ConfigError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.hybrid.parallel import ParallelConfig

TIMEOUT_SECONDS = 300.0


class AgreementError(HiCacheError):
    """Ranks could not agree: one of them is gone. The ranks may have diverged, so the engine must not go on.

    Raised by each later agreement as well, at once.
    """

    code = "agreement"


class Agreement(Protocol):
    """Lets the ranks of one replica decide together. Used by one thread."""

    @property
    def size(self) -> int:
        """How many ranks decide."""
        ...

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The smallest value of any rank, for each place. A collective: every rank calls it with as many values.

        Raises:
            AgreementError: a rank did not take part in time.
        """
        ...


class SingleRank:
    """Agrees with itself."""

    size = 1

    def minimum(self, values: Sequence[int]) -> list[int]:
        return list(values)


class GroupAgreement:
    """Agrees over a process group of torch.distributed, on the CPU (gloo).

    Args:
        group: used by nobody else, so that collectives of two threads cannot meet; None for the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._owned: dist.ProcessGroup | None = None
        self._broken: Exception | None = None
        self.size: int = dist.get_world_size(group)

    @classmethod
    def of(cls, parallel: ParallelConfig, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Self:
        """Make the group of this rank's replica. A collective of the whole world, whose ranks are those of `parallel`.

        Args:
            timeout_seconds: how long a rank waits for the others.

        Raises:
            ConfigError: torch.distributed has another rank or size than `parallel`, or another rank has other sizes.
            OtherRankError: the first is so on another rank.
        """
        world = cls._over(None, timeout_seconds)
        try:
            sizes = {f"{axis}_size": getattr(parallel, f"{axis}_size") for axis in AXES}
            check_alike(world, sizes, _misplaced(parallel))
        except BaseException:
            world.close()
            raise
        if parallel.dp_size == 1:
            return world
        # Every rank takes part in making every group, and is a member of one.
        groups = [cls._over(ranks, timeout_seconds) for ranks in parallel.replicas]
        world.close()
        return groups[parallel.dp_rank]

    @classmethod
    def _over(cls, ranks: list[int] | None, timeout_seconds: float) -> Self:
        """A group of its own; of the whole world for None."""
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds), backend="gloo")
        agreement = cls(cast("dist.ProcessGroup", group))
        agreement._owned = agreement._group
        return agreement

    def close(self) -> None:
        """Give up the group that `of` made; one that was given stays. Idempotent."""
        group, self._owned = self._owned, None
        if group is not None:
            self._broken = self._broken or RuntimeError("the agreement was closed")
            dist.destroy_process_group(group)

    def minimum(self, values: Sequence[int]) -> list[int]:
        if self._broken is not None:
            raise AgreementError(f"the ranks agree no more: {self._broken}") from self._broken
        vector = torch.tensor(values, dtype=torch.int64)
        try:
            dist.all_reduce(vector, dist.ReduceOp.MIN, group=self._group)
        except Exception as error:
            self._broken = error
            raise AgreementError(f"the ranks could not agree: {error}") from error
        return cast("list[int]", vector.tolist())


def _misplaced(parallel: ParallelConfig) -> ConfigError | None:
    world, expected = (dist.get_rank(), dist.get_world_size()), (parallel.rank, parallel.replica_size * parallel.dp_size)
    if world == expected:
        return None
    return ConfigError(f"torch.distributed has rank {world[0]} of {world[1]}, parallel has {expected[0]} of {expected[1]}")
