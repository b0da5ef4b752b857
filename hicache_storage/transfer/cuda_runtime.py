"""What of the CUDA runtime torch does not offer: asynchronous copies between memories with gaps, and mapped host memory."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch

from hicache_storage.spec import InvalidPoolError
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


class _Mapped:
    """Host memory at its device address, for torch to take as a tensor; keeps the memory alive."""

    def __init__(self, memory: torch.Tensor, address: int) -> None:
        self.memory = memory
        size = memory.numel() * memory.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,), "strides": None, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def mapped_tensor(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Page-locked host memory as a tensor on the device.

    Args:
        memory: contiguous.

    Raises:
        InvalidPoolError: it is not page-locked, or CUDA has not mapped it.
    """
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        error = _host_get_device_pointer()(ctypes.byref(address), memory.data_ptr(), 0)
        if error or not address.value:
            raise InvalidPoolError(
                f"kernels cannot reach the host pool's memory (CUDA error {error}); make the pool with pin_memory=True, "
                "or pass another backend"
            )
        flat = torch.as_tensor(_Mapped(memory, address.value), device=device)
    if flat.data_ptr() != address.value:
        raise InvalidPoolError(f"torch {torch.__version__} copies mapped memory instead of using it; pass another backend")
    return flat.view(memory.dtype).view(memory.shape)


@functools.cache
def _host_get_device_pointer() -> Callable[..., int]:
    torch.cuda.init()  # type: ignore[no-untyped-call] # torch does not annotate it
    function = _loaded_runtime().cudaHostGetDevicePointer
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint), ctypes.c_int
    return function


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
