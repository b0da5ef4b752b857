"""A real SGLang server of two replicas (`--dp-size 2`), started by the quick start's command, over one store.

Their host pools have another layout than the other servers', `page_first_direct`.
"""

from __future__ import annotations

import json

import pytest

from tests.interop.engine_server import (
    PAGES,
    REUSED,
    EngineServer,
    metrics_port,
    pages_counted,
    prompt,
    quick_start_command,
    written_configuration,
)
from tests.interop.tiny_model import write_model

# One start of a server; minutes where nothing else leaves it a processor.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


def test_what_one_replica_has_stored_the_other_restores(tmp_path):
    """And each of them has metrics at a port of its own."""
    write_model(tmp_path / "model", seed=1)
    port = metrics_port(2)
    configuration = written_configuration(tmp_path) | {"metrics_port": port, "metrics_host": "127.0.0.1"}
    (tmp_path / "hicache.json").write_text(json.dumps(configuration))

    def counted(what):
        return [pages_counted(port + replica, what) for replica in range(2)]

    command = quick_start_command(tmp_path / "model", layout="page_first_direct", io_backend="direct")
    with EngineServer(tmp_path, command, ranks=1, replicas=2) as server:
        server.wait_until_up()
        one = server.ask(prompt(10), routed_dp_rank=0)
        server.wait_for(lambda: counted("written")[0] >= PAGES, "the first replica writes no pages")
        other = server.ask(prompt(10), routed_dp_rank=1)
        assert one.cached == 0
        assert (other.cached, other.from_storage) == (REUSED, REUSED)
        assert other.says(one)
        assert counted("read") == [0, PAGES]
        assert counted("written") == [PAGES, 0]
    [namespace] = (tmp_path / "cache").rglob("namespace.json")
    assert json.loads(namespace.read_text())["layout"] == "page_first_direct"
