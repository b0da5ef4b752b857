"""EX-1 to EX-6: the policy arithmetic, exhaustively for small sizes against an oracle that only
restates the rules."""

from __future__ import annotations

import itertools

import pytest

from hicache_storage.spec import (
    InvalidTransferError,
    PoolHitPolicy,
    PoolPresence,
    PoolTransfer,
    common_hit,
)

ALL, TRAILING, GROUPS = (
    PoolHitPolicy.ALL_PAGES,
    PoolHitPolicy.TRAILING_PAGES,
    PoolHitPolicy.BLOCK_GROUPS,
)


def oracle_endpoints(present, policy, window, pages):
    """The rule, word by word: p is legal iff the pages it names all exist."""
    legal = set()
    for p in range(1, pages + 1):
        start = {ALL: 0, TRAILING: max(0, p - max(1, window)), GROUPS: p}[policy]
        if all(present[i] for i in range(start, p)):
            legal.add(p)
    return legal


def presence_maps(pages):
    return list(itertools.product([False, True], repeat=pages))


@pytest.mark.parametrize("pages", range(6))
@pytest.mark.parametrize(
    ("policy", "window"), [(ALL, 1), (TRAILING, 0), (TRAILING, 1), (TRAILING, 2), (TRAILING, 9)]
)
def test_one_side_pool_against_the_oracle(pages, policy, window):
    for kv, side in itertools.product(presence_maps(pages), repeat=2):
        result = common_hit(kv, [PoolPresence("mamba", side, policy, window)])
        common = oracle_endpoints(kv, ALL, 1, pages) & oracle_endpoints(side, policy, window, pages)
        assert result.restorable_prefix_pages == sorted(common)
        assert result.kv_hit_pages == max(common, default=0)
        assert result.extra_pool_hit_pages == {
            "kv": max(oracle_endpoints(kv, ALL, 1, pages), default=0),
            "mamba": max(oracle_endpoints(side, policy, window, pages), default=0),
        }


@pytest.mark.parametrize(
    ("present", "block", "group", "covered"),
    [
        ("11111111", 4, 0, 8),
        ("11110111", 4, 0, 4),
        ("00010001", 4, 1, 8),
        ("00010010", 4, 1, 4),
        ("0011", 4, 2, 4),
        ("111", 4, 0, 0),
        ("1110", 4, 1, 0),
    ],
)
def test_block_groups_report_and_never_lower_the_hit(present, block, group, covered):
    pages = [mark == "1" for mark in present]
    result = common_hit([True] * len(pages), [PoolPresence("swa", pages, GROUPS, 1, block, group)])
    assert result.extra_pool_hit_pages["swa"] == covered
    assert result.kv_hit_pages == len(pages)


@pytest.mark.parametrize(("block", "group"), [(0, 0), (2, 3), (-1, 0), (2, -1)])
def test_block_groups_without_a_geometry_are_refused(block, group):
    transfer = PoolTransfer("swa", hit_policy=GROUPS, block_pages=block, group_pages=group)
    with pytest.raises(InvalidTransferError, match="'swa': block_groups needs"):
        PoolPresence.of(transfer, [])


def test_a_pool_asked_twice_keeps_both_conditions():
    present = [True, False, True]
    result = common_hit(
        [True] * 3, [PoolPresence("swa", present, TRAILING, 1), PoolPresence("swa", present, ALL)]
    )
    assert result.restorable_prefix_pages == [1]
    assert result.extra_pool_hit_pages["swa"] == 1
