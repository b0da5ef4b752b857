"""The page hashes of nodes, made when they are first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.hybrid.hashing import page_hashes
from hicache_storage.hybrid.radix.units import tokens_of

if TYPE_CHECKING:
    from hicache_storage.hybrid.radix.nodes import Node


def hashes_of(node: Node, page_size: int, *, bigram: bool = False) -> tuple[str, ...]:
    """Keys of the pages of a node; for a root the seed of its namespace, if it has one."""
    missing: list[Node] = []
    known = node
    while known.hashes is None:
        missing.append(known)
        assert known.parent is not None
        known = known.parent
    prior = known.hashes[-1] if known.hashes else None
    for each in reversed(missing):
        each.hashes = tuple(page_hashes(tokens_of(each.tokens, bigram=bigram), page_size, prior=prior, bigram=bigram))
        prior = each.hashes[-1]
    assert node.hashes is not None
    return node.hashes


def prefix_hashes(node: Node, page_size: int, *, bigram: bool = False) -> list[str]:
    """Keys of all pages of the sequence up to the end of a node."""
    return [key for each in reversed(list(node.upward())) for key in hashes_of(each, page_size, bigram=bigram)]
