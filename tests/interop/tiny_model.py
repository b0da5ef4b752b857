"""Models of two small layers with random weights, written so that SGLang loads them as it loads any
other.

A Llama, and a MiniCPM3, which is the plainest of SGLang's models that have multi-head latent
attention.
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
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH = 512, 64, 128, 2, 4, 2, 16
Q_RANK, KV_RANK, ROPE_WIDTH = 48, 32, 8
"""Of multi-head latent attention."""
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


def write_model(place: Path, *, seed: int, config: dict[str, object] = LLAMA) -> None:
    """Write the model; one seed gives the same weights each time."""
    save(place, config, _weights(config, seed))


def save(place: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> None:
    """Write a model and a tokenizer, whose words are `w0`, `w1`, ..."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
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


def random_matrices(seed: int) -> Callable[[int, int], torch.Tensor]:
    """Make matrices of so many rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    # Large enough that an answer depends on each token of its prompt.
    return lambda rows, columns: torch.randn(rows, columns, generator=generator) * 2 / columns**0.5


def _weights(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    random = random_matrices(seed)
    projections, norms = _latent_attention() if config is MLA else _attention(config)
    projections |= {
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    norms |= {"input_layernorm": WIDTH, "post_attention_layernorm": WIDTH}
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, WIDTH) * 4,
        "lm_head.weight": random(VOCABULARY, WIDTH),
    }
    weights["model.norm.weight"] = torch.ones(WIDTH)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in projections.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name, width in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(width)
    return weights


def _attention(config: dict[str, object]) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """The matrices of a layer as (rows, columns), and the widths of its norms."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_width = config["head_dim"]
    matrices = {"q_proj": (heads * head_width, WIDTH), "o_proj": (WIDTH, heads * head_width)}
    matrices |= {f"{name}_proj": (kv_heads * head_width, WIDTH) for name in ("k", "v")}
    return {f"self_attn.{name}": shape for name, shape in matrices.items()}, {}


def _latent_attention() -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """The same of multi-head latent attention: a token's latent and its rotated key are all that is
    cached."""
    matrices = {
        "q_a_proj": (Q_RANK, WIDTH),
        "q_b_proj": (HEADS * (HEAD_WIDTH + ROPE_WIDTH), Q_RANK),
        "kv_a_proj_with_mqa": (KV_RANK + ROPE_WIDTH, WIDTH),
        "kv_b_proj": (HEADS * 2 * HEAD_WIDTH, KV_RANK),
        "o_proj": (WIDTH, HEADS * HEAD_WIDTH),
    }
    norms = {"self_attn.q_a_layernorm": Q_RANK, "self_attn.kv_a_layernorm": KV_RANK}
    return {f"self_attn.{name}": shape for name, shape in matrices.items()}, norms
