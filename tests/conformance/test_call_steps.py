"""Steps of a call, which cases count."""

from __future__ import annotations

import os

from hicache_conformance.harness.driver_calls import CallSteps


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
