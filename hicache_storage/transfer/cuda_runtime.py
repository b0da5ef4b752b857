"""The one call of the CUDA runtime that torch does not offer: an asynchronous copy between memories with gaps."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch

from hicache_storage.transfer.rectangles import rectangles
from hicache_storage.transfer.streams import StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFAULT_KIND = 4
"""cudaMemcpyDefault: the direction follows from the addresses."""


def copy_with_gaps(destination: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Enqueue a copy between page-locked host memory and the device; the stream's device is the current one.

    torch itself would gather the host's side in memory that is not page-locked, and wait for the stream.

    Raises:
        StreamFailedError: CUDA refuses it.
    """
    copy = _memcpy_2d()
    for to, to_pitch, origin, origin_pitch, width, height in rectangles(destination, source):
        error = copy(to, to_pitch, origin, origin_pitch, width, height, _DEFAULT_KIND, stream.cuda_stream)
        if error:
            raise StreamFailedError(f"cudaMemcpy2DAsync of {height} rows of {width} bytes failed with error {error}")


@functools.cache
def _memcpy_2d() -> Callable[..., int]:
    torch.cuda.init()  # type: ignore[no-untyped-call] # torch does not annotate it
    function = _loaded_runtime().cudaMemcpy2DAsync
    sizes = (ctypes.c_void_p, ctypes.c_size_t) * 2 + (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    function.argtypes, function.restype = sizes, ctypes.c_int
    return function


def _loaded_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, and no second one."""
    everything = ctypes.CDLL(None)
    if hasattr(everything, "cudaMemcpy2DAsync"):
        return everything
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcudart" in line}
    if not paths:
        raise StreamFailedError(
            f"torch {torch.__version__} has not loaded libcudart as a shared library; install a wheel of torch for CUDA"
        )
    return ctypes.CDLL(min(paths))
