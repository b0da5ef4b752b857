"""The CUDA runtime that torch has loaded, for what torch does not offer."""

from __future__ import annotations

import ctypes
import functools

import torch

from hicache_storage.spec import ConfigError


@functools.cache
def cuda_runtime() -> ctypes.CDLL:
    """The library that torch uses, and no second one; initializes CUDA.

    Raises:
        ConfigError: torch has not loaded it as a shared library.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call] # torch does not annotate it
    # First the symbols of the process: torch may have linked the runtime statically or loaded it
    # globally. A second copy of the library would have a state of its own.
    everything = ctypes.CDLL(None)
    if hasattr(everything, "cudaMemcpy2DAsync"):
        return everything
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcudart" in line}
    if not paths:
        raise ConfigError(
            f"torch {torch.__version__} has not loaded libcudart as a shared library; install a "
            "wheel of torch for CUDA"
        )
    return ctypes.CDLL(min(paths))


def forget_error() -> None:
    """Take back the error of a call that CUDA has just refused.

    The runtime keeps it for this thread, and torch would raise it after the next kernel it
    launches.
    """
    cuda_runtime().cudaGetLastError()
