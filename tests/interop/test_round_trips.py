"""Pages that SGLang's controller writes come back byte for byte, into the right pages and no others."""

from __future__ import annotations

import pytest

from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens

pytestmark = pytest.mark.interop

LAYOUTS = ("layer_first", "page_first", "page_first_direct")


@pytest.mark.parametrize("layout", [*LAYOUTS, "page_head"])
def test_mha_pages_come_back(ranks, storage, layout):
    rank = ranks(mha_pools(layout))
    rank.attach(*storage)
    backup = rank.backup(tokens(6))
    assert backup.completed_tokens == 6 * PAGE_SIZE
    rank.wipe()
    result = rank.prefetch(tokens(6))
    assert (result.hit_tokens, result.completed_tokens) == (6 * PAGE_SIZE, 6 * PAGE_SIZE)
    assert rank.delivered(result, backup)
    assert rank.bridge.refused_calls == 0
