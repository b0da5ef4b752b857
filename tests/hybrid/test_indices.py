"""Spans of slots: joined, and refused where they contradict themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.hybrid import HybridIndices
from hicache_storage.spec import InvalidTransferError
from tests.hybrid.stack import MAMBA, PAGE, empty


def span(pages, ends=(), first=0):
    side = (
        ({MAMBA: torch.arange(first, first + len(ends))}, {MAMBA: tuple(ends)})
        if ends
        else ({}, {})
    )
    return HybridIndices(torch.arange(first * PAGE, (first + pages) * PAGE), *side)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_joined_spans_are_one(lengths, data):
    """With their states, which may also be moved alone, behind the span that they belong to."""
    parts, first, states, ends, before = [], 0, 0, [], 0
    for pages in lengths:
        own = sorted(data.draw(st.sets(st.integers(0, pages))))
        side = ({MAMBA: torch.arange(states, states + len(own))}, {MAMBA: tuple(own)})
        parts.append(
            HybridIndices(torch.arange(first, first + pages * PAGE), *(side if own else ({}, {})))
        )
        ends += [before + end for end in own]
        first, states, before = first + pages * PAGE, states + len(own), before + pages
    whole = HybridIndices.concat(parts, PAGE)
    assert whole.anchor.tolist() == list(range(first))
    assert whole.side.get(MAMBA, whole.anchor[:0]).tolist() == list(range(states))
    assert whole.endpoints.get(MAMBA, ()) == tuple(ends)
    assert len(parts) > 1 or whole is parts[0]


def test_nothing_is_false():
    assert not empty()
    assert span(1)
    assert span(0, (0,))


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
