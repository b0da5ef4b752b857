"""Position of a rank in the parallel layout.

Identity, writers and groups follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from hicache_storage.spec import ConfigError

if TYPE_CHECKING:
    from hicache_storage.spec import StorageIdentity

AXES = ("tp", "cp", "pp", "dp")
"""From the innermost to the outermost: neighbouring ranks differ in `tp_rank`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Position of a rank.

    `tp_rank` counts within one CP shard of one PP stage, so each shard has a rank 0.

    An engine whose TP group spans CP ranks uses `of_rank`; its own `tp_rank` would leave all shards
    but the first without a writer.

    Raises:
        ConfigError: a rank is not below its size.
    """

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            rank, size = self._at(axis)
            if not 0 <= rank < size:
                raise ConfigError(f"{axis}_rank must be in [0, {axis}_size): got {rank} of {size}")

    @classmethod
    def of_rank(
        cls, rank: int, *, tp_size: int = 1, cp_size: int = 1, pp_size: int = 1, dp_size: int = 1
    ) -> Self:
        """Place a rank of the whole world, counted with TP innermost, then CP, PP and DP.

        Raises:
            ConfigError: the rank is outside of that world.
        """
        sizes = {"tp": tp_size, "cp": cp_size, "pp": pp_size, "dp": dp_size}
        fields, rest = dict[str, int](), rank
        for axis in AXES:
            if sizes[axis] < 1:
                raise ConfigError(f"{axis}_size must be at least 1, got {sizes[axis]}")
            rest, fields[f"{axis}_rank"] = divmod(rest, sizes[axis])
            fields[f"{axis}_size"] = sizes[axis]
        if rest:
            raise ConfigError(
                f"rank must be in [0, {tp_size * cp_size * pp_size * dp_size}), got {rank}"
            )
        return cls(**fields)

    @property
    def rank(self) -> int:
        """Rank in the whole world, as `of_rank` takes it."""
        rank = 0
        for axis in reversed(AXES):
            place, size = self._at(axis)
            rank = rank * size + place
        return rank

    @property
    def replica_size(self) -> int:
        """Ranks that serve a request together: all of one DP rank."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def replicas(self) -> list[list[int]]:
        """World ranks of each DP rank; those of one have to agree on every decision."""
        return [
            list(range(first * self.replica_size, (first + 1) * self.replica_size))
            for first in range(self.dp_size)
        ]

    def identity(self, base: StorageIdentity) -> StorageIdentity:
        """Return `base` with the position of this rank."""
        return replace(
            base,
            **{
                f"{axis}_{part}": getattr(self, f"{axis}_{part}")
                for axis in AXES
                for part in ("rank", "size")
            },
        )

    def check(self, identity: StorageIdentity) -> None:
        """Check that a storage reads and writes the bytes of this rank.

        Raises:
            ConfigError: a field differs; the message names it.
        """
        # A storage of another rank would deliver that rank's bytes: right by its checksums, wrong
        # for this rank.
        for axis in AXES:
            for part in ("rank", "size"):
                name = f"{axis}_{part}"
                if getattr(identity, name) != getattr(self, name):
                    raise ConfigError(
                        f"the storage's identity has {name}={getattr(identity, name)}, this rank "
                        f"{getattr(self, name)}; create the storage with ParallelConfig.identity()"
                    )

    def _at(self, axis: str) -> tuple[int, int]:
        return getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
