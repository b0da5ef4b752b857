"""LMCache's L2 adapters: setup of their classes, and what cases have to respect."""

from __future__ import annotations

from typing import Final

from hicache_conformance.interfaces.interface import PATIENCE_SECONDS, Interface, InterfaceProfile

HASHED: Final = ("page_size", "adapter", "salt")
"""A chunk's hash is of all tokens up to its end; the name of a LoRA goes into it, too."""

INTERFACE: Final = Interface(
    name="lmcache-l2",
    package="hicache_conformance.interfaces.lmcache_l2",
    engine="lmcache",
    storage="AdapterStorage",
    # Digests of 32 bytes, in hexadecimal.
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
                "tp_rank",
                "tp_size",
                "pp_rank",
                "pp_size",
                "cp_rank",
                "cp_size",
                "tenant",
            }
        ),
    ),
)
