"""Prompts of a model with KV and Mamba states, on a driver whose outside world comes and goes."""

from __future__ import annotations

import time

from tests.interop.engine import PAGE_SIZE, mamba_pool, tokens

PAGES = 6
MAMBA = {"mamba": 1}
RECOVERY_SECONDS = 60.0


def hybrid(make_pools, layout="page_first", **options):
    """Pools of KV, and of states beside it."""
    pools = make_pools(layout, **options)
    pools.side["mamba"] = mamba_pool(layout)
    return pools


def comes_back(rank, backup):
    """Whether all of it comes back, after the host has evicted everything."""
    rank.wipe()
    result = rank.prefetch(backup.tokens, windows=MAMBA)
    return (
        result.completed_tokens == len(backup.tokens)
        and rank.delivered(result, backup)
        and rank.delivered(result, backup, "mamba")
    )


def pages_back(rank, backup):
    """Pages of its KV that come back, after the host has evicted everything; right ones, where all
    do."""
    rank.wipe()
    result = rank.prefetch(backup.tokens, windows=MAMBA)
    if result.completed_tokens == len(backup.tokens):
        assert rank.delivered(result, backup)
        assert rank.delivered(result, backup, "mamba")
    return result.completed_tokens // PAGE_SIZE


def works_again(rank, start):
    """Whether pages go out and come back, as soon as the driver has noticed that it can."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        rank.wipe()
        backup = rank.backup(tokens(PAGES, start=start), checkpoints=MAMBA)
        if backup.completed_tokens == PAGES * PAGE_SIZE and comes_back(rank, backup):
            return True
        time.sleep(0.2)
    return False
