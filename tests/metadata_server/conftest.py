"""A Redis for the tests of one file."""

from __future__ import annotations

import pytest
import structlog

from tests.metadata_server.redis_servers import redis_server


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture
def client(redis):
    with redis.client() as one:
        yield one


@pytest.fixture
def capture_log(monkeypatch):
    """Capture what modules log; returns the lines. `structlog.testing.capture_logs` does not reach a
    logger that was configured and used before."""

    def capture(*modules):
        captured = structlog.testing.LogCapture()
        for module in modules:
            monkeypatch.setattr(module, "_log", structlog.wrap_logger(None, [captured]))
        return captured.entries

    return capture
