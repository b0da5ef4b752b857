"""Property tests of the state machine."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_metadata_server.core import slot_table
from tests.metadata_server.histories import History


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False), slots=st.integers(1, 12), keys=st.integers(1, 20))
def test_random_histories(chance, slots, keys):
    history = History(chance, slots, keys)
    for _ in range(60):
        history.step()
    history.check_nothing_lost()


@pytest.mark.parametrize("chunk", [4, slot_table.CHUNK])
@pytest.mark.parametrize(("slots", "keys"), [(8, 14), (24, 40)])
@pytest.mark.parametrize("seed", range(3))
def test_long_histories(monkeypatch, seed, slots, keys, chunk):
    """With chunks of the lease log so small, they are cleaned and merged all the time."""
    monkeypatch.setattr(slot_table, "CHUNK", chunk)
    history = History(random.Random(seed), slots, keys)
    for _ in range(2500):
        history.step()
    history.check_nothing_lost()
