"""DMA: many contiguous pieces in one call of the driver.

NVIDIA's bindings take lists, which costs a conversion for each piece.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Final, cast

import torch

from hicache_storage.transfer.cuda.kernel import driver

if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_WITH_BATCHES: Final = 12080
_STREAM_ORDER: Final = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read when the stream comes to its copy."""


def copy_pieces(destinations: torch.Tensor, sources: torch.Tensor, size: int, stream: int) -> int:
    """Enqueue copies; returns CUDA's error. See `Stream.copy_pieces`."""
    count, batch = min(destinations.numel(), sources.numel()), memcpy_batch()
    if batch is not None:
        sizes = _sizes(count, size).data_ptr()
        return batch(destinations.data_ptr(), sources.data_ptr(), sizes, count, stream)
    # A loop over pieces: a driver before CUDA 12.8 copies them one by one.
    arrays = (cast("list[int]", each.view(-1)[:count].tolist()) for each in (destinations, sources))
    errors = (memcpy(to, origin, size, stream) for to, origin in zip(*arrays, strict=True))
    return next(filter(None, errors), 0)


@functools.lru_cache
def _sizes(count: int, size: int) -> torch.Tensor:
    return torch.full((count,), size, dtype=torch.int64)


def memcpy(destination: int, source: int, size: int, stream: int) -> int:
    """Enqueue one copy, whose direction follows from the addresses; returns CUDA's error."""
    return int(driver().cuMemcpyAsync(destination, source, size, stream)[0])


@functools.cache
def memcpy_batch() -> Callable[[int, int, int, int, int], int] | None:
    """Return `cuMemcpyBatchAsync` as CUDA 12.8 declares it; None where the driver has it not.

    It takes arrays of destinations, sources and sizes, their length, and a stream.
    """
    name = b"cuMemcpyBatchAsync"
    error, address, _ = driver().cuGetProcAddress(name, _FIRST_WITH_BATCHES, 0)
    if int(error) or not address:
        return None
    array, size = ctypes.c_void_p, ctypes.c_size_t
    kinds = (array, array, array, size, array, array, size, array, array)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(int(address))
    # `CUmemcpyAttributes`, with two locations that hint at nothing; from the first copy on.
    attributes, first, failed = (ctypes.c_int * 6)(_STREAM_ORDER), size(0), size(0)
    same = ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed)
    return lambda to, origin, sizes, count, stream: int(
        function(to, origin, sizes, count, *same, stream)
    )
