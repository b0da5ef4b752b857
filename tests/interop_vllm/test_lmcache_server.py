"""LMCache's own server with this project's adapter, and a vLLM server in front of it: the prompt comes
from storage once both have forgotten it, or are started again."""

from __future__ import annotations

from contextlib import ExitStack
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


def start(
    stack: ExitStack, place: Path, model: Path, store: Store
) -> tuple[EngineServer, CacheServer]:
    """Start both servers, until the end of the stack."""
    cache = stack.enter_context(CacheServer(place, store.driver, store.options))
    engine = EngineServer(place, model, None, arguments=cache.connector())
    engine.environment["PYTHONHASHSEED"] = "0"
    return stack.enter_context(engine).wait_until_up(), cache


@pytest.mark.parametrize(
    ("driver", "restarted"),
    [
        ("file", False),
        *(
            pytest.param(driver, True, marks=pytest.mark.long)
            for driver in ("file", "hf3fs", "mooncake")
        ),
    ],
)
def test_the_prompt_comes_from_storage(tmp_path, driver, restarted):
    model = write(tmp_path / "model")
    with opened(driver, tmp_path) as store, ExitStack() as stack:
        engine, cache = start(stack, tmp_path, model, store)
        first = engine.ask(prompt(5))
        assert first.cached == 0
        engine.wait_for(
            lambda: cache.counted("hicache_storage_written_bytes_total") >= STORED_BYTES,
            "the pages are not stored",
        )
        if restarted:
            stack.close()
            engine, cache = start(stack, tmp_path, model, store)
        else:
            # LMCache empties its L1, too.
            engine.forget()
        assert engine.ask(prompt(5)) == Answer(first.tokens, REUSED)
        assert cache.counted("hicache_storage_read_bytes_total") >= STORED_BYTES
