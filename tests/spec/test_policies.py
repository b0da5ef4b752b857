"""The policy arithmetic beside the suite's `ExistenceCases`, which compare it with an oracle."""

from __future__ import annotations

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
