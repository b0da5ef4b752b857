"""A Llama of two small layers with random weights, written so that SGLang loads it as it loads any other."""

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
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(place: Path, *, seed: int) -> None:
    """Write the model and a tokenizer, whose words are `w0`, `w1`, ...; one seed gives the same weights each time."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(seed), place / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(place / "tokenizer.json"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        # Large enough that an answer depends on each token of its prompt.
        return torch.randn(rows, columns, generator=generator) * 2 / columns**0.5

    weights = {"model.embed_tokens.weight": random(VOCABULARY, WIDTH) * 4, "lm_head.weight": random(VOCABULARY, WIDTH)}
    weights["model.norm.weight"] = torch.ones(WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights[at + "self_attn.q_proj.weight"] = random(HEADS * HEAD_WIDTH, WIDTH)
        for name in ("k", "v"):
            weights[at + f"self_attn.{name}_proj.weight"] = random(KV_HEADS * HEAD_WIDTH, WIDTH)
        weights[at + "self_attn.o_proj.weight"] = random(WIDTH, HEADS * HEAD_WIDTH)
        for name in ("gate", "up"):
            weights[at + f"mlp.{name}_proj.weight"] = random(INNER, WIDTH)
        weights[at + "mlp.down_proj.weight"] = random(WIDTH, INNER)
        for name in ("input", "post_attention"):
            weights[at + f"{name}_layernorm.weight"] = torch.ones(WIDTH)
    return weights
