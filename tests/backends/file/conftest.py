from __future__ import annotations

import pytest

from tests.backends.file.harness import Hurried, Rig, opened_rigs

rig = opened_rigs(Rig)


@pytest.fixture
def guarded(rig):
    """Open rigs behind a deadline, whose driver is `bare`."""
    rigs = list[Rig]()

    def make(**options: object) -> Rig:
        made = rig(**options)
        made.bare, made.storage = made.storage, Hurried(made.storage)
        made.storage.register_mem_host_pool_v2(made.pool, "kv")
        made.storage.open()
        rigs.append(made)
        return made

    yield make
    for made in rigs:
        # What was left behind has ended when this returns.
        made.storage.be_patient()
        made.storage.close()
