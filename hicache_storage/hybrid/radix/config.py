"""Configuration of the radix cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hicache_storage.hybrid.policies import WritePolicy
from hicache_storage.spec import ConfigError, PoolName


def checkpoint_grid(page_size: int, state_chunk: int, track_interval: int) -> int:
    """Return the tokens between checkpoints: least common multiple of the intervals.

    Args:
        page_size: tokens per page.
        state_chunk: tokens after which the state kernel has a state to give.
        track_interval: tokens between the states that the engine keeps.

    Raises:
        ConfigError: a number is not positive.
    """
    for name, value in (
        ("page_size", page_size),
        ("state_chunk", state_chunk),
        ("track_interval", track_interval),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    return math.lcm(page_size, state_chunk, track_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class RadixCacheConfig:
    """Configuration of a `HiMambaRadixCache`.

    Raises:
        ConfigError: a number is not positive, or the grid is not whole pages.
    """

    page_size: int
    """Tokens per page."""
    checkpoint_grid: int | None = None
    """Tokens between checkpoints, where the model's recurrent state is kept.

    See `checkpoint_grid()`. None for a model without such states.
    """
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    bigram: bool = False
    """Whether the key of a row of KV is a pair of neighbours, as for EAGLE.

    That is its token, and the one after it. A sequence of n tokens has n - 1 such rows then, and
    `tokens` has one more than rows.
    """
    kv_pool: PoolName = PoolName.KV
    state_pool: PoolName = PoolName.MAMBA

    def __post_init__(self) -> None:
        object.__setattr__(self, "write_policy", WritePolicy(self.write_policy))
        if self.page_size < 1:
            raise ConfigError(f"page_size must be at least 1, got {self.page_size}")
        if self.checkpoint_grid is not None and (
            self.checkpoint_grid < 1 or self.checkpoint_grid % self.page_size
        ):
            raise ConfigError(
                f"checkpoint_grid must be a positive multiple of the page size {self.page_size}, "
                f"got {self.checkpoint_grid}"
            )

    @property
    def grid(self) -> int:
        """Tokens between the positions from which a request can continue."""
        return self.checkpoint_grid or self.page_size

    def committed_length(self, length: int) -> int:
        """Return the tokens of a finished request that can be used again.

        The last token was sampled and never computed, so it has no KV. With `bigram` it is passed
        to `insert` all the same.
        """
        return max(0, length - 1) // self.grid * self.grid
