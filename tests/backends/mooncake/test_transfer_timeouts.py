"""Timeouts of transfers that make no progress."""

from __future__ import annotations

import os

import pytest

from examples.mooncake_cluster import DevCluster
from hicache_backends.mooncake.client import library
from tests.backends.mooncake.harness import Rig, chain
from tests.support.waiting import eventually

DEADLINE_SECONDS = 1.5
PROGRESS, STATUS = library.TRANSFER_TIMEOUTS


@pytest.fixture(autouse=True)
def no_limits_set(monkeypatch):
    for name in library.TRANSFER_TIMEOUTS:
        # Set first, so that it is taken back where it was missing.
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def test_what_the_operator_has_set_stays(monkeypatch):
    monkeypatch.setenv(PROGRESS, "77")
    library.set_transfer_timeouts()
    assert (os.environ[PROGRESS], os.environ[STATUS]) == ("77", "3")


def test_a_store_that_hangs_for_good_keeps_no_thread(monkeypatch):
    """The driver's limit counts for a library that is loaded already, and what a get has left
    behind comes back by it."""
    monkeypatch.setattr(library, "TRANSFER_TIMEOUTS", dict.fromkeys(library.TRANSFER_TIMEOUTS, "1"))
    with DevCluster(1, 32 << 20, client_ttl_seconds=60, lease_milliseconds=60_000) as cluster:
        rig = Rig(
            cluster.options, deadline=DEADLINE_SECONDS, components=(32 << 10, 32 << 10), pages=4
        )
        keys = chain("hang", 4)
        assert rig.put(keys) == [True] * 4
        cluster.stores[0].suspend()
        assert rig.get(keys) == [None] * 4
        eventually(lambda: not rig.lent_buffers)
        cluster.stores[0].resume()
        rig.storage.close()
