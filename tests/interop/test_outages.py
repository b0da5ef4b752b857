"""SGLang's controllers on a driver whose servers go, hang, are away at first, or are full.

What any driver has to do is asked of these by the other modules, on the same kind of servers
(fixture `storage`).
"""

from __future__ import annotations

import time

import pytest

from examples.mooncake_cluster import DevCluster
from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens, tp, with_mamba
from tests.interop.stores import MooncakeStore, opened

pytestmark = pytest.mark.interop

DEADLINE_SECONDS = 2.0
RECOVERY_SECONDS = 60.0
PAGES = 6
MAMBA = {"mamba": 1}


@pytest.fixture(params=["hf3fs", "mooncake"])
def store(request, tmp_path):
    """A store with servers of the test's own."""
    with opened(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def attach(ranks):
    """Makes ranks with KV and Mamba states on a store."""

    def attached(store, make_pools=mha_pools, layout="page_first", parallel=None, **options):
        rank = ranks(with_mamba(make_pools(layout), layout), **(parallel or {}))
        if store.driver == "mooncake":
            options = {"rpc_timeout_seconds": 1, **options}
        rank.attach(store.driver, store.options | options, deadline_seconds=DEADLINE_SECONDS)
        return rank

    return attached


def back_up(rank, number=0):
    """Write a prompt that has no page in common with one of another number."""
    return rank.backup(tokens(PAGES, start=500 * number), seed=number + 1, checkpoints=MAMBA)


def works_again(rank, number):
    """Whether pages go out and come back, as soon as the driver has noticed that it can."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        rank.wipe()
        backup = back_up(rank, number)
        if backup.completed_tokens == PAGES * PAGE_SIZE and rank.restores(backup, **MAMBA):
            return True
        time.sleep(0.2)
    return False


def pages_back(rank, backup):
    """Pages of its KV that come back; right ones, where all do."""
    rank.wipe()
    result = rank.prefetch(backup.tokens, windows=MAMBA)
    if result.completed_tokens == len(backup.tokens):
        assert rank.delivered(result, backup)
        assert rank.delivered(result, backup, "mamba")
    return result.completed_tokens // PAGE_SIZE


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("make_pools", [mha_pools, mla_pools])
def test_each_page_is_stored_once(attach, store, make_pools, layout):
    """K and V of a page together, and the states of a checkpoint."""
    rank = attach(store, make_pools, layout)
    backup = back_up(rank)
    assert store.pages() == PAGES + 1
    assert rank.restores(backup, **MAMBA)
    assert rank.bridge.refused_calls == 0


@pytest.mark.parametrize("outage", [0, 1], ids=["killed", "suspended"])
def test_while_a_server_is_away_everything_is_a_miss(attach, store, outage):
    rank = attach(store)
    backup = back_up(rank)
    assert rank.restores(backup, **MAMBA)
    with store.outages()[outage]:
        rank.wipe()
        assert rank.prefetch(backup.tokens, windows=MAMBA).hit_tokens == 0
        assert back_up(rank, 1).completed_tokens == 0
        assert rank.all_alive()
    assert works_again(rank, 2)
    # Mooncake's master knows of no page after it was killed.
    assert store.driver == "mooncake" or rank.restores(backup, **MAMBA)


def test_a_server_that_is_away_at_first_is_found_later(attach, store, caplog):
    with store.outages()[0]:
        rank = attach(store)
        assert "cannot be opened yet" in caplog.text
        assert back_up(rank).completed_tokens == 0
    assert works_again(rank, 1)


def test_two_engines_share_what_one_of_them_has_written(attach, store):
    """Replicated KV is written once; each rank has states of its own."""
    both = [attach(store, mla_pools, parallel=tp(number)) for number in range(2)]
    backups = [
        rank.backup(tokens(PAGES), seed=number + 1, checkpoints=MAMBA)
        for number, rank in enumerate(both)
    ]
    assert store.pages() == PAGES + 2
    for rank, backup in zip(both, backups, strict=True):
        rank.wipe()
        result = rank.prefetch(tokens(PAGES), windows=MAMBA)
        assert result.completed_tokens == PAGES * PAGE_SIZE
        assert rank.delivered(result, backups[0])
        assert rank.delivered(result, backup, "mamba")


@pytest.mark.parametrize("store", ["hf3fs"], indirect=True)
def test_more_prompts_than_the_file_holds(attach, store):
    """Old pages make room for new ones; what comes back is right, and never more than fits."""
    rank = attach(store, file_size="32KiB")
    backups = []
    for number in range(8):
        rank.wipe()
        backups.append(back_up(rank, number))
    assert backups[-1].completed_tokens == PAGES * PAGE_SIZE
    assert rank.restores(backups[-1], **MAMBA)
    hits = sum(pages_back(rank, backup) for backup in backups)
    # A page of 1.5 KiB and its envelope take four sectors.
    assert PAGES <= hits <= (32 << 10) // 2048


def test_more_prompts_than_mooncakes_memory(ranks):
    """What does not fit is not stored, what comes back is right, and the store stays in use."""
    with DevCluster(1, 16 << 20, lease_milliseconds=50) as cluster:
        rank = ranks(with_mamba(mha_pools("page_first", heads=64, layers=32)))
        options = {**cluster.options, "rpc_timeout_seconds": 1, "wait_seconds": 1}
        rank.attach("mooncake", options, deadline_seconds=DEADLINE_SECONDS)
        page_bytes = 2 * 32 * 64 * 16 * 2 * PAGE_SIZE
        backups = []
        for number in range(16):
            rank.wipe()
            backups.append(back_up(rank, number))
        stored = sum(backup.completed_tokens for backup in backups) // PAGE_SIZE
        assert stored * page_bytes > 2 * (16 << 20)
        hits = sum(pages_back(rank, backup) for backup in backups)
        assert 0 < hits <= (16 << 20) // page_bytes
        assert works_again(rank, 20)


def test_a_mooncake_store_that_dies_takes_its_pages_with_it(attach):
    with DevCluster(1, 32 << 20, lease_milliseconds=30_000) as cluster:
        rank = attach(MooncakeStore(cluster))
        backup = back_up(rank)
        cluster.stores[0].kill()
        rank.wipe()
        assert rank.prefetch(backup.tokens, windows=MAMBA).completed_tokens == 0
        assert rank.all_alive()
        cluster.stores[0].start()
        assert works_again(rank, 2)


def test_an_engine_that_lends_its_own_memory(attach):
    """No store service: the pages are in the engine that attached."""
    with DevCluster(0) as cluster:
        rank = attach(MooncakeStore(cluster), global_segment_size="32mb")
        assert rank.restores(back_up(rank), **MAMBA)
