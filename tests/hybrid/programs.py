"""How many random programs are run: few in the unit suite, `HICACHE_PROGRAMS` times as many and
longer ones in `make fuzz`."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FACTOR = int(os.environ.get("HICACHE_PROGRAMS", "1"))
SECONDS = 300 * FACTOR
"""After which a test of programs has failed."""

PICKS = st.integers(0, 63)
"""Which one, of however many there are. How many depends on how far other threads are, and what is
drawn must not."""


def programs(examples: int) -> settings:
    """Settings for so many programs in the unit suite."""
    return settings(
        max_examples=max(1, examples * FACTOR),
        stateful_step_count=30 if FACTOR == 1 else 60,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def machine(kind, examples: int):
    """The test case of a state machine, to be run with so many programs in the unit suite."""
    case = kind.TestCase
    case.settings = programs(examples)
    return pytest.mark.timeout(SECONDS)(case)
