"""Radix tree over pages of tokens: its nodes hold slots on both tiers, and page hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

from hicache_storage.hybrid.hashing import page_hashes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

Tokens: TypeAlias = tuple[int, ...]


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
    tokens: Tokens
    """Whole pages; empty for a root."""
    parent: Node | None = field(default=None, repr=False)
    """None for a root, and for a node that was removed."""
    start: int = 0
    """Tokens before this node's first."""
    children: dict[Tokens, Node] = field(default_factory=dict["Tokens", "Node"], repr=False)
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

    def downward(self) -> list[Node]:
        """Return the path from the first node below the root to this one."""
        return list(self.upward())[::-1]


class RadixTree:
    """One tree for each namespace; the path from its root is the pages of a prefix.

    Args:
        page_size: tokens per page; nodes begin and end at pages.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        # Weak: there may be a namespace for each request. A root is kept by its children, and by
        # the requests that use it.
        self._roots: WeakValueDictionary[str | None, Node] = WeakValueDictionary()
        self._nodes: dict[int, Node] = {}
        self._ids = count()

    def root(self, namespace: str | None) -> Node:
        """Return the root of a namespace, given by the seed of its hashes.

        It holds no slots.
        """
        root = self._roots.get(namespace)
        if root is None:
            self._roots[namespace] = root = Node(
                next(self._ids), (), hashes=(namespace,) if namespace else ()
            )
        return root

    def node(self, node_id: int) -> Node | None:
        """Return the node with this id; None for a root, and if it was removed."""
        return self._nodes.get(node_id)

    def __iter__(self) -> Iterator[Node]:
        """Iterate over all nodes below the roots."""
        return iter(self._nodes.values())

    def whole_pages(self, tokens: Sequence[int]) -> Tokens:
        """Return the tokens of the whole pages of a sequence."""
        return tuple(tokens[: len(tokens) // self.page_size * self.page_size])

    def hashes(self, node: Node) -> tuple[str, ...]:
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
        for each in reversed(missing):
            assert each.parent is not None
            each.hashes = tuple(self.hashes_below(each.parent, each.tokens))
        assert node.hashes is not None
        return node.hashes

    def hashes_below(self, node: Node, tokens: Tokens) -> list[str]:
        """Return the page keys of whole pages that follow a node."""
        above = self.hashes(node)
        return page_hashes(tokens, self.page_size, prior=above[-1] if above else None)

    def prefix_hashes(self, node: Node) -> list[str]:
        """Return the page keys of the whole sequence up to the end of a node."""
        return [key for each in node.downward() for key in self.hashes(each)]

    def find(self, root: Node, tokens: Tokens) -> tuple[Node, int]:
        """Follow whole pages as far as they are in the tree.

        Returns:
            The last node with a match, and the number of tokens that match: less than the node's
            end if only some of its pages do.
        """
        node, known = root, 0
        while known == node.end and known < len(tokens):
            child, common = self.find_child(node, tokens, known)
            if child is None:
                break
            node, known = child, known + common
        return node, known

    def find_child(self, node: Node, tokens: Tokens, at: int) -> tuple[Node | None, int]:
        """Return the child that begins with the page at `at`, and its matching tokens."""
        child = node.children.get(tokens[at : at + self.page_size])
        return child, self._common(
            child.tokens, tokens[at : at + len(child.tokens)]
        ) if child else 0

    def split(self, node: Node, end: int) -> Node:
        """Split a node before token `end` of the sequence; returns the new upper part.

        The upper part gets its rows, with as many locks as the node's rows. A state stays below.
        """
        size = end - node.start
        assert node.parent is not None
        assert 0 < size < len(node.tokens)
        assert size % self.page_size == 0
        pages = size // self.page_size
        # The new node is the upper part: locks, copies and results refer to the end of a prefix,
        # which stays with the old one.
        upper = self._register(
            Node(
                next(self._ids),
                node.tokens[:size],
                node.parent,
                node.start,
                device=_upper(node.device, size),
                host=_upper(node.host, size),
                hits=node.hits,
                hashes=node.hashes and node.hashes[:pages],
                writing=node.writing,
                stored=node.stored - {SlotKind.STATE},
                stored_by=node.stored_by,
                is_lost=node.is_lost,
            )
        )
        node.parent.children[self._first_page(upper)] = upper
        node.tokens = node.tokens[size:]
        node.start = end
        node.parent = upper
        node.hashes = node.hashes and node.hashes[pages:]
        upper.children[self._first_page(node)] = node
        return upper

    def append(self, parent: Node, tokens: Tokens) -> Node:
        """Add a child with these pages.

        No child of `parent` begins with the first of them.
        """
        node = self._register(Node(next(self._ids), tokens, parent, parent.end))
        assert self._first_page(node) not in parent.children
        parent.children[self._first_page(node)] = node
        return node

    def remove(self, node: Node) -> None:
        """Remove a node without children that holds no slots."""
        assert node.parent is not None
        assert not node.children
        del node.parent.children[self._first_page(node)]
        del self._nodes[node.id]
        node.parent = None

    def clear(self) -> None:
        """Remove all nodes."""
        for root in list(self._roots.values()):
            # A request may hold a root: it must not find nodes that are gone.
            root.children.clear()
        self._roots.clear()
        self._nodes.clear()

    def _register(self, node: Node) -> Node:
        self._nodes[node.id] = node
        return node

    def _first_page(self, node: Node) -> Tokens:
        return node.tokens[: self.page_size]

    def _common(self, left: Tokens, right: Tokens) -> int:
        """Return the length of the common prefix in whole pages."""
        # Whole tuples are compared in C; the search by pages is for nodes that differ.
        if left == right:
            return len(left)
        size = self.page_size
        ends = range(size, min(len(left), len(right)) + 1, size)
        return next(
            (end - size for end in ends if left[end - size : end] != right[end - size : end]),
            len(ends) * size,
        )


def _upper(tier: dict[SlotKind, HeldSlots], size: int) -> dict[SlotKind, HeldSlots]:
    """Move the first rows of a node on one tier into new `HeldSlots`."""
    rows = tier[SlotKind.KV]
    # Copies, not views: a view of a few rows would keep the whole tensor alive.
    upper = HeldSlots(None if rows.indices is None else rows.indices[:size].clone(), rows.locks)
    rows.indices = None if rows.indices is None else rows.indices[size:].clone()
    return {SlotKind.KV: upper, SlotKind.STATE: HeldSlots()}
