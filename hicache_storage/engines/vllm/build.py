"""What decides about the bytes of a chunk and is not in vLLM's configuration of offloading."""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

from hicache_storage.engines.bridge_storage import minor_version
from hicache_storage.engines.vllm.identity import DISTRIBUTIONS


def build_of() -> dict[str, str]:
    """Name vLLM's version and the device.

    A minor version of vLLM may change the order of the bytes of a block. So does the attention
    backend, which a tier is not told; vLLM chooses it by the device, on CPUs by the instruction
    set.
    """
    return {"vllm": minor_version(*DISTRIBUTIONS), "device": _device()}


def _device() -> str:
    kind = str(current_platform.device_type)
    if kind == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    capability = current_platform.get_device_capability()
    return kind if capability is None else f"{kind} {capability.as_version_str()}"
