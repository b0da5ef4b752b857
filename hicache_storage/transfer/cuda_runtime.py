"""What of CUDA torch does not offer: asynchronous copies between memories with gaps, and mapped host memory."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, cast

import torch
from torch.utils.dlpack import from_dlpack

from hicache_storage.pools.cuda_runtime import cuda_runtime, forget_error
from hicache_storage.spec import InvalidPoolError
from hicache_storage.transfer.rectangles import rectangles
from hicache_storage.transfer.streams import StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFAULT_KIND = 4
"""cudaMemcpyDefault: the direction follows from the addresses."""
_DL_CUDA = 2
"""DLPack's number for memory of a CUDA device."""


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
            forget_error()
            raise StreamFailedError(f"cudaMemcpy2DAsync of {height} rows of {width} bytes failed with error {error}")


def mapped_tensor(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Page-locked host memory as a tensor on the device.

    Args:
        memory: contiguous.
        device: with its index.

    Raises:
        InvalidPoolError: it is not page-locked, or CUDA has not mapped it.
    """
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        error = _host_get_device_pointer()(ctypes.byref(address), memory.data_ptr(), 0)
    if error or not address.value:
        forget_error()
        raise InvalidPoolError(
            f"kernels cannot reach the host pool's memory (CUDA error {error}); make the pool with pin_memory=True, "
            "or pass another backend"
        )
    flat = relabelled(memory.view(-1).view(torch.uint8), address.value, _DL_CUDA, device.index)
    return flat.view(memory.dtype).view(memory.shape)


def relabelled(memory: torch.Tensor, address: int, device_type: int, device_id: int) -> torch.Tensor:
    """The same memory as a tensor that is said to lie at another address, on another device; keeps the memory alive.

    `__cuda_array_interface__` would need NumPy, and put the tensor on the device that was current when the memory was locked.

    Args:
        memory: uint8, of one axis.
        address, device_type, device_id: as DLPack counts them.
    """
    capsule = cast("object", memory.__dlpack__())
    lent = _Lent.from_address(_capsule_pointer(capsule, b"dltensor"))
    lent.data, lent.device_type, lent.device_id = address, device_type, device_id
    return from_dlpack(capsule)


class _Lent(ctypes.Structure):
    """The beginning of DLPack's `DLManagedTensor`."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


def _capsule_pointer(capsule: object, name: bytes) -> int:
    function = ctypes.pythonapi.PyCapsule_GetPointer
    function.argtypes, function.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    return int(function(capsule, name))


@functools.cache
def _host_get_device_pointer() -> Callable[..., int]:
    function = cuda_runtime().cudaHostGetDevicePointer
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint), ctypes.c_int
    return function


@functools.cache
def _memcpy_2d() -> Callable[..., int]:
    function = cuda_runtime().cudaMemcpy2DAsync
    sizes = (ctypes.c_void_p, ctypes.c_size_t) * 2 + (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    function.argtypes, function.restype = sizes, ctypes.c_int
    return function
