"""vLLM's secondary tiers: setup of their classes, and what cases have to respect."""

from __future__ import annotations

from typing import Final

from hicache_conformance.interfaces.interface import PATIENCE_SECONDS, Interface, InterfaceProfile

HASHED: Final = ("adapter", "tenant", "salt")
"""vLLM hashes the name of a LoRA and `cache_salt` into the keys; a tier is told of neither."""

INTERFACE: Final = Interface(
    name="vllm-tier",
    package="hicache_conformance.interfaces.vllm_tier",
    engine="vllm",
    storage="TierStorage",
    # SHA-256 digests in hexadecimal.
    key_bytes=64,
    has_clear=False,
    profile=InterfaceProfile(
        block_groups=False,
        pool_verdicts=False,
        repeated_keys=False,
        patience_seconds=PATIENCE_SECONDS + 1,
        visible_fields=frozenset(
            {
                "model",
                "kv_dtype",
                "page_size",
                "layout",
                "layer_start",
                "layer_end",
                "tp_size",
                "pp_size",
                "cp_size",
                "kv_replicated",
            }
        ),
    ),
)
