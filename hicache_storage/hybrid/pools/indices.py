"""Slots of a span of pages in every pool of a hybrid model."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from hicache_storage.spec import InvalidTransferError, PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class HybridIndices:
    """Slots of one span of pages on the device or the host, without ownership.

    Pools whose slots derive from the anchor's (an indexer beside KV) do not appear: they use
    `anchor`.

    Raises:
        InvalidTransferError: a tensor is not one row of int64, or slots and endpoints do not fit
            each other.
    """

    anchor: torch.Tensor
    """int64 (pages * page_size,): slots of the anchor pool.

    Whole pages in the order of the tokens. May be empty where only states are moved.
    """
    side: Mapping[PoolName, torch.Tensor] = field(default_factory=dict[PoolName, torch.Tensor])
    """int64, for each pool with slots of its own: `len(endpoints[pool])` of its pages.

    One slot each for Mamba.
    """
    endpoints: Mapping[PoolName, tuple[int, ...]] = field(
        default_factory=dict[PoolName, tuple[int, ...]]
    )
    """For each pool in `side`, in order: the endpoints of its pages, in pages of this span.

    Page i of the pool belongs to the prefix that ends there, and is stored under the key of its
    last page. A Mamba state at endpoint p is the state after pages [0, p); 0 means the state at the
    start of the span.
    """

    def __post_init__(self) -> None:
        for name, slots in (("anchor", self.anchor), *self.side.items()):
            if slots.dtype != torch.int64 or slots.dim() != 1:
                raise InvalidTransferError(
                    f"{name}: slots must be one row of int64, got {slots.dtype} "
                    f"{tuple(slots.shape)}"
                )
        if self.side.keys() != self.endpoints.keys():
            raise InvalidTransferError(
                f"side names {sorted(self.side)}, endpoints {sorted(self.endpoints)}; give both "
                "for each"
            )
        for name, ends in self.endpoints.items():
            count = self.side[name].numel()
            if (count % len(ends) if ends else count) or any(
                a > b for a, b in pairwise((0, *ends))
            ):
                raise InvalidTransferError(
                    f"{name}: {count} slots do not fit the endpoints {ends}, in order and from 0 on"
                )

    def __bool__(self) -> bool:
        """Return whether there is any slot."""
        return bool(self.anchor.numel()) or any(slots.numel() for slots in self.side.values())

    def split(self, pages: int, page_size: int) -> tuple[HybridIndices, HybridIndices]:
        """Split after `pages` pages.

        Side pages go with the part in which their endpoint lies.

        An endpoint at the split belongs to the first part. The tensors are views.

        Args:
            pages: position of the split, in pages of the anchor.
            page_size: tokens per page of the anchor.
        """
        sides = {name: self._split_side(name, pages) for name in self.side}
        head = {name: first for name, (first, _) in sides.items()}
        tail = {name: second for name, (_, second) in sides.items()}
        return (
            HybridIndices(self.anchor[: pages * page_size], *_unzip(head, 0)),
            HybridIndices(self.anchor[pages * page_size :], *_unzip(tail, pages)),
        )

    def _split_side(self, name: PoolName, pages: int) -> tuple[_Side, _Side]:
        ends, slots = self.endpoints[name], self.side[name]
        count = sum(end <= pages for end in ends)
        # Slots of a page follow from the two lengths: the span does not know the pool's page size.
        at = count * (slots.numel() // len(ends)) if ends else 0
        return (slots[:at], ends[:count]), (slots[at:], ends[count:])

    @classmethod
    def empty(cls) -> HybridIndices:
        """Return a span without slots."""
        return cls(torch.empty(0, dtype=torch.int64))

    @classmethod
    def concat(cls, parts: Sequence[HybridIndices], page_size: int) -> HybridIndices:
        """Concatenate consecutive spans in copies of the tensors.

        A single one is returned as it is.

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
        anchor = (
            torch.cat([part.anchor for part in parts])
            if parts
            else torch.empty(0, dtype=torch.int64)
        )
        return cls(anchor, {name: torch.cat(rows) for name, rows in slots.items()}, ends)


_Side = tuple[torch.Tensor, tuple[int, ...]]


def _unzip(
    sides: Mapping[PoolName, _Side], before: int
) -> tuple[dict[PoolName, torch.Tensor], dict[PoolName, tuple[int, ...]]]:
    """Separate slots and endpoints, counting these from `before`.

    Omits pools without a page.
    """
    kept = {name: (slots, ends) for name, (slots, ends) in sides.items() if ends}
    return (
        {name: slots for name, (slots, _) in kept.items()},
        {name: tuple(end - before for end in ends) for name, (_, ends) in kept.items()},
    )
