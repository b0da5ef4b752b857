"""Nodes of the radix tree, and what each holds on the two tiers of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from hicache_storage.hybrid.radix.units import Units


class Kind(StrEnum):
    """What a node can hold."""

    KV = "kv"
    """A row for each of its tokens, and all that is derived from those rows (an indexer's)."""
    STATE = "state"
    """The recurrent state after its last token."""


@dataclass(slots=True)
class Holding:
    """The slots that a node holds of one kind on one tier."""

    indices: torch.Tensor | None = None
    """int64 on the CPU: one slot for each token (KV), or one in all (state). None: nothing is held."""
    locks: int = 0
    """How many users keep it from being evicted."""


def _holdings() -> dict[Kind, Holding]:
    return {kind: Holding() for kind in Kind}


@dataclass(slots=True, eq=False, weakref_slot=True)
class Node:
    """Some pages of tokens that follow those of its parent.

    A node below the root holds KV on the device, on the host, or on both; one that holds KV on a tier has a parent that
    does as well, and one that holds a state on a tier holds its KV there. A split keeps the node as the lower part.
    """

    id: int
    tokens: Units
    """Whole pages of units; empty for a root."""
    parent: Node | None = field(default=None, repr=False)
    """None for a root, and for a node that was removed."""
    start: int = 0
    """Tokens before this node's first."""
    children: dict[Units, Node] = field(default_factory=dict["Units", "Node"], repr=False)
    """By their first page."""
    device: dict[Kind, Holding] = field(default_factory=_holdings)
    host: dict[Kind, Holding] = field(default_factory=_holdings)
    hits: int = 1
    """How many requests made or used it."""
    hashes: tuple[str, ...] | None = None
    """The page hashes, once they have been asked for; a root's is the seed of its namespace, if that has one."""
    writing: int = 0
    """Copies to the host that have not been acknowledged."""
    state_saved: bool = False
    """Whether its state was ever copied to the host."""
    stored: set[Kind] = field(default_factory=set[Kind])
    """What the storage was given, or gave."""
    stored_by: int = 0
    """The last backup that gave the storage something of it."""
    is_lost: bool = False
    """Whether the storage had its KV, and has lost it."""

    @property
    def end(self) -> int:
        """Tokens up to and with this node's last."""
        return self.start + len(self.tokens)

    def upward(self, start: int = 0) -> Iterator[Node]:
        """This node and its ancestors below the root that begin at token `start` or later, from here up."""
        node = self
        while node.parent is not None and node.start >= start:
            parent = node.parent
            yield node
            node = parent
