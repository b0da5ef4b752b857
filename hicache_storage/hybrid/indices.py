"""Where a span of pages lies in every pool of a hybrid model, and what storage operations hand back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from hicache_storage.spec import InvalidTransferError, PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class HybridIndices:
    """Slots of one span of pages, on the device or on the host. Slots only: no memory, no ownership.

    Pools whose slots derive from the anchor's (an indexer beside KV) do not appear: they use `anchor`.

    Raises:
        InvalidTransferError: a tensor is not one row of int64, or slots and endpoints do not fit each other.
    """

    anchor: torch.Tensor
    """int64 (pages * page_size,): slots of the anchor pool, whole pages in the order of the tokens. May be empty where
    only states are moved."""
    side: Mapping[PoolName, torch.Tensor] = field(default_factory=dict[PoolName, torch.Tensor])
    """int64, for each pool with slots of its own: `len(endpoints[pool])` pages of that pool, one slot each for Mamba."""
    endpoints: Mapping[PoolName, tuple[int, ...]] = field(default_factory=dict[PoolName, tuple[int, ...]])
    """For each pool in `side`, in order: page i of the pool belongs to the prefix that ends after so many pages of this
    span. It is stored under the key of the last of them. A Mamba state at endpoint p is the state after pages [0, p);
    0 means the state where the span begins."""

    def __post_init__(self) -> None:
        for name, slots in (("anchor", self.anchor), *self.side.items()):
            if slots.dtype != torch.int64 or slots.dim() != 1:
                raise InvalidTransferError(f"{name}: slots must be one row of int64, got {slots.dtype} {tuple(slots.shape)}")
        if self.side.keys() != self.endpoints.keys():
            raise InvalidTransferError(f"side names {sorted(self.side)}, endpoints {sorted(self.endpoints)}; give both for each")
        for name, ends in self.endpoints.items():
            count = self.side[name].numel()
            if (count % len(ends) if ends else count) or any(a > b for a, b in pairwise((0, *ends))):
                raise InvalidTransferError(f"{name}: {count} slots do not fit the endpoints {ends}, in order and from 0 on")

    def __bool__(self) -> bool:
        """Whether there is any slot at all."""
        return bool(self.anchor.numel()) or any(slots.numel() for slots in self.side.values())

    def split(self, pages: int, page_size: int) -> tuple[HybridIndices, HybridIndices]:
        """The first `pages` pages and the rest; side pages follow the span in which their endpoint lies.

        An endpoint at the cut belongs to the first part. The tensors are views.

        Args:
            pages: where to cut, in pages of the anchor.
            page_size: tokens per page of the anchor.
        """
        sides = {name: self._split_side(name, pages) for name in self.side}
        head = {name: first for name, (first, _) in sides.items()}
        tail = {name: second for name, (_, second) in sides.items()}
        return (
            HybridIndices(self.anchor[: pages * page_size], *_unzipped(head, 0)),
            HybridIndices(self.anchor[pages * page_size :], *_unzipped(tail, pages)),
        )

    def _split_side(self, name: PoolName, pages: int) -> tuple[_Side, _Side]:
        ends, slots = self.endpoints[name], self.side[name]
        count = sum(end <= pages for end in ends)
        at = count * (slots.numel() // len(ends)) if ends else 0
        return (slots[:at], ends[:count]), (slots[at:], ends[count:])

    @classmethod
    def empty(cls) -> HybridIndices:
        """No slots."""
        return cls(torch.empty(0, dtype=torch.int64))

    @classmethod
    def joined(cls, parts: Sequence[HybridIndices], page_size: int) -> HybridIndices:
        """Spans that follow each other as one, in copies of the tensors; one part is returned as it is.

        Args:
            parts: in the order of the tokens.
            page_size: tokens per page of the anchor.
        """
        if len(parts) == 1:
            return parts[0]
        slots: dict[PoolName, list[torch.Tensor]] = {}
        ends: dict[PoolName, tuple[int, ...]] = {}
        before = 0
        for part in parts:
            for name, rows in part.side.items():
                slots.setdefault(name, []).append(rows)
                ends[name] = (*ends.get(name, ()), *(before + end for end in part.endpoints[name]))
            before += part.anchor.numel() // page_size
        anchor = torch.cat([part.anchor for part in parts]) if parts else torch.empty(0, dtype=torch.int64)
        return cls(anchor, {name: torch.cat(rows) for name, rows in slots.items()}, ends)


_Side = tuple[torch.Tensor, tuple[int, ...]]


def _unzipped(
    sides: Mapping[PoolName, _Side], before: int
) -> tuple[dict[PoolName, torch.Tensor], dict[PoolName, tuple[int, ...]]]:
    """Slots and endpoints, the latter counted from `before`; pools without a page are left out."""
    kept = {name: (slots, ends) for name, (slots, ends) in sides.items() if ends}
    return (
        {name: slots for name, (slots, _) in kept.items()},
        {name: tuple(end - before for end in ends) for name, (_, ends) in kept.items()},
    )


class PrefetchOutcome(StrEnum):
    """Why a prefetch delivered what it did."""

    COMPLETE = "complete"
    """All that the ranks agreed on."""
    BELOW_THRESHOLD = "below_threshold"
    """The longest prefix that every rank can restore is too short to be worth it."""
    HOST_CAPACITY = "host_capacity"
    """Cut to what fits into host memory, or given up for want of it."""
    STORAGE_TRANSFER = "storage_transfer"
    """Cut because pages that existed were not delivered on some rank."""
    STOPPED = "stopped"
    """Cut because it was terminated before it was done: by policy, by the caller, by `detach` or `reset`."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchResult:
    """What a prefetch brought, the same length on every rank. The caller owns the host slots."""

    tokens: int
    """Tokens restored, a multiple of the page size, counted from the first token asked for."""
    hashes: tuple[str, ...]
    """Their page hashes."""
    host: HybridIndices
    """Where they lie; the side pools have the pages of the window that ends at `tokens`."""
    outcome: PrefetchOutcome


@dataclass(frozen=True, slots=True)
class BackupResult:
    """How a backup to storage ended, the same on every rank."""

    operation_id: int
    stored_pages: int
    """Leading pages of the span that every pool of every rank has stored, with all side pages that end in them."""
    complete: bool
    """Whether that is all of them."""
    lost_from: int | None = None
    """The first page of the sequence before the span that the storage of some rank has not, although it has taken the span.
    None where nothing is missing, or nothing was found out."""
