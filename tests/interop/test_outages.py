"""SGLang's controllers on a driver whose servers go, hang, or are away at first.

What any driver has to do is asked of these by the other modules, on the same kind of servers
(fixture `storage`).
"""

from __future__ import annotations

import itertools
import time

import pytest

from tests.interop.engine import PAGE_SIZE, mha_pools, mla_pools, tokens, with_mamba
from tests.interop.stores import opened

pytestmark = pytest.mark.interop

DEADLINE_SECONDS = 2.0
RECOVERY_SECONDS = 60.0
PAGES = 6
MAMBA = {"mamba": 1}
MODELS = itertools.count()


@pytest.fixture(scope="module", params=["hf3fs", "mooncake"])
def store(request, tmp_path_factory):
    """A store with servers of the module's own, which stand again at the end of each test."""
    with opened(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture
def attach(ranks, store):
    """Makes ranks with KV and Mamba states on the store, each of a model of its own."""

    def attached(make_pools=mha_pools, layout="page_first"):
        rank = ranks(with_mamba(make_pools(layout), layout))
        options = {"rpc_timeout_seconds": 1} if store.driver == "mooncake" else {}
        rank.attach(
            store.driver,
            store.options | options,
            model=f"model {next(MODELS)}",
            deadline_seconds=DEADLINE_SECONDS,
        )
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


# The first of the module: a client of Mooncake that was connected is kept for the next storage.
def test_a_server_that_is_away_at_first_is_found_later(attach, store, caplog):
    with store.outages()[0]:
        rank = attach()
        assert "cannot be opened yet" in caplog.text
        assert back_up(rank).completed_tokens == 0
    assert works_again(rank, 1)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("make_pools", [mha_pools, mla_pools])
def test_each_page_is_stored_once(attach, store, make_pools, layout):
    """K and V of a page together, and the states of a checkpoint."""
    rank, before = attach(make_pools, layout), store.pages()
    backup = back_up(rank)
    assert store.pages() == before + PAGES + 1
    assert rank.restores(backup, **MAMBA)
    assert rank.bridge.refused_calls == 0


@pytest.mark.parametrize("outage", [0, 1], ids=["killed", "suspended"])
def test_while_a_server_is_away_everything_is_a_miss(attach, store, outage):
    rank = attach()
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
