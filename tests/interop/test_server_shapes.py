"""Real SGLang servers of other shapes, started by the quick start's command: replicas, layouts of
the host pool, KV that all ranks share, and TP sizes that share a store by `tp_lcm_size`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.interop.engine_server import (
    PAGES,
    REUSED,
    EngineServer,
    check_restored,
    prepare_engine,
    prompt,
)
from tests.interop.tiny_model import MLA

if TYPE_CHECKING:
    from pathlib import Path

# One to three starts of a server each; minutes where nothing else leaves it a processor.
pytestmark = [pytest.mark.slow(seconds=60), pytest.mark.interop]


def stored(server: EngineServer, pages: list[int]) -> None:
    """Wait until each rank has written so many pages."""
    server.wait_for(lambda: server.counted("written") == pages, f"{pages} pages are not written")


def test_what_one_replica_has_stored_the_other_restores(tmp_path: Path):
    """And each of them has metrics at a port of its own."""
    command = prepare_engine(tmp_path, ranks=2, layout="page_first_direct", io_backend="direct")
    with EngineServer(tmp_path, command, ranks=1, replicas=2) as server:
        one = server.wait_until_up().ask(prompt(10), routed_dp_rank=0)
        stored(server, [PAGES, 0])
        check_restored(server.ask(prompt(10), routed_dp_rank=1), one)
        assert server.counted("read") == [0, PAGES]
        assert server.counted("written") == [PAGES, 0]
    [namespace] = (tmp_path / "cache").rglob("namespace.json")
    assert json.loads(namespace.read_text())["layout"] == "page_first_direct"


@pytest.mark.long
def test_one_rank_writes_what_every_rank_reads_and_a_server_of_one_rank_too(tmp_path: Path):
    command = prepare_engine(tmp_path, ranks=2, config=MLA)
    with EngineServer(tmp_path, command, ranks=2) as server:
        first = server.wait_until_up().ask(prompt(10))
        stored(server, [PAGES, 0])
        server.flush()
        check_restored(server.ask(prompt(10)), first)
        assert server.counted("written") == [PAGES, 0]
        assert server.counted("read") == [PAGES, PAGES]
    with EngineServer(tmp_path, command, ranks=1) as alone:
        check_restored(alone.wait_until_up().ask(prompt(10)), first)
        [bundle] = (tmp_path / "cache").rglob("*.bundle")
        damaged = bytearray(bundle.read_bytes())
        damaged[len(damaged) // 2] ^= 0xFF
        bundle.write_bytes(damaged)
        alone.flush()
        answer = alone.ask(prompt(10))
        assert 0 < answer.from_storage < REUSED
        assert answer.says(first)
        assert alone.ask(prompt(20)).cached == 0


# TP sizes
# ---------------------------------------------------------------------------------------------------


def prepare(place: Path) -> list[str]:
    command = prepare_engine(place, ranks=2, layout="page_head")
    file = place / "hicache.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tp_lcm_size": 2}))
    return command


@pytest.mark.long
def test_each_tp_size_restores_what_the_other_has_stored(tmp_path: Path):
    command = prepare(tmp_path)
    with EngineServer(tmp_path, command, ranks=2) as two:
        first = two.wait_until_up().ask(prompt(10))
        stored(two, [PAGES, PAGES])
    with EngineServer(tmp_path, command, ranks=1) as one:
        check_restored(one.wait_until_up().ask(prompt(10)), first)
        assert one.counted("read") == [PAGES]
        other = one.ask(prompt(20))
        stored(one, [PAGES])
    with EngineServer(tmp_path, command, ranks=2) as two:
        check_restored(two.wait_until_up().ask(prompt(20)), other)
        assert two.counted("read") == [PAGES, PAGES]
