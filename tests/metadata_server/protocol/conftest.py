"""The server under test: on SQLite, and on a Redis that it could share."""

from __future__ import annotations

import pytest

from hicache_metadata_server.core.limits import DEFAULTS
from tests.metadata_server.http_calls import running_shared
from tests.metadata_server.protocol.peer import Peer, peer_on


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.long)])
async def peer(request, tmp_path):
    """A server whose time is not changed."""
    if request.param == "sqlite":
        async with peer_on(f"sqlite:///{tmp_path}/m.db") as made:
            yield made
        return
    redis = request.getfixturevalue("redis")
    with redis.client() as client:
        client.flushall()
    async with running_shared(redis.url, DEFAULTS) as caller:
        yield Peer(caller)


@pytest.fixture
async def timed(tmp_path):
    """A server whose time passes by `wait` alone."""
    async with peer_on(f"sqlite:///{tmp_path}/m.db") as made:
        yield made
