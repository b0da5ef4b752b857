"""A Redis for the tests of one file."""

from __future__ import annotations

import pytest

from tests.metadata_server.redis_servers import redis_server


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture
def client(redis):
    with redis.client() as one:
        yield one
