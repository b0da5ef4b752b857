"""Metadata servers for the tests, each a process of its own."""

from __future__ import annotations

import sys

from hicache_metadata_server.cli.options import AdminClient
from hicache_metadata_server.protocol import Fsck, FsckReport, Scopes
from tests.support.metadata import Served

WAIT_SECONDS = 60.0
SERVE = (
    f'{sys.executable} -c "from hicache_storage.cli.main import main; main()" metadata serve '
    f"--port {{port}} "
    "--log-level warning --quarantine-seconds 0.05 --lease-seconds 2 --store sqlite:///"
)


def started() -> Served:
    """Our server on a store of its own."""
    return Served(command=f"{SERVE}{{tmp}}/m.db")


def live(url: str) -> dict[str, int]:
    """How many pages our server says there are, by scope."""
    return {
        scope.scope: scope.live
        for scope in AdminClient(url).call("/v2/scopes", None, Scopes).scopes
    }


def problems(url: str) -> list[str]:
    """What `fsck` finds wrong with our server."""
    return AdminClient(url).call("/v2/fsck", Fsck(), FsckReport).problems
