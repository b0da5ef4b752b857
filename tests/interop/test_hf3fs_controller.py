"""SGLang's controllers, through the bridge, on the 3FS driver: what happens when its metadata
server goes, or its file is full.

What any driver has to do there is asked of this one by the other modules, on the same kind of
server (fixture `storage`).
"""

from __future__ import annotations

import os
import signal

import pytest

from hicache_conformance.injectors.servers import stand_still
from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens
from tests.interop.hybrids import MAMBA, PAGES, comes_back, hybrid, pages_back, works_again
from tests.interop.metadata import live

pytestmark = pytest.mark.interop

DEADLINE_SECONDS = 2.0


@pytest.fixture
def attached(ranks, server, tmp_path):
    """Makes ranks on one directory and one server."""

    def attach(pools, parallel=None, *, file_size="8MiB", **extra):
        rank = ranks(pools, **(parallel or {}))
        config = {
            "path": str(tmp_path / "store"),
            "metadata_url": server.url,
            "file_size": file_size,
            "engine": "posix",
        }
        rank.attach("hf3fs", config, deadline_seconds=DEADLINE_SECONDS, **extra)
        return rank

    return attach


@pytest.mark.parametrize("make_pools", [mha_pools, mla_pools])
def test_each_pool_has_a_scope_on_the_server(attached, server, make_pools):
    """K and V of a page share a slot."""
    rank = attached(hybrid(make_pools))
    backup = rank.backup(tokens(PAGES), checkpoints=MAMBA)
    counts = {
        name.removeprefix("0:").partition("-")[0]: pages for name, pages in live(server.url).items()
    }
    assert counts == {"kv": PAGES, "mamba": 1}
    assert comes_back(rank, backup)


def test_pages_survive_a_kill_of_the_server(attached, server):
    rank = attached(hybrid(mha_pools))
    backup = rank.backup(tokens(PAGES), checkpoints=MAMBA)
    server.kill()
    server.start()
    assert works_again(rank, 500)
    assert comes_back(rank, backup)


def test_without_a_server_everything_is_a_miss_until_it_is_back(attached, server):
    rank = attached(hybrid(mha_pools))
    backup = rank.backup(tokens(PAGES), checkpoints=MAMBA)
    server.kill()
    rank.wipe()
    assert rank.prefetch(backup.tokens, windows=MAMBA).hit_tokens == 0
    assert rank.backup(tokens(PAGES, start=500), checkpoints=MAMBA).completed_tokens == 0
    assert rank.all_alive()
    server.start()
    assert works_again(rank, 900)
    assert comes_back(rank, backup)


def test_while_the_server_hangs_everything_is_a_miss(attached, server):
    rank = attached(hybrid(mha_pools))
    backup = rank.backup(tokens(PAGES), checkpoints=MAMBA)
    os.killpg(server.process.pid, signal.SIGSTOP)
    stand_still(server.process.pid)
    try:
        rank.wipe()
        assert rank.prefetch(backup.tokens, windows=MAMBA).hit_tokens == 0
        assert rank.backup(tokens(PAGES, start=500), checkpoints=MAMBA).completed_tokens == 0
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
    assert rank.all_alive()
    assert works_again(rank, 900)
    assert comes_back(rank, backup)


def test_a_server_that_is_away_at_first_is_found_later(attached, server, caplog):
    server.kill()
    rank = attached(hybrid(mha_pools))
    assert "cannot be opened yet" in caplog.text
    assert rank.backup(tokens(PAGES), checkpoints=MAMBA).completed_tokens == 0
    server.start()
    assert works_again(rank, 500)


def test_more_prompts_than_the_file_holds(attached):
    """Old pages make room for new ones; what comes back is right, and never more than fits."""
    rank = attached(hybrid(mha_pools), file_size="32KiB")
    backups = []
    for number in range(8):
        rank.wipe()
        backups.append(
            rank.backup(tokens(PAGES, start=100 * number), seed=number + 1, checkpoints=MAMBA)
        )
    assert backups[-1].completed_tokens == PAGES * PAGE_SIZE
    assert comes_back(rank, backups[-1])
    hits = sum(pages_back(rank, backup) for backup in backups)
    # A page of 1.5 KiB and its envelope take four sectors.
    assert PAGES <= hits <= (32 << 10) // 2048


def test_two_engines_share_what_one_of_them_has_written(attached):
    """Replicated KV is written once; each rank has states of its own."""
    both = [
        attached(
            hybrid(mla_pools),
            {"tp_rank": number, "tp_size": 2, "attn_tp_rank": number, "attn_tp_size": 2},
        )
        for number in range(2)
    ]
    backups = [
        rank.backup(tokens(PAGES), seed=number + 1, checkpoints=MAMBA)
        for number, rank in enumerate(both)
    ]
    for rank, backup in zip(both, backups, strict=True):
        rank.wipe()
        result = rank.prefetch(tokens(PAGES), windows=MAMBA)
        assert result.completed_tokens == PAGES * PAGE_SIZE
        assert rank.delivered(result, backups[0])
        assert rank.delivered(result, backup, "mamba")
