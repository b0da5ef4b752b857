"""A real vLLM server whose KV is not that of a plain Llama: groups with sliding windows, and latent
attention. docs/vllm.md says why there is no hybrid with Mamba layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.interop.stores import FileStore, tier
from tests.interop.tiny_model import VOCABULARY
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


def write_latent_attention(place: Path) -> Path:
    """Write DeepSeek V2 without experts, with random weights; return its directory.

    Transformers makes it, so that names and shapes of the weights are those of published
    checkpoints.
    """
    config = AutoConfig.for_model(
        "deepseek_v2",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=4,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                # Large enough that an answer depends on each token of its prompt.
                columns = weight.shape[1:].numel()
                scale = 4 if "embed_tokens" in name else 2 / columns**0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.save_pretrained(place)
    return place


def test_latent_attention(tmp_path: Path):
    """What is restored from the store gives the answers of vLLM's own CPU tier.

    They are not those that it computes: on CPUs vLLM switches prefix caching off for such models,
    and what its kernels make of a prompt's last tokens differs where the others are there already.
    """
    model, store = write_latent_attention(tmp_path / "model"), FileStore(tmp_path / "s")
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
