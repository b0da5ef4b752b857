"""How many random programs are run: few in the unit suite, `HICACHE_PROGRAMS` times as many and
longer ones in `make fuzz`."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

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


def assert_found(kind) -> None:
    """Programs of a state machine fail before many have been tried.

    A failure that hypothesis cannot repeat counts: where real threads run, a race is lost once."""
    quick = settings(
        programs(0),
        max_examples=600,
        stateful_step_count=40,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        print_blob=False,
    )
    with pytest.raises((AssertionError, RuntimeError, ValueError, KeyError, Flaky)):
        run_state_machine_as_test(kind, settings=quick)
