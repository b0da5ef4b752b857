"""Interface of a group of ranks that take their decisions together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_storage.spec import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence


class RankGroupError(HiCacheError):
    """A collective failed: a rank is gone.

    Ranks may have diverged, so the engine must stop.

    Each later collective of the group raises it as well, at once.
    """

    code = "agreement"


class RankGroup(Protocol):
    """Collectives of the ranks of one replica. Used by one thread."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        """Reduce a vector over all ranks: the element-wise minimum.

        A collective: every rank calls it, with a vector of the same length.

        Raises:
            RankGroupError: a rank did not take part in time.
        """
        ...


class SingleRank:
    """A group of one rank."""

    size = 1

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        return list(values)
