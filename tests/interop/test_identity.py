"""Ranks that hold the same bytes read each other's. That others do not is for tests/engines and the
suite."""

from __future__ import annotations

import pytest
import torch

from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens, tp

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_replicated_kv_share(ranks, storage, size):
    """Also with another TP size: latent KV does not depend on it. SGLang does not ask other ranks
    than the first to write; if it did, nothing would be written."""
    writer, other = (
        ranks(mla_pools("page_first"), **tp(0)),
        ranks(mla_pools("page_first"), **tp(size - 1, size)),
    )
    for rank in (writer, other):
        rank.attach(*storage)
    assert other.controller.backup_skip
    keys, indices = other.hashes(tokens(4)), torch.arange(4 * PAGE_SIZE)
    assert other.bridge.batch_set_v1(keys, indices) == [False] * 4
    assert other.bridge.batch_exists(keys) == 0
    backup = writer.backup(tokens(4))
    assert other.restores(backup)
    assert other.bridge.batch_set_v1(keys, indices) == [True] * 4


def test_a_rank_of_two_reads_its_heads_of_what_one_has_stored(ranks, trouble):
    """By `tp_lcm_size`."""
    whole = ranks(mha_pools("page_head", heads=4))
    half = ranks(mha_pools("page_head", heads=2), **tp(1))
    for rank in (whole, half):
        rank.attach("sample", tp_lcm_size=4)
    whole.backup(tokens(4))
    half.wipe()
    result = half.prefetch(tokens(4))
    assert result.completed_tokens == 4 * PAGE_SIZE
    numbers = result.indices["kv"][::PAGE_SIZE] // PAGE_SIZE
    stored, read = (rank.pools.kv.kv_buffer[:, numbers] for rank in (whole, half))
    upper = stored.chunk(2, dim=2)[1]
    assert torch.equal(read.view(torch.uint8), upper.view(torch.uint8))
