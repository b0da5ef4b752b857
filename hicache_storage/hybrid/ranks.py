"""Ranks of a replica: their positions, their collectives, and checks that they are alike.

All collectives are made by the scheduler's thread in program order, which is the same on every
rank. A rank on which something fails takes part with zeros, so that no other rank waits for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, cast

import torch
import torch.distributed as dist

from hicache_storage.spec import ConfigError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicache_storage.spec import StorageIdentity

MadeT = TypeVar("MadeT")

AXES = ("tp", "cp", "pp", "dp")
"""From the innermost to the outermost: neighbouring ranks differ in `tp_rank`."""
TIMEOUT_SECONDS = 300.0
"""Time that a rank waits for the others in a collective."""


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
        return replace(base, **asdict(self))

    def check(self, identity: StorageIdentity) -> None:
        """Check that a storage reads and writes the bytes of this rank.

        Raises:
            ConfigError: a field differs; the message names it.
        """
        # A storage of another rank would deliver that rank's bytes: right by its checksums, wrong
        # for this rank.
        for name, ours in asdict(self).items():
            if getattr(identity, name) != ours:
                raise ConfigError(
                    f"the storage's identity has {name}={getattr(identity, name)}, this rank "
                    f"{ours}; create the storage with ParallelConfig.identity()"
                )

    def _at(self, axis: str) -> tuple[int, int]:
        return getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")


class RankGroupError(HiCacheError):
    """A collective failed: a rank is gone.

    Ranks may have diverged, so the engine must stop.

    Each later collective of the group raises it as well, at once.
    """


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


class TorchRankGroup:
    """Rank group over a process group of torch.distributed, on the CPU (gloo).

    Making one is a collective of the whole world.

    Args:
        ranks: those of the world that it is over; None for all.
    """

    def __init__(self, ranks: list[int] | None = None) -> None:
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        # gloo, because the vectors are on the CPU, where NCCL has no collectives. A group of its
        # own, so that its collectives cannot mix with those of the engine.
        group = cast("dist.ProcessGroup", dist.new_group(ranks, timeout=timeout, backend="gloo"))
        self._group: dist.ProcessGroup | None = group
        self._broken: Exception | None = None
        self.size: int = dist.get_world_size(group)

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        """Make the group of this rank's replica.

        A collective of the whole world, whose ranks are those of `parallel`.

        Raises:
            ConfigError: torch.distributed has another rank or size than `parallel`, or another rank
                has other sizes.
            OtherRankError: the first is so on another rank.
        """
        world = cls()
        try:
            sizes = {f"{axis}_size": getattr(parallel, f"{axis}_size") for axis in AXES}
            check_consistent(world, sizes, _placement_error(parallel))
        except BaseException:
            world.close()
            raise
        if parallel.dp_size == 1:
            return world
        # `dist.new_group` is a collective of the whole world: every rank makes every group.
        groups = [cls(ranks) for ranks in parallel.replicas]
        # After the groups are made: it was only needed for the comparison.
        world.close()
        return groups[parallel.dp_rank]

    def close(self) -> None:
        """Destroy the process group. Idempotent."""
        if self._group is not None:
            self._broken = self._broken or RuntimeError("the rank group was closed")
            dist.destroy_process_group(self._group)
            self._group = None

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


def reduce_each(rank_group: RankGroup, votes: Iterable[Sequence[int]]) -> list[list[int]]:
    """Reduce several vectors in one collective: each to its minimum over all ranks."""
    mine = list(votes)
    agreed = iter(rank_group.all_reduce_min([vote for own in mine for vote in own]))
    return [[next(agreed) for _ in own] for own in mine]


class OtherRankError(HiCacheError, RuntimeError):
    """Another rank failed while this one could go on.

    That rank's own error has the cause.
    """


def check_consistent(
    rank_group: RankGroup, values: Mapping[str, object], refusal: BaseException | None = None
) -> None:
    """Check that no rank refuses, and that all ranks have the same values.

    A collective.

    Args:
        values: by the names that messages use, the same names on every rank. Two values are equal
            if their `repr` is.
        refusal: this rank's own error; its values are ignored then.

    Raises:
        OtherRankError: another rank refuses.
        ConfigError: values differ; the message names them.
        BaseException: `refusal`.
    """
    # A rank that refuses sends zeros: the vector has the same length on every rank.
    mine = [_digest(value) if refusal is None else 0 for value in values.values()]
    # One reduction gives both bounds: the maximum is the negated minimum of the negated numbers.
    accepted, *lowest = rank_group.all_reduce_min(
        [int(refusal is None), *mine, *(-number for number in mine)]
    )
    if refusal is not None:
        raise refusal
    if not accepted:
        raise OtherRankError("another rank refuses its configuration; its own error says why")
    bounds = zip(values.items(), lowest[: len(mine)], lowest[len(mine) :], strict=True)
    wrong = [
        # Other values may be long, or secret.
        f"{name} ({value} here)" if type(value) is int else name
        for (name, value), low, high in bounds
        if low != -high
    ]
    if wrong:
        raise ConfigError(f"ranks differ in {', '.join(wrong)}; make it the same on every rank")


def make_on_all_ranks(rank_group: RankGroup, what: str, make: Callable[[], MadeT]) -> MadeT:
    """Call `make` on every rank; where it fails on one, all ranks raise. A collective.

    Raises:
        OtherRankError: `make` failed on another rank.
        BaseException: the error of `make` on this rank.
    """
    made, error = None, None
    try:
        made = make()
    except BaseException as failure:  # noqa: BLE001 - raised below, once the other ranks know; drivers call sys.exit
        error = failure
    all_made = rank_group.all_reduce_min([int(error is None)])[0]
    if error is not None:
        raise error
    if not all_made or made is None:
        raise OtherRankError(f"another rank could not make its {what}")
    return made


def _digest(value: object) -> int:
    # 56 bits: also the negation fits into int64, in which ranks reduce.
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])


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
