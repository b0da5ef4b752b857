"""Property tests of the state machine."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.metadata_server.histories import History


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False), slots=st.integers(1, 12), keys=st.integers(1, 20))
def test_random_histories(chance, slots, keys):
    history = History(chance, slots, keys)
    for _ in range(60):
        history.step()
    history.check_nothing_lost()


@pytest.mark.parametrize("seed", range(6))
def test_long_histories(seed):
    history = History(random.Random(seed), 8, 14)
    for _ in range(2500):
        history.step()
    history.check_nothing_lost()
