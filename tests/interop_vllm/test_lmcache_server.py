"""LMCache's own server with this project's adapter, and a vLLM server in front of it: the prompt comes
from storage once both have forgotten it, or are started again."""

from __future__ import annotations

import json
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hicache_storage.engines.lmcache.identity import object_key
from tests.interop.stores import FileStore, opened
from tests.interop_vllm.cache_server import CacheServer
from tests.interop_vllm.engine_server import REUSED, Answer, EngineServer, prompt, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.stores import Store

pytestmark = pytest.mark.vllm

STORED_BYTES = REUSED * 4096
"""Of a prompt."""


def start(
    stack: ExitStack, place: Path, model: Path, store: Store, **adapter: object
) -> tuple[EngineServer, CacheServer]:
    """Start both servers, until the end of the stack."""
    cache = stack.enter_context(CacheServer(place, store.driver, store.options, **adapter))
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


@pytest.mark.long
def test_quotas_by_salt_count_what_the_store_has(tmp_path):
    model, store = write(tmp_path / "model"), FileStore(tmp_path / "store")
    eviction = {"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0, "eviction_ratio": 0.5}
    with ExitStack() as stack:
        engine, cache = start(stack, tmp_path, model, store, eviction=eviction)

        def limit(salt: str, gigabytes: float) -> None:
            cache.call("PUT", f"/quota/{salt}", {"limit_gb": gigabytes})

        def objects() -> list[dict[str, Any]]:
            return json.loads(cache.call("GET", "/cache/objects"))["entries"]

        def used(salt: str) -> float:
            told = json.loads(cache.call("GET", f"/quota/{salt}"))
            return round(told["current_usage_gb"] * 2**30)

        def is_right() -> bool:
            """Whether LMCache's bytes and list are what is stored."""
            known = objects()
            with store.reopened() as directory:
                present = directory.batch_present([stored_as(entry) for entry in everything])
            there = [entry for entry, is_there in zip(everything, present, strict=True) if is_there]
            return sorted(map(str, known)) == sorted(map(str, there)) and all(
                used(salt)
                == sum(each["size_bytes"] for each in known if each["key"]["cache_salt"] == salt)
                for salt in ("one", "two")
            )

        for salt in ("one", "two"):
            limit(salt, 1)
            engine.ask(prompt(5), cache_salt=salt)
        engine.wait_for(lambda: used("one") == used("two") > 0, "nothing is stored")
        everything = objects()
        assert len(everything) == 2 * used("one") // everything[0]["size_bytes"]
        cache.wait_for(is_right, "LMCache's directory is wrong")
        full = used("one")
        limit("one", full * 0.75 / 2**30)
        limit("two", 0)
        cache.wait_for(lambda: used("one") < full and used("two") == 0, "nothing is evicted")
        cache.wait_for(is_right, "LMCache's directory is wrong")
        left = objects()
        cache.call("DELETE", "/cache/objects", {"tier": "l2", "keys": [left[0]["key"]]})
        assert objects() == left[1:]
        assert is_right()


def stored_as(entry: dict[str, Any]) -> str:
    """Return the key of an object that LMCache lists."""
    told = entry["key"]
    chunk_hash, salt = bytes.fromhex(told["chunk_hash_hex"]), told["cache_salt"]
    return object_key(SimpleNamespace(chunk_hash=chunk_hash, cache_salt=salt))
