"""A small model with random weights whose KV is not that of a plain Llama: latent attention.

Transformers makes it, so that names and shapes of the weights are those of published checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.interop.tiny_model import VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def latent_attention() -> PreTrainedConfig:
    """DeepSeek V2 without experts."""
    return AutoConfig.for_model(
        "deepseek_v2",
        **COMMON,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=4,
        tie_word_embeddings=False,
    )


def write_random(place: Path, config: PreTrainedConfig, *, seed: int = 1) -> Path:
    """Write a model; one seed gives the same weights each time. Return its directory."""
    generator = torch.Generator().manual_seed(seed)
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
