"""A real SGLang server of two replicas (`--dp-size 2`), started by the quick start's command, over
one store.

Their host pools have another layout than the other servers', `page_first_direct`.
"""

from __future__ import annotations

import json

import pytest

from tests.interop.engine_server import PAGES, EngineServer, check_restored, prepare_engine, prompt

# One start of a server; minutes where nothing else leaves it a processor.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


def test_what_one_replica_has_stored_the_other_restores(tmp_path):
    """And each of them has metrics at a port of its own."""
    command = prepare_engine(tmp_path, ranks=2, layout="page_first_direct", io_backend="direct")
    with EngineServer(tmp_path, command, ranks=1, replicas=2) as server:
        server.wait_until_up()
        one = server.ask(prompt(10), routed_dp_rank=0)
        server.wait_for(
            lambda: server.counted("written")[0] >= PAGES, "the first replica writes no pages"
        )
        other = server.ask(prompt(10), routed_dp_rank=1)
        check_restored(other, one)
        assert server.counted("read") == [0, PAGES]
        assert server.counted("written") == [PAGES, 0]
    [namespace] = (tmp_path / "cache").rglob("namespace.json")
    assert json.loads(namespace.read_text())["layout"] == "page_first_direct"
