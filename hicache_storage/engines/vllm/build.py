"""What decides about the bytes of a chunk and is not in vLLM's configuration of offloading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from hicache_storage.engines.bridge_storage import minor_version
from hicache_storage.engines.vllm.identity import DISTRIBUTIONS

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


def build_of(engine: OffloadingConfig) -> dict[str, str]:
    """Name vLLM's version, the device, and the format of the canonical layout where it is on.

    A minor version of vLLM may change the order of the bytes of a block. So does the attention
    backend, which a tier is not told; vLLM chooses it by the device, on CPUs by the instruction
    set.
    """
    build = {"vllm": minor_version(*DISTRIBUTIONS), "device": _device()}
    if engine.canonical_layout and engine.kv_cache_layout:
        # Imported here: engines without the canonical layout do not depend on its module.
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
            canonical_format_id,
        )

        build["canonical_format"] = canonical_format_id(engine.kv_cache_layout)
    return build


def _device() -> str:
    kind = str(current_platform.device_type)
    if kind == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    capability = current_platform.get_device_capability()
    return kind if capability is None else f"{kind} {capability.as_version_str()}"
