"""The radix tree over pages of tokens: finding, splitting, growing and pruning, whatever the nodes hold."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from hicache_storage.hybrid.radix.nodes import Holding, Kind, Node
from hicache_storage.hybrid.radix.units import units_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.hybrid.radix.units import Units


class RadixTree:
    """One tree for each namespace; a path from its root spells the pages of a prefix.

    Args:
        page_size: tokens per page; nodes begin and end at pages.
        bigram: whether pages are of pairs of tokens.
    """

    def __init__(self, page_size: int, *, bigram: bool = False) -> None:
        self.page_size, self.bigram = page_size, bigram
        # A root lives as long as it has children, or somebody uses it: there may be a namespace for each request.
        self._roots: WeakValueDictionary[str | None, Node] = WeakValueDictionary()
        self._nodes: dict[int, Node] = {}
        self._ids = count()

    def root(self, namespace: str | None) -> Node:
        """The root of a namespace, given by the seed of its hashes; it holds nothing."""
        root = self._roots.get(namespace)
        if root is None:
            self._roots[namespace] = root = Node(next(self._ids), (), hashes=(namespace,) if namespace else ())
        return root

    def node(self, node_id: int) -> Node | None:
        """The node below a root with this id, unless it was removed."""
        return self._nodes.get(node_id)

    def __iter__(self) -> Iterator[Node]:
        """Every node below the roots."""
        return iter(self._nodes.values())

    def whole_pages(self, tokens: Sequence[int]) -> Units:
        """The units of the whole pages of a sequence of tokens."""
        units = units_of(tokens, bigram=self.bigram)
        return units[: len(units) // self.page_size * self.page_size]

    def find(self, root: Node, tokens: Units) -> tuple[Node, int]:
        """Follow whole pages as far as they are known.

        Returns:
            The last node that was entered, and how many tokens are known; fewer than the node's end where only some of
            its pages match.
        """
        node, known = root, 0
        while known == node.end and known < len(tokens):
            child, common = self.find_child(node, tokens, known)
            if child is None:
                break
            node, known = child, known + common
        return node, known

    def find_child(self, node: Node, tokens: Units, at: int) -> tuple[Node | None, int]:
        """The child that begins with the page of `tokens` from `at` on, and how many of its tokens follow there."""
        child = node.children.get(tokens[at : at + self.page_size])
        return child, self._common(child.tokens, tokens[at : at + len(child.tokens)]) if child else 0

    def split(self, node: Node, end: int) -> Node:
        """Cut a node in two before token `end` of the sequence; returns the new upper part.

        The upper part gets its share of the rows and a lock for each lock of the node's rows. States stay below.
        """
        size = end - node.start
        assert node.parent is not None
        assert 0 < size < len(node.tokens)
        assert size % self.page_size == 0
        pages = size // self.page_size
        upper = self._made(
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
                stored=node.stored - {Kind.STATE},
                stored_by=node.stored_by,
                is_lost=node.is_lost,
            )
        )
        node.parent.children[self._first_page(upper)] = upper
        node.tokens, node.start, node.parent = node.tokens[size:], end, upper
        node.hashes = node.hashes and node.hashes[pages:]
        upper.children[self._first_page(node)] = node
        return upper

    def append(self, parent: Node, tokens: Units) -> Node:
        """A new child with these pages, the first of which no child of `parent` begins with."""
        node = self._made(Node(next(self._ids), tokens, parent, parent.end))
        assert self._first_page(node) not in parent.children
        parent.children[self._first_page(node)] = node
        return node

    def remove(self, node: Node) -> None:
        """Take out a node without children that holds nothing."""
        assert node.parent is not None
        assert not node.children
        del node.parent.children[self._first_page(node)]
        del self._nodes[node.id]
        node.parent = None

    def clear(self) -> None:
        """Forget all nodes."""
        for root in list(self._roots.values()):
            root.children.clear()
        self._roots.clear()
        self._nodes.clear()

    def _made(self, node: Node) -> Node:
        self._nodes[node.id] = node
        return node

    def _first_page(self, node: Node) -> Units:
        return node.tokens[: self.page_size]

    def _common(self, left: Units, right: Units) -> int:
        """Length of the common prefix in whole pages."""
        if left == right:
            return len(left)
        size = self.page_size
        ends = range(size, min(len(left), len(right)) + 1, size)
        return next((end - size for end in ends if left[end - size : end] != right[end - size : end]), len(ends) * size)


def _upper(tier: dict[Kind, Holding], size: int) -> dict[Kind, Holding]:
    """Take the first rows out of a node's holdings on one tier."""
    rows = tier[Kind.KV]
    upper = Holding(None if rows.indices is None else rows.indices[:size].clone(), rows.locks)
    rows.indices = None if rows.indices is None else rows.indices[size:].clone()
    return {Kind.KV: upper, Kind.STATE: Holding()}
