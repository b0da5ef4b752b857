"""DMA: many contiguous pieces in one call of the CUDA runtime that torch has loaded.

NVIDIA's bindings take lists, which costs a conversion for each piece.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Final, cast

import torch

from hicache_storage.pools.cuda_runtime import cuda_runtime, forget_error

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFAULT_KIND: Final = 4
"""cudaMemcpyDefault: the direction follows from the addresses."""
_STREAM_ORDER: Final = 1
"""cudaMemcpySrcAccessOrderStream: a source is read when the stream comes to its copy."""
_FIRST_WITH_BATCHES: Final = 12080
_FIRST_WITHOUT_FAILED_INDEX: Final = 13000
_NO_BATCHES: Final = (36, 801)
"""cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported: copied one by one then."""


def copy_pieces(destinations: torch.Tensor, sources: torch.Tensor, size: int, stream: int) -> int:
    """Enqueue copies; returns CUDA's error. See `Stream.copy_pieces`."""
    count, batch = min(destinations.numel(), sources.numel()), memcpy_batch()
    if batch is not None:
        sizes = _sizes(count, size).data_ptr()
        error = batch(destinations.data_ptr(), sources.data_ptr(), sizes, count, stream)
        if error not in _NO_BATCHES:
            return error
        # The driver knows no batches: its refusal must not surface at the next kernel.
        forget_error()
    # A loop over pieces: CUDA before 12.8 copies them one by one.
    arrays = (cast("list[int]", each.view(-1)[:count].tolist()) for each in (destinations, sources))
    errors = (memcpy(to, origin, size, stream) for to, origin in zip(*arrays, strict=True))
    return next(filter(None, errors), 0)


@functools.lru_cache
def _sizes(count: int, size: int) -> torch.Tensor:
    return torch.full((count,), size, dtype=torch.int64)


def memcpy(destination: int, source: int, size: int, stream: int) -> int:
    """Enqueue one copy; returns CUDA's error."""
    return int(_memcpy()(destination, source, size, _DEFAULT_KIND, stream))


@functools.cache
def _memcpy() -> Callable[..., int]:
    function = cuda_runtime().cudaMemcpyAsync
    # Without types ctypes passes integers as 32 bits, which cuts addresses.
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)
    function.restype = ctypes.c_int
    return function


@functools.cache
def memcpy_batch() -> Callable[[int, int, int, int, int], int] | None:
    """Return `cudaMemcpyBatchAsync` of the loaded runtime.

    It takes arrays of destinations, sources and sizes, their length, and a stream.

    None before CUDA 12.8. CUDA 13 has dropped the argument that tells which copy was refused.
    """
    version = ctypes.c_int()
    cuda_runtime().cudaRuntimeGetVersion(ctypes.byref(version))
    if version.value < _FIRST_WITH_BATCHES:
        return None
    function = cuda_runtime().cudaMemcpyBatchAsync
    # `cudaMemcpyAttributes`, with two locations that hint at nothing; from the first copy on.
    attributes, first = (ctypes.c_int * 6)(_STREAM_ORDER), ctypes.c_size_t(0)
    same = ctypes.byref(attributes), ctypes.byref(first), 1
    has_index = version.value < _FIRST_WITHOUT_FAILED_INDEX
    failed = (ctypes.byref(ctypes.c_size_t(0)),) if has_index else ()
    array, size = ctypes.c_void_p, ctypes.c_size_t
    pointers = (ctypes.c_void_p,) * (len(failed) + 1)
    function.argtypes = (array, array, array, size, array, array, size, *pointers)
    function.restype = ctypes.c_int
    return lambda to, origin, sizes, count, stream: int(
        function(to, origin, sizes, count, *same, *failed, stream)
    )
