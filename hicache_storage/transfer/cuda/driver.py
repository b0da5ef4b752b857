"""Calls of NVIDIA's driver: kernels, DMA in batches, and addresses."""

from __future__ import annotations

import ctypes
import functools
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from hicache_storage.spec import ConfigError, InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

THREADS: Final = 512
_FIRST_WITH_BATCHES: Final = 12080
_STREAM_ORDER: Final = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read when the stream comes to its copy."""


def copy_pieces(destinations: int, sources: int, count: int, size: int, stream: int) -> int:
    """Enqueue copies; returns CUDA's error. See `Stream.copy_pieces`."""
    sizes = _sizes(1 << count.bit_length(), size).data_ptr()
    return memcpy_batch()(destinations, sources, sizes, count, stream)


@functools.lru_cache
def _sizes(count: int, size: int) -> torch.Tensor:
    return torch.full((count,), size, dtype=torch.int64)


def memcpy(destination: int, source: int, size: int, stream: int) -> int:
    """Enqueue one copy, whose direction follows from the addresses; returns CUDA's error."""
    return int(driver().cuMemcpyAsync(destination, source, size, stream)[0])


@functools.cache
def memcpy_batch() -> Callable[[int, int, int, int, int], int]:
    """Return `cuMemcpyBatchAsync` as CUDA 12.8 declares it.

    It takes arrays of destinations, sources and sizes, their length, and a stream. NVIDIA's
    bindings take lists, which costs a conversion for each piece.

    Raises:
        ConfigError: the driver is older.
    """
    name = b"cuMemcpyBatchAsync"
    error, address, _ = driver().cuGetProcAddress(name, _FIRST_WITH_BATCHES, 0)
    if int(error) or not address:
        raise ConfigError("copies on CUDA need an NVIDIA driver for CUDA 12.8 or later")
    array, size = ctypes.c_void_p, ctypes.c_size_t
    kinds = (array, array, array, size, array, array, size, array, array)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(int(address))
    # `CUmemcpyAttributes`, with two locations that hint at nothing; from the first copy on.
    attributes, first, failed = (ctypes.c_int * 6)(_STREAM_ORDER), size(0), size(0)
    same = ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed)
    return lambda to, origin, sizes, count, stream: int(
        function(to, origin, sizes, count, *same, stream)
    )


def launch(function: Any, blocks: int, stream: int, arguments: int) -> int:
    """Enqueue a kernel; returns CUDA's error."""
    grid, block = (blocks, 1, 1), (THREADS, 1, 1)
    return int(driver().cuLaunchKernel(function, *grid, *block, 0, stream, arguments, 0)[0])


def address(view: torch.Tensor) -> int:
    """Where kernels find memory, of the device or page-locked.

    Raises:
        InvalidPoolError: they do not reach it.
    """
    if view.device.type == "cuda":
        return view.data_ptr()
    error, found = driver().cuMemHostGetDevicePointer(view.data_ptr(), 0)
    if int(error):
        raise InvalidPoolError(
            f"kernels cannot reach the host pool's memory (CUDA error {int(error)}); make the pool "
            "with pin_memory=True"
        )
    return int(found)


def is_capturing(stream: int) -> bool:
    """Return True while a stream is captured into a graph."""
    return bool(int(driver().cuStreamIsCapturing(stream)[1] or 0))


@contextmanager
def nvidia() -> Generator[None]:
    """Name what is to be installed where a part of NVIDIA's is missing.

    Raises:
        ConfigError: it is.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "copies on CUDA need cuda-core, cuda-bindings and NVRTC, which compiles their kernel: "
            f"pip install 'hicache-storage[cuda]' ({error})"
        ) from error


@functools.cache
def driver() -> Any:
    """NVIDIA's bindings of the driver."""
    with nvidia():
        return importlib.import_module("cuda.bindings.driver")
