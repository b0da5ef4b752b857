"""LMCache's own server with this project's adapter, and a vLLM server in front of it: both are
started again, and the prompt comes from storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.stores import opened
from tests.interop_vllm.cache_server import CacheServer
from tests.interop_vllm.engine_server import REUSED, Answer, EngineServer, prompt, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.stores import Store

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STORED_BYTES = REUSED * 4096
"""Of a prompt."""


def ask(place: Path, model: Path, store: Store) -> Answer:
    """Start both servers, ask once, wait until the prompt is stored, and kill both."""
    with CacheServer(place, store.driver, store.options) as cache:
        engine = EngineServer(place, model, None, arguments=cache.connector())
        engine.environment["PYTHONHASHSEED"] = "0"
        with engine as server:
            server.wait_until_up()
            answer = server.ask(prompt(5))
            # Pages that were there already are not written again.
            moved = "hicache_storage_written_bytes_total", "hicache_storage_read_bytes_total"
            server.wait_for(
                lambda: sum(map(cache.counted, moved)) >= STORED_BYTES, "the pages are not stored"
            )
            return answer


@pytest.mark.parametrize(
    "driver",
    [
        "file",
        pytest.param("hf3fs", marks=pytest.mark.long),
        pytest.param("mooncake", marks=pytest.mark.long),
    ],
)
def test_servers_that_are_started_again_have_the_prompt_from_storage(tmp_path, driver):
    model = write(tmp_path / "model")
    with EngineServer(tmp_path, model, None) as alone:
        right = alone.wait_until_up().ask(prompt(5))
    with opened(driver, tmp_path) as store:
        assert ask(tmp_path, model, store) == right
        again = ask(tmp_path, model, store)
    assert again == Answer(right.tokens, REUSED)
