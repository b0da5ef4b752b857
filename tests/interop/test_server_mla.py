"""A real SGLang server of two ranks, started by the quick start's command, with a model whose KV
all of its ranks share."""

from __future__ import annotations

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

# Two starts of a server; minutes where nothing else leaves it a processor.
pytestmark = [pytest.mark.slow(seconds=100), pytest.mark.interop, pytest.mark.timeout(600)]


@pytest.mark.long
def test_one_rank_writes_what_every_rank_reads_and_a_server_of_one_rank_too(tmp_path: Path):
    command = prepare_engine(tmp_path, ranks=2, config=MLA)
    with EngineServer(tmp_path, command, ranks=2) as server:
        server.wait_until_up()
        first = server.ask(prompt(10))
        server.wait_for(lambda: sum(server.counted("written")) >= PAGES, "no pages are written")
        server.flush()
        again = server.ask(prompt(10))
        check_restored(again, first)
        assert server.counted("written") == [PAGES, 0]
        assert server.counted("read") == [PAGES, PAGES]
    with EngineServer(tmp_path, command, ranks=1) as alone:
        restored = alone.wait_until_up().ask(prompt(10))
        check_restored(restored, first)
        [bundle] = (tmp_path / "cache").rglob("*.bundle")
        damage(bundle)
        alone.flush()
        damaged = alone.ask(prompt(10))
        assert 0 < damaged.from_storage < REUSED
        assert damaged.says(first)
        assert alone.ask(prompt(20)).cached == 0


def damage(bundle: Path) -> None:
    """Change one byte of one of its pages."""
    stored = bytearray(bundle.read_bytes())
    stored[len(stored) // 2] ^= 0xFF
    bundle.write_bytes(stored)
