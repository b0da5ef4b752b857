"""Models of a few small layers with random weights, written so that an engine loads them as it loads
any other: Transformers makes them, so that names and shapes of the weights are those of published
checkpoints.

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
from transformers import AutoConfig, AutoModelForCausalLM

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
    fields = {name: value for name, value in config.items() if name != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **fields)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    weights = model.state_dict()
    for name, weight in weights.items():
        if weight.dim() > 1:
            # Large enough that an answer depends on each token of its prompt.
            scale = 2 / weight[0].numel() ** 0.5 * (4 if "embed_tokens" in name else 1)
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        elif name.endswith("A_log"):
            # A state forgets half of itself in 100 tokens and in ever fewer, from head to head.
            weight.copy_(torch.linspace(0.01, 0.1, len(weight)).log())
        elif name.endswith("dt_bias"):
            weight.zero_()
    if config is HYBRID:
        # Transformers knows this layer with a gate only, whose rows stand behind those of a query.
        queries = f"model.layers.{ATTENTION_LAYER}.self_attn.q_proj.weight"
        weights[queries] = weights[queries][: HEADS * HEAD_WIDTH].clone()
    return weights
