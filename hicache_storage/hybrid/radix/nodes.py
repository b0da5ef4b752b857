"""Nodes of the radix tree, their slots on both tiers, and their page hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, cast

from hicache_storage.hybrid.hashing import page_hashes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

Bigram: TypeAlias = tuple[int, int]
Units: TypeAlias = "tuple[int, ...] | tuple[Bigram, ...]"
"""One unit for each row of KV: a token or, for EAGLE, a pair of tokens (bigram).

A draft model's row of a token depends on the token after it, so that both are its key.
"""


class SlotKind(StrEnum):
    """Kind of slots that a node can hold."""

    KV = "kv"
    """A row for each of its tokens, and the rows derived from them (an indexer's)."""
    STATE = "state"
    """The recurrent state after its last token."""


@dataclass(slots=True)
class HeldSlots:
    """Slots of one kind that a node holds on one tier."""

    indices: torch.Tensor | None = None
    """int64 on the CPU: one slot for each token (KV), or one in all (state). None: no slots."""
    locks: int = 0
    """Number of users that keep the slots from being evicted."""


def _held_slots() -> dict[SlotKind, HeldSlots]:
    return {kind: HeldSlots() for kind in SlotKind}


# Compared by identity, as LRU lists have nodes as keys. Weak references, because the tree does not
# keep roots alive.
@dataclass(slots=True, eq=False, weakref_slot=True)
class Node:
    """Some pages of tokens that follow those of its parent.

    A node below the root holds KV on the device, on the host, or on both. A node that holds KV on a
    tier has a parent that does as well; one that holds a state on a tier holds its KV there. A
    split keeps the node as the lower part.
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
    device: dict[SlotKind, HeldSlots] = field(default_factory=_held_slots)
    host: dict[SlotKind, HeldSlots] = field(default_factory=_held_slots)
    hits: int = 1
    """Number of requests that inserted or used it."""
    hashes: tuple[str, ...] | None = None
    """The page hashes, computed when they are first used.

    A root's is the seed of its namespace, if that has one.
    """
    writing: int = 0
    """Copies to the host that have not been acknowledged."""
    state_saved: bool = False
    """Whether its state was ever copied to the host."""
    stored: set[SlotKind] = field(default_factory=set[SlotKind])
    """Kinds that were stored in the storage, or fetched from it."""
    stored_by: int = 0
    """Id of the last backup that stored something of it."""
    is_lost: bool = False
    """Whether the storage had its KV, and has lost it."""

    @property
    def end(self) -> int:
        """Tokens up to and with this node's last."""
        return self.start + len(self.tokens)

    def upward(self, start: int = 0) -> Iterator[Node]:
        """Iterate from this node up to the last that begins at `start` or later."""
        node = self
        while node.parent is not None and node.start >= start:
            parent = node.parent
            yield node
            node = parent


def units_of(tokens: Sequence[int], *, bigram: bool) -> Units:
    """Return the units of a sequence; n tokens are n - 1 pairs."""
    return tuple(pairwise(tokens)) if bigram else tuple(tokens)


def tokens_of(units: Units, *, bigram: bool) -> tuple[int, ...]:
    """Return the tokens of units: the reverse of `units_of`."""
    if not bigram or not units:
        return cast("tuple[int, ...]", units)
    pairs = cast("tuple[Bigram, ...]", units)
    return (*(first for first, _ in pairs), pairs[-1][1])


def hashes_of(node: Node, page_size: int, *, bigram: bool = False) -> tuple[str, ...]:
    """Return the page keys of a node.

    For a root the seed of its namespace, if it has one.

    Computes the hashes of ancestors that are missing.
    """
    # A loop: the path of a long conversation may be deeper than Python's limit of recursion.
    missing: list[Node] = []
    known = node
    while known.hashes is None:
        missing.append(known)
        assert known.parent is not None
        known = known.parent
    prior = known.hashes[-1] if known.hashes else None
    for each in reversed(missing):
        tokens = tokens_of(each.tokens, bigram=bigram)
        each.hashes = tuple(page_hashes(tokens, page_size, prior=prior, bigram=bigram))
        prior = each.hashes[-1]
    assert node.hashes is not None
    return node.hashes


def prefix_hashes(node: Node, page_size: int, *, bigram: bool = False) -> list[str]:
    """Return the page keys of the whole sequence up to the end of a node."""
    path = reversed(list(node.upward()))
    return [key for each in path for key in hashes_of(each, page_size, bigram=bigram)]
