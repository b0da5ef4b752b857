"""A real SGLang server whose host pool has another layout; `page_first_direct` is that of the
replicas' test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.interop.engine_server import PAGES, EngineServer, check_restored, prepare_engine, prompt

if TYPE_CHECKING:
    from pathlib import Path

# One start of a server each; minutes where nothing else leaves it a processor.
pytestmark = [
    pytest.mark.slow(seconds=150),
    pytest.mark.interop,
    pytest.mark.long,
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    ("layout", "io_backend"),
    [("layer_first", "direct"), ("page_head", "kernel")],
)
def test_what_was_stored_is_restored(tmp_path: Path, layout: str, io_backend: str):
    command = prepare_engine(tmp_path, ranks=1, layout=layout, io_backend=io_backend)
    with EngineServer(tmp_path, command, ranks=1) as server:
        first = server.wait_until_up().ask(prompt(10))
        server.wait_for(lambda: server.counted("written") == [PAGES], "no pages are written")
        server.flush()
        again = server.ask(prompt(10))
        check_restored(again, first)
        assert server.counted("read") == [PAGES]
    [namespace] = (tmp_path / "cache").rglob("namespace.json")
    assert json.loads(namespace.read_text())["layout"] == layout
