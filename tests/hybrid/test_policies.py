"""The decisions that depend on nothing but their arguments, as tables."""

from __future__ import annotations

import pytest

from hicache_storage.hybrid import PrefetchRules
from hicache_storage.spec import ConfigError


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(0, 1.0), (1024, 1.25), (512, 1.125), (4096, 2.0), (2**20, 3.0), (10_240, 3.0), (8192, 3.0)],
)
def test_the_timeout_grows_to_its_maximum(tokens, seconds):
    rules = PrefetchRules(policy="timeout", maximum_seconds=3.0)
    assert rules.stops_waiting(seconds, tokens)
    assert not rules.stops_waiting(seconds - 1e-6, tokens)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: PrefetchRules(threshold_tokens=-1), "threshold_tokens"),
        (lambda: PrefetchRules(occupancy=0.0), "occupancy"),
        (lambda: PrefetchRules(occupancy=1.5), "occupancy"),
        (lambda: PrefetchRules(base_seconds=-1), "base_seconds"),
        (lambda: PrefetchRules(maximum_seconds=float("nan")), "maximum_seconds"),
        (lambda: PrefetchRules(seconds_per_1024_tokens=-0.1), "seconds_per_1024_tokens"),
    ],
)
def test_values_out_of_range_are_named(make, name):
    with pytest.raises(ConfigError, match=name):
        make()
