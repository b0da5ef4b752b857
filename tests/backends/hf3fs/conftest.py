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
opened = opened_rigs(Rig)


@pytest.fixture
def rig(opened, kept_server):
    """Opens storages on one store; their metadata server is `kept_server` unless another is named."""
    return lambda *path, **options: opened(*path, **{"metadata_url": kept_server.url, **options})


@pytest.fixture
def race_seconds():
    """How long races are run that nothing forces: shortly by default, longer with `make races`."""
    return float(os.environ.get("HICACHE_RACE_SECONDS", "2"))


@pytest.fixture(scope="session")
def kept_server():
    """A metadata server for all tests that only talk to it; scopes are of one directory each."""
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
