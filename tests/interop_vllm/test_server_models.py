"""A real vLLM server whose KV is not that of a plain Llama: groups with sliding windows, and latent
attention. docs/vllm.md says why there is no hybrid with Mamba layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.stores import FileStore, tier
from tests.interop_vllm.engine_server import (
    BLOCK,
    BLOCKS,
    CONFIG,
    REUSED,
    Answer,
    EngineServer,
    prompt,
    write,
)
from tests.interop_vllm.other_models import latent_attention, write_random

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

PROMPTS = (5, 6)
WINDOW = 2 * BLOCK


def pages(server: EngineServer, what: str, *pools: str) -> dict[str, float]:
    """One of the counters of the tier's pages, by pool."""
    name = f"hicache_storage_{what}_pages_total"
    return {pool: server.counted(name, pool=pool) for pool in pools}


def test_two_groups_with_sliding_windows(tmp_path: Path):
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
    model, store = (
        write(tmp_path / "model", config={**CONFIG, **windows}),
        FileStore(tmp_path / "s"),
    )
    with EngineServer(tmp_path, model, None) as alone:
        alone.wait_until_up()
        right = {number: alone.ask(prompt(number)) for number in PROMPTS}
    assert len({answer.tokens for answer in right.values()}) == len(PROMPTS)
    with EngineServer(tmp_path, model, tier(store)) as server:
        server.wait_until_up()
        assert {number: server.ask(prompt(number)) for number in PROMPTS} == right
        server.forget()
        # Of a window only what a later hit can use.
        written = pages(server, "written", "kv", "group_1")
        assert max(written.values()) == BLOCKS * len(PROMPTS)
        assert 0 < min(written.values()) < BLOCKS * len(PROMPTS)
    with EngineServer(tmp_path, model, tier(store)) as again:
        again.wait_until_up()
        for number in PROMPTS:
            assert again.ask(prompt(number)) == Answer(right[number].tokens, REUSED)
        assert all(pages(again, "read", "kv", "group_1").values())


def test_latent_attention(tmp_path: Path):
    """What is restored from the store gives the answers of vLLM's own CPU tier.

    They are not those that it computes: on CPUs vLLM switches prefix caching off for such models,
    and what its kernels make of a prompt's last tokens differs where the others are there already.
    """
    model, store = write_random(tmp_path / "model", latent_attention()), FileStore(tmp_path / "s")
    arguments = ("--block-size", "16")
    with EngineServer(tmp_path, model, tier(store), arguments=arguments) as server:
        server.wait_until_up()
        computed = {number: server.ask(prompt(number)) for number in PROMPTS}
        assert {answer.cached for answer in computed.values()} == {0}
        right = {number: server.ask(prompt(number)) for number in PROMPTS}
        assert pages(server, "read", "kv") == {"kv": 0}
        server.wait_until_stored(len(PROMPTS) * REUSED // 16)
    assert len({answer.tokens for answer in right.values()}) == len(PROMPTS)
    for number in PROMPTS:
        assert right[number].cached == REUSED
        assert right[number].tokens[0] == computed[number].tokens[0]
    with EngineServer(tmp_path, model, tier(store), arguments=arguments) as again:
        again.wait_until_up()
        assert {number: again.ask(prompt(number)) for number in PROMPTS} == right
        assert pages(again, "read", "kv") == {"kv": len(PROMPTS) * REUSED // 16}
