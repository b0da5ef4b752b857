"""The tree and its LRU lists by themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.hybrid import namespace_seed, page_hashes
from hicache_storage.hybrid.radix.slots import LRUList
from hicache_storage.hybrid.radix.tree import RadixTree, SlotKind

PAGE = 2


def grown(*sequences, namespace=None):
    """A tree with these sequences of whole pages, split where they part."""
    tree = RadixTree(PAGE)
    for tokens in sequences:
        root = tree.root(namespace)
        node, known = tree.find(root, tokens)
        if known < node.end:
            node = tree.split(node, known)
        if known < len(tokens):
            tree.append(node, tokens[known:])
    return tree


@given(
    st.lists(
        st.lists(st.sampled_from([(1, 2), (1, 3), (2, 1)]), min_size=1, max_size=6),
        min_size=1,
        max_size=8,
    )
)
def test_what_was_put_in_is_found_as_far_as_it_goes(chains):
    sequences = [tuple(token for page in pages for token in page) for pages in chains]
    tree = grown(*sequences[:-1])
    wanted = sequences[-1]

    def common(other):
        ends = range(0, min(len(other), len(wanted)) + 1, PAGE)
        return max(end for end in ends if other[:end] == wanted[:end])

    node, known = tree.find(tree.root(None), wanted)
    assert known == max(map(common, sequences[:-1]), default=0)
    spelled = tuple(token for each in reversed(list(node.upward())) for token in each.tokens)
    assert spelled[:known] == wanted[:known]
    assert node.start < known <= node.end or known == node.end == 0


def test_a_split_shares_rows_locks_and_hashes_and_leaves_the_state_below():
    tree = grown((1, 2, 3, 4, 5, 6))
    node, _ = tree.find(tree.root(None), (1, 2, 3, 4, 5, 6))
    node.device[SlotKind.KV].indices, node.device[SlotKind.KV].locks = torch.arange(10, 16), 2
    node.device[SlotKind.STATE].indices, node.device[SlotKind.STATE].locks = torch.tensor([7]), 1
    node.hits, node.writing, node.stored = 3, 1, {SlotKind.KV, SlotKind.STATE}
    keys = tree.hashes(node)
    upper = tree.split(node, 4)
    assert (upper.tokens, upper.start, upper.end) == ((1, 2, 3, 4), 0, 4)
    assert (node.tokens, node.start, node.end) == ((5, 6), 4, 6)
    assert node.parent is upper
    assert upper.device[SlotKind.KV].indices.tolist() == [10, 11, 12, 13]
    assert node.device[SlotKind.KV].indices.tolist() == [14, 15]
    assert [each.device[SlotKind.KV].locks for each in (upper, node)] == [2, 2]
    assert [each.device[SlotKind.STATE].locks for each in (upper, node)] == [0, 1]
    assert upper.device[SlotKind.STATE].indices is None
    assert upper.host[SlotKind.KV].indices is None
    assert (upper.hashes, node.hashes) == (keys[:2], keys[2:])
    assert (upper.hits, upper.writing, upper.stored, node.stored) == (
        3,
        1,
        {SlotKind.KV},
        {SlotKind.KV, SlotKind.STATE},
    )
    assert tree.node(upper.id) is upper


def test_hashes_are_those_of_the_sequence_in_its_namespace():
    seed = namespace_seed("adapter")
    for namespace in (None, seed):
        tree = grown((1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 5, 6), namespace=namespace)
        for tokens in ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 5, 6)):
            node, _ = tree.find(tree.root(namespace), tokens)
            assert tree.prefix_hashes(node) == page_hashes(tokens, PAGE, prior=namespace)
        assert tree.prefix_hashes(tree.root(namespace)) == []
    root = tree.root(None)
    assert tree.find(root, (1, 2)) == (root, 0)


def test_a_namespace_that_nobody_uses_is_forgotten():
    tree = RadixTree(PAGE)
    node = tree.append(tree.root("aa"), (1, 2))
    tree.root("bb")
    assert tree.find(tree.root("aa"), (1, 2)) == (node, 2)
    assert list(tree._roots) == ["aa"]
    tree.remove(node)
    del node
    assert not tree._roots


def path(tree, *ends):
    """Nodes of a chain of pages, one page each."""
    node, nodes = tree.root(None), []
    for end in ends:
        node = tree.append(node, (end, end))
        nodes.append(node)
    return nodes


def order(lru):
    return [node.tokens[0] for node in lru]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_kv_is_used_along_the_path(tier):
    freed = []
    tree, lru = RadixTree(PAGE), LRUList(tier, SlotKind.KV, freed.append)
    first, second, third = path(tree, 1, 2, 3)
    for node in (first, second, third):
        lru.add(node, torch.tensor([node.id * 2, node.id * 2 + 1]))
    assert order(lru) == [3, 2, 1]
    (other,) = path(tree, 4)
    lru.add(other, torch.tensor([100, 101]))
    lru.touch(second)
    assert order(lru) == [3, 4, 2, 1]
    assert lru.least_recent() is third
    lru.lock(second)
    lru.lock(second)
    lru.unlock(second)
    assert order(lru) == [3, 4]
    assert lru.evictable_slots() == 4
    with pytest.raises(AssertionError, match="locked"):
        lru.drop(second)
    lru.unlock(second)
    assert order(lru) == [3, 4, 2, 1]
    with pytest.raises(AssertionError, match="not locked"):
        lru.unlock(second)
    assert lru.drop(third) == 2
    assert [slots.tolist() for slots in freed] == [[third.id * 2, third.id * 2 + 1]]
    assert lru.slots == 6
    lru.demote(second)
    assert lru.least_recent() is second


def test_a_state_is_used_alone():
    tree, lru = RadixTree(PAGE), LRUList("host", SlotKind.STATE, list)
    first, second, third = path(tree, 1, 2, 3)
    for node in (first, second, third):
        lru.add(node, torch.tensor([node.id]))
    lru.touch(second)
    assert order(lru) == [1, 3, 2]
    lru.lock(first)
    assert [node.host[SlotKind.STATE].locks for node in (first, second, third)] == [1, 0, 0]
    assert lru.least_recent() is third
    assert lru.evictable_slots() == 2
    lru.unlock(first)
    assert order(lru) == [1, 3, 2]
    assert lru.least_recent() is first
