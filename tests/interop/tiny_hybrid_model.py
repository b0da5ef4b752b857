"""A hybrid of four small layers with random weights: gated delta nets, and one layer of attention,
as Qwen3.5 has them without experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.interop.tiny_model import (
    COMMON,
    HEAD_WIDTH,
    HEADS,
    INNER,
    KV_HEADS,
    VOCABULARY,
    WIDTH,
    random_matrices,
    save,
)

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, ATTENTION_LAYER = 4, 2
# Three value heads to each key head, because SGLang's fused kernel for one, two and four would need
# a stand-in.
KEY_HEADS, KEY_WIDTH, VALUE_HEADS, VALUE_WIDTH, CONVOLUTION = 2, 16, 6, 32, 4
CONFIG = {
    # The base of its rotations lies below.
    **{name: value for name, value in COMMON.items() if name != "rope_theta"},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": LAYERS,
    "full_attention_interval": ATTENTION_LAYER + 1,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
    "attn_output_gate": False,
    "linear_num_key_heads": KEY_HEADS,
    "linear_key_head_dim": KEY_WIDTH,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_value_head_dim": VALUE_WIDTH,
    "linear_conv_kernel_dim": CONVOLUTION,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}


def write_hybrid_model(place: Path, *, seed: int) -> None:
    """Write the model with the tokenizer of the other one; one seed gives the same weights each
    time."""
    save(place, CONFIG, _weights(seed))


def _weights(seed: int) -> dict[str, torch.Tensor]:
    random = random_matrices(seed)
    # Gemma's norms have the differences from 1.
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, WIDTH) * 4,
        "lm_head.weight": random(VOCABULARY, WIDTH),
    }
    weights["model.norm.weight"] = torch.zeros(WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        if layer == ATTENTION_LAYER:
            weights[at + "self_attn.q_proj.weight"] = random(HEADS * HEAD_WIDTH, WIDTH)
            for name in ("k", "v"):
                weights[at + f"self_attn.{name}_proj.weight"] = random(KV_HEADS * HEAD_WIDTH, WIDTH)
            weights[at + "self_attn.o_proj.weight"] = random(WIDTH, HEADS * HEAD_WIDTH)
            for name in ("q", "k"):
                weights[at + f"self_attn.{name}_norm.weight"] = torch.zeros(HEAD_WIDTH)
        else:
            keys, values = KEY_HEADS * KEY_WIDTH, VALUE_HEADS * VALUE_WIDTH
            weights[at + "linear_attn.in_proj_qkv.weight"] = random(2 * keys + values, WIDTH)
            weights[at + "linear_attn.in_proj_z.weight"] = random(values, WIDTH)
            for name in ("a", "b"):
                weights[at + f"linear_attn.in_proj_{name}.weight"] = random(VALUE_HEADS, WIDTH)
            weights[at + "linear_attn.conv1d.weight"] = random(2 * keys + values, CONVOLUTION)[
                :, None
            ]
            # A state forgets half of itself in 100 tokens and in ever fewer, from head to head.
            weights[at + "linear_attn.A_log"] = torch.linspace(0.01, 0.1, VALUE_HEADS).log()
            weights[at + "linear_attn.dt_bias"] = torch.zeros(VALUE_HEADS)
            weights[at + "linear_attn.norm.weight"] = torch.ones(VALUE_WIDTH)
            weights[at + "linear_attn.out_proj.weight"] = random(WIDTH, values)
        for name in ("gate", "up"):
            weights[at + f"mlp.{name}_proj.weight"] = random(INNER, WIDTH)
        weights[at + "mlp.down_proj.weight"] = random(WIDTH, INNER)
        for name in ("input", "post_attention"):
            weights[at + f"{name}_layernorm.weight"] = torch.zeros(WIDTH)
    return weights
