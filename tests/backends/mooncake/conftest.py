from __future__ import annotations

import pytest

from examples.mooncake_cluster import DevCluster
from hicache_storage.objects.thread_pool import ThreadPool
from tests.backends.mooncake.harness import Rig


@pytest.fixture(scope="module")
def cluster():
    """A master and two stores that the tests of a module share; none of them hurts it."""
    # However busy the machine is, no lease may end during a read, and no store may seem dead.
    with DevCluster(2, 64 << 20, client_ttl_seconds=60, lease_milliseconds=30_000) as running:
        yield running


@pytest.fixture
def rig(cluster):
    """Open rigs on the cluster; closed at the end."""
    rigs = []

    def make(options=None, **more):
        made = Rig(cluster.options if options is None else options, **more)
        rigs.append(made)
        return made

    yield make
    for made in rigs:
        made.storage.close()


@pytest.fixture
def alone():
    """A thread pool whose calls do everything in their own thread."""
    thread_pool = ThreadPool("hicache-test")
    thread_pool.close(0)
    return thread_pool
