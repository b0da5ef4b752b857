"""SGLang's controllers, through the bridge, on the Mooncake driver: what happens when its master or
its store goes, or its memory is full.

What any driver has to do there is asked of this one by the other modules, on the same kind of
cluster (fixture `storage`).
"""

from __future__ import annotations

import urllib.request

import pytest

from examples.mooncake_cluster import DevCluster
from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens
from tests.interop.hybrids import MAMBA, PAGES, comes_back, hybrid, pages_back, works_again

pytestmark = pytest.mark.interop

DEADLINE_SECONDS = 2.0


@pytest.fixture
def cluster():
    """A master and a store of the test's own, which it may kill."""
    with DevCluster(1, 32 << 20, lease_milliseconds=30_000) as running:
        yield running


@pytest.fixture
def attach(ranks):
    """Makes ranks on a cluster."""

    def attached(cluster, pools, parallel=None, **options):
        rank = ranks(pools, **(parallel or {}))
        rank.attach(
            "mooncake",
            {**cluster.options, "rpc_timeout_seconds": 1, **options},
            deadline_seconds=DEADLINE_SECONDS,
        )
        return rank

    return attached


def objects(cluster):
    """How many objects the master knows."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{cluster._metrics}/metrics", timeout=10
    ) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith("master_key_count")
    )


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("make_pools", [mha_pools, mla_pools])
def test_each_page_is_one_object(attach, cluster, make_pools, layout):
    """K and V of a page, and the states of a checkpoint."""
    rank = attach(cluster, hybrid(make_pools, layout))
    backup = rank.backup(tokens(PAGES), checkpoints=MAMBA)
    assert objects(cluster) == PAGES + 1
    assert comes_back(rank, backup)
    assert rank.bridge.refused_calls == 0


def test_without_a_master_everything_is_a_miss_until_there_is_one(attach, cluster):
    rank = attach(cluster, hybrid(mha_pools))
    backup = rank.backup(tokens(PAGES), checkpoints=MAMBA)
    assert comes_back(rank, backup)
    cluster.master.kill()
    rank.wipe()
    assert rank.prefetch(backup.tokens, windows=MAMBA).hit_tokens == 0
    assert rank.backup(tokens(PAGES, start=500), checkpoints=MAMBA).completed_tokens == 0
    assert rank.all_alive()
    cluster.master.start()
    assert works_again(rank, 900)


def test_while_the_master_hangs_everything_is_a_miss(attach, cluster):
    rank = attach(cluster, hybrid(mha_pools))
    backup = rank.backup(tokens(PAGES), checkpoints=MAMBA)
    cluster.master.suspend()
    rank.wipe()
    assert rank.prefetch(backup.tokens, windows=MAMBA).hit_tokens == 0
    assert rank.backup(tokens(PAGES, start=500), checkpoints=MAMBA).completed_tokens == 0
    assert rank.all_alive()
    cluster.master.resume()
    assert works_again(rank, 900)


def test_a_master_that_is_away_at_first_is_found_later(attach, cluster, caplog):
    cluster.master.kill()
    rank = attach(cluster, hybrid(mha_pools))
    assert "cannot be opened yet" in caplog.text
    assert rank.backup(tokens(PAGES), checkpoints=MAMBA).completed_tokens == 0
    cluster.master.start()
    assert works_again(rank, 500)


def test_a_store_that_dies_takes_its_pages_with_it(attach, cluster):
    rank = attach(cluster, hybrid(mha_pools))
    backup = rank.backup(tokens(PAGES), checkpoints=MAMBA)
    cluster.stores[0].kill()
    rank.wipe()
    assert rank.prefetch(backup.tokens, windows=MAMBA).completed_tokens == 0
    assert rank.all_alive()
    cluster.stores[0].start()
    assert works_again(rank, 900)


def test_more_prompts_than_memory(attach):
    """What does not fit is not stored, what comes back is right, and the store stays in use."""
    with DevCluster(1, 16 << 20, lease_milliseconds=50) as cluster:
        rank = attach(cluster, hybrid(mha_pools, heads=64, layers=32), wait_seconds=1)
        page_bytes = 2 * 32 * 64 * 16 * 2 * PAGE_SIZE
        backups = []
        for number in range(16):
            rank.wipe()
            backups.append(
                rank.backup(tokens(PAGES, start=100 * number), seed=number + 1, checkpoints=MAMBA)
            )
        assert sum(backup.completed_tokens for backup in backups) * page_bytes // PAGE_SIZE > 2 * (
            16 << 20
        )
        hits = sum(pages_back(rank, backup) for backup in backups)
        assert 0 < hits <= (16 << 20) // page_bytes
        assert works_again(rank, 5000)


def test_an_engine_that_lends_its_own_memory(attach):
    """No store service: the pages are in the engine that attached."""
    with DevCluster(0) as cluster:
        rank = attach(cluster, hybrid(mha_pools), global_segment_size="32mb")
        assert comes_back(rank, rank.backup(tokens(PAGES), checkpoints=MAMBA))


def test_two_engines_share_what_one_of_them_has_written(attach, cluster):
    """Replicated KV is written once; each rank has states of its own."""
    both = [
        attach(
            cluster,
            hybrid(mla_pools),
            {"tp_rank": number, "tp_size": 2, "attn_tp_rank": number, "attn_tp_size": 2},
        )
        for number in range(2)
    ]
    backups = [
        rank.backup(tokens(PAGES), seed=number + 1, checkpoints=MAMBA)
        for number, rank in enumerate(both)
    ]
    assert objects(cluster) == PAGES + 2
    for rank, backup in zip(both, backups, strict=True):
        rank.wipe()
        result = rank.prefetch(tokens(PAGES), windows=MAMBA)
        assert result.completed_tokens == PAGES * PAGE_SIZE
        assert rank.delivered(result, backups[0])
        assert rank.delivered(result, backup, "mamba")
