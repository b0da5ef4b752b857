"""What cases measure with: memory while a call runs, calls of a driver and their steps."""

from __future__ import annotations

import os

from hicache_conformance.cases.budget import transient_bytes
from hicache_conformance.harness.driver_calls import CallSteps

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
