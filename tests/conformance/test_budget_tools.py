"""What cases measure with: memory while a call runs, calls of a driver and their steps."""

from __future__ import annotations

import os

import pytest

from hicache_conformance.cases.budget import forecast
from hicache_conformance.harness.driver_calls import CallSteps
from hicache_conformance.harness.memory_peak import transient_bytes

MIB = 1 << 20


def test_what_stays_and_a_reused_buffer_are_not_counted():
    kept, buffers = [], []

    def reuse():
        if not buffers:
            buffers.append(bytearray(32 * MIB))
        else:
            buffers[0][:] = memoryview(buffers[0])

    assert transient_bytes([lambda: kept.append(bytearray(32 * MIB))] * 2) < 4 * MIB
    assert transient_bytes([reuse] * 3) < 4 * MIB


class Lister:
    """Looks through its directory in each set, and then writes."""

    def __init__(self, home):
        self.home = home

    def batch_set_v2(self):
        with os.scandir(self.home) as entries:
            names = [entry.name for entry in entries if entry.is_file()]
        (self.home / f"page{len(names)}").touch()

    delete = clear = batch_set_v2


def test_the_steps_of_a_set_do_not_grow_with_what_lies_beside_it(tmp_path):
    store, counts = Lister(tmp_path), []
    steps = CallSteps(store, lambda: None)
    steps.at = 0
    for files in (0, 100):
        for number in range(files):
            (tmp_path / f"other{number}").touch()
        store.batch_set_v2()
        counts.append(steps.count)
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize(
    ("taken", "exponent", "seconds"),
    [
        *(
            (
                {size: (size / 1000) ** growth for size in (1000, 2000, 4000, 8000, 16000)},
                max(1.0, growth),
                16**growth * (250_000 / 16_000) ** max(1.0, growth),
            )
            for growth in (0.5, 1.0, 1.5, 2.0)
        ),
        # Of the last two calls alone the forecast would be 917 s; the driver is linear.
        ({8000: 1.3, 16000: 2.6, 32000: 5.2, 64000: 10.4}, 1.0, 40.6),
        # Times that do not grow with the number of keys are the machine's.
        ({2000: 0.004, 4000: 0.19, 8000: 0.11, 16000: 0.4}, 1.0, None),
    ],
)
def test_a_large_call_is_forecast_from_the_growth_of_smaller_ones(taken, exponent, seconds):
    seconds_for_all, fitted = forecast(taken)
    assert fitted == pytest.approx(exponent)
    assert seconds is None or seconds_for_all == pytest.approx(seconds, rel=0.01)


def test_one_call_that_was_disturbed_is_no_growth():
    assert forecast({8000: 1.3, 16000: 2.6, 32000: 2.6, 64000: 10.4})[0] < 80
