"""Spans of slots: cut, joined, and refused where they contradict themselves; operations merged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.hybrid import CacheOperation, HybridIndices
from hicache_storage.hybrid.copies.operations import LoadProgress
from hicache_storage.spec import InvalidTransferError
from tests.hybrid.stack import MAMBA, PAGE, empty


def span(pages, ends=(), first=0):
    side = (
        ({MAMBA: torch.arange(first, first + len(ends))}, {MAMBA: tuple(ends)})
        if ends
        else ({}, {})
    )
    return HybridIndices(torch.arange(first * PAGE, (first + pages) * PAGE), *side)


def described(indices):
    return (
        indices.anchor.tolist(),
        {name: slots.tolist() for name, slots in indices.side.items()},
        dict(indices.endpoints),
    )


@given(
    st.integers(0, 8).flatmap(
        lambda pages: st.tuples(
            st.just(pages), st.sets(st.integers(0, pages)), st.integers(0, pages)
        )
    )
)
def test_a_cut_span_is_joined_again(case):
    pages, ends, at = case
    whole = span(pages, sorted(ends))
    head, tail = whole.split(at, PAGE)
    assert head.anchor.numel() == at * PAGE
    assert all(end <= at for found in head.endpoints.values() for end in found)
    assert all(end > 0 for found in tail.endpoints.values() for end in found)
    assert described(HybridIndices.concat([head, tail], PAGE)) == described(whole)


def test_nothing_is_false():
    assert not empty()
    assert span(1)
    assert span(0, (0,))
    assert described(HybridIndices.concat([], PAGE)) == described(empty())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: HybridIndices(torch.arange(4, dtype=torch.int32)),
            "anchor: slots must be one row of int64",
        ),
        (
            lambda: HybridIndices(torch.zeros(2, 2, dtype=torch.int64)),
            "anchor: slots must be one row of int64",
        ),
        (lambda: HybridIndices(torch.arange(4), {MAMBA: torch.arange(1)}), "give both"),
        (lambda: HybridIndices(torch.arange(4), {}, {MAMBA: (1,)}), "give both"),
        (
            lambda: HybridIndices(torch.arange(4), {MAMBA: torch.arange(3)}, {MAMBA: (1, 2)}),
            "3 slots do not fit",
        ),
        (
            lambda: HybridIndices(torch.arange(4), {MAMBA: torch.arange(2)}, {MAMBA: (2, 1)}),
            "do not fit the endpoints",
        ),
        (
            lambda: HybridIndices(torch.arange(4), {MAMBA: torch.arange(1)}, {MAMBA: (-1,)}),
            "do not fit the endpoints",
        ),
        (
            lambda: HybridIndices(torch.arange(4), {MAMBA: torch.arange(1)}, {MAMBA: ()}),
            "do not fit the endpoints",
        ),
    ],
)
def test_contradictions_are_refused(make, message):
    with pytest.raises(InvalidTransferError, match=message):
        make()


def test_one_operation_is_returned_as_it_is():
    operation = CacheOperation(span(1), span(1), [7])
    assert CacheOperation.merge_ops([operation], PAGE) is operation


def test_merged_operations_keep_everything():
    """Of all nodes and pools, also a state that is copied alone behind the span that it belongs
    to."""
    parts = [
        CacheOperation(span(2, (1, 2)), span(2, (1, 2), first=9), [1, 2], priority=3),
        CacheOperation(span(0, (0,), first=5), span(0, (0,), first=6), [3], priority=1),
        CacheOperation(span(1, first=3), span(1, first=4), [4], priority=2),
    ]
    merged = CacheOperation.merge_ops(parts, PAGE)
    assert merged.node_ids == [1, 2, 3, 4]
    assert merged.priority == 1
    assert merged.device.anchor.tolist() == [*range(2 * PAGE), *range(3 * PAGE, 4 * PAGE)]
    assert merged.host.anchor.tolist() == [*range(9 * PAGE, 11 * PAGE), *range(4 * PAGE, 5 * PAGE)]
    assert merged.device.side[MAMBA].tolist() == [0, 1, 5]
    assert merged.host.side[MAMBA].tolist() == [9, 10, 6]
    merged.mark_started(LoadProgress())
    assert all(part.done() for part in parts)
