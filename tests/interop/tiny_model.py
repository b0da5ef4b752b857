"""Models of a few small layers with random weights, written so that SGLang loads them as it loads
any other.

A Llama; a MiniCPM3, which is the plainest of SGLang's models that have multi-head latent attention;
and a hybrid of gated delta nets and one layer of attention, as Qwen3.5 has them without experts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH = 512, 64, 128, 2, 4, 2, 16
Q_RANK, KV_RANK, ROPE_WIDTH = 48, 32, 8
"""Of multi-head latent attention."""
ATTENTION_LAYER = 2
"""Of the hybrid."""
# Three value heads to each key head, because SGLang's fused kernel for one, two and four would need
# a stand-in.
KEY_HEADS, KEY_WIDTH, VALUE_HEADS, VALUE_WIDTH, CONVOLUTION = 2, 16, 6, 32, 4
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
}
MLA = {
    **COMMON,
    "architectures": ["MiniCPM3ForCausalLM"],
    "model_type": "minicpm3",
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": HEAD_WIDTH,
    "qk_rope_head_dim": ROPE_WIDTH,
    "v_head_dim": HEAD_WIDTH,
    # They would scale embeddings, residuals and logits.
    "scale_emb": 1,
    "scale_depth": LAYERS**0.5,
    "dim_model_base": WIDTH,
}
HYBRID = {
    # The base of its rotations lies below.
    **{name: value for name, value in COMMON.items() if name != "rope_theta"},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": ATTENTION_LAYER + 2,
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
Layer = tuple[dict[str, tuple[int, int]], dict[str, torch.Tensor]]
"""The matrices of a layer as (rows, columns), and its vectors."""


def write_model(place: Path, *, seed: int, config: dict[str, object] = LLAMA) -> None:
    """Write the model, and a tokenizer whose words are `w0`, `w1`, ...; one seed gives the same
    weights each time."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    weights = _weights(config, seed)
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(
        WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = Whitespace()
    words.save(str(place / "tokenizer.json"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (place / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )


def prompt(number: int, tokens: int) -> list[int]:
    """So many tokens and a few more; prompts of another number share no page."""
    places = range(1, tokens + 5)
    return [
        number,
        *(3 + (place * 7919 + place * place * 31) % (VOCABULARY - 3) for place in places),
    ]


def _weights(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        # Large enough that an answer depends on each token of its prompt.
        return torch.randn(rows, columns, generator=generator) * 2 / columns**0.5

    # Gemma's norms, which the hybrid has, have the differences from 1.
    norm = torch.zeros if config is HYBRID else torch.ones
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, WIDTH) * 4,
        "lm_head.weight": random(VOCABULARY, WIDTH),
    }
    weights["model.norm.weight"] = norm(WIDTH)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        matrices, vectors = _layer(config, layer)
        matrices |= {
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
        }
        for name in ("input", "post_attention"):
            vectors[f"{name}_layernorm.weight"] = norm(WIDTH)
        for name, shape in matrices.items():
            made = random(*shape)
            weights[f"{at}{name}.weight"] = made[:, None] if name.endswith("conv1d") else made
        weights |= {at + name: vector for name, vector in vectors.items()}
    return weights


def _layer(config: dict[str, object], layer: int) -> Layer:
    if config is MLA:
        return _latent_attention()
    if config is HYBRID and layer != ATTENTION_LAYER:
        return _delta_net()
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_width = config["head_dim"]
    matrices = {"q_proj": (heads * head_width, WIDTH), "o_proj": (WIDTH, heads * head_width)}
    matrices |= {f"{name}_proj": (kv_heads * head_width, WIDTH) for name in ("k", "v")}
    normed = ("q", "k") if config is HYBRID else ()
    vectors = {f"self_attn.{name}_norm.weight": torch.zeros(head_width) for name in normed}
    return {f"self_attn.{name}": shape for name, shape in matrices.items()}, vectors


def _latent_attention() -> Layer:
    """A token's latent and its rotated key are all that is cached."""
    matrices = {
        "q_a_proj": (Q_RANK, WIDTH),
        "q_b_proj": (HEADS * (HEAD_WIDTH + ROPE_WIDTH), Q_RANK),
        "kv_a_proj_with_mqa": (KV_RANK + ROPE_WIDTH, WIDTH),
        "kv_b_proj": (HEADS * 2 * HEAD_WIDTH, KV_RANK),
        "o_proj": (WIDTH, HEADS * HEAD_WIDTH),
    }
    vectors = {
        "self_attn.q_a_layernorm.weight": torch.ones(Q_RANK),
        "self_attn.kv_a_layernorm.weight": torch.ones(KV_RANK),
    }
    return {f"self_attn.{name}": shape for name, shape in matrices.items()}, vectors


def _delta_net() -> Layer:
    keys, values = KEY_HEADS * KEY_WIDTH, VALUE_HEADS * VALUE_WIDTH
    matrices = {
        "in_proj_qkv": (2 * keys + values, WIDTH),
        "in_proj_z": (values, WIDTH),
        "in_proj_a": (VALUE_HEADS, WIDTH),
        "in_proj_b": (VALUE_HEADS, WIDTH),
        "conv1d": (2 * keys + values, CONVOLUTION),
        "out_proj": (WIDTH, values),
    }
    vectors = {
        # A state forgets half of itself in 100 tokens and in ever fewer, from head to head.
        "linear_attn.A_log": torch.linspace(0.01, 0.1, VALUE_HEADS).log(),
        "linear_attn.dt_bias": torch.zeros(VALUE_HEADS),
        "linear_attn.norm.weight": torch.ones(VALUE_WIDTH),
    }
    return {f"linear_attn.{name}": shape for name, shape in matrices.items()}, vectors
