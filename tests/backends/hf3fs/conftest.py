from __future__ import annotations

import os

import pytest

from tests.backends.file.harness import opened_rigs
from tests.backends.hf3fs.harness import Rig
from tests.metadata_server import servers
from tests.support.metadata import Served

SERVE = (
    f"{servers.SERVE} --store sqlite:///{{tmp}}/m.db --quarantine-seconds 0.05 --lease-seconds 1"
)
LEASE_SECONDS = 10.0
"""More than a busy machine takes from a reservation to its commit."""


rig = opened_rigs(Rig)


@pytest.fixture(params=["local", "remote"])
def mine(request, rig):
    """Storages on one store, without and with a server."""
    if request.param == "remote":
        url = request.getfixturevalue("kept_server").url
        return lambda **options: rig(
            **{"metadata_url": url, "lease_seconds": LEASE_SECONDS, **options}
        )
    return rig


@pytest.fixture
def race_seconds():
    """How long races are run that nothing forces: shortly by default, longer with `make races`."""
    return float(os.environ.get("HICACHE_RACE_SECONDS", "2"))


@pytest.fixture(scope="module")
def kept_server():
    """A metadata server of the module's, for tests that only talk to it; scopes are of one directory each."""
    with Served(command=SERVE) as served:
        yield served


@pytest.fixture
def server():
    """A metadata server of the test's own, which it may kill."""
    with Served(command=SERVE) as served:
        yield served


@pytest.fixture
def server_two():
    """Another one, with a store of its own."""
    with Served(command=SERVE) as served:
        yield served
