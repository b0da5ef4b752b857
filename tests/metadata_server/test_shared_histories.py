"""Property tests of the state machine in Redis: it says what the one in memory says, and holds
together after each step."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.metadata_server.redis_servers import redis_server
from tests.metadata_server.shared_histories import SharedHistory

# `make fuzz` sets more.
LONG = int(os.environ.get("HICACHE_SHARED_STEPS", "100"))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("histories")) as server:
        yield server.url


async def run(history, steps):
    await history.begin()
    try:
        for _ in range(steps):
            await history.step()
        await history.check_nothing_lost()
    finally:
        await history.end()


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False), slots=st.integers(1, 12), keys=st.integers(1, 20))
async def test_random_histories(url, chance, slots, keys):
    await run(SharedHistory(chance, slots, keys, url), 30)


@pytest.mark.parametrize("seed", range(3))
async def test_long_histories(url, seed):
    await run(SharedHistory(random.Random(seed), 8, 14, url), LONG)
