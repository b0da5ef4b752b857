"""CUDA functions that torch lacks: asynchronous strided copies, and mapped host memory."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import TYPE_CHECKING, Final, cast

import torch
from torch.utils.dlpack import from_dlpack

from hicache_storage.pools.cuda_runtime import cuda_runtime, forget_error
from hicache_storage.spec import InvalidPoolError
from hicache_storage.transfer.regions.pieces import pieces_of
from hicache_storage.transfer.regions.rectangles import rectangles
from hicache_storage.transfer.streams import StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicache_storage.transfer.regions.rectangles import Rectangle
    from hicache_storage.transfer.regions.runs import RowRuns

FEW_CALLS: Final = 8
"""Rectangles that are copied one by one, at most.

A copy engine reads a rectangle as one, and a batch as its rows.
"""
_DEFAULT_KIND = 4
"""cudaMemcpyDefault: the direction follows from the addresses."""
_STREAM_ORDER = 1
"""cudaMemcpySrcAccessOrderStream: a source is read when the stream comes to its copy."""
_FIRST_WITH_BATCHES = 12080
_FIRST_WITHOUT_FAILED_INDEX = 13000
_NO_BATCHES: Final = (36, 801)
"""cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported: copied one by one then."""
_DL_CUDA = 2
"""DLPack's number for memory of a CUDA device."""


def copy_with_gaps(
    destination: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream
) -> None:
    """Enqueue a copy between page-locked host memory and the device.

    The stream's device is the current one.

    torch itself would gather the host's side in memory that is not page-locked, and wait for the
    stream.

    Raises:
        StreamFailedError: CUDA refuses it.
    """
    _copy_rectangles(rectangles(destination, source), stream.cuda_stream)


def copy_rows(
    destination: torch.Tensor, source: torch.Tensor, rows: RowRuns, stream: torch.cuda.Stream
) -> None:
    """Enqueue copies of rows between page-locked host memory and the device.

    The stream's device is the current one.

    That is one call of CUDA, or a few where the rows are a few rectangles. Before CUDA 12.8 it is
    one for each piece.

    Raises:
        StreamFailedError: CUDA refuses it.
    """
    few = _few_rectangles(destination, source, rows)
    if few is not None:
        _copy_rectangles(few, stream.cuda_stream)
        return
    pieces = pieces_of(destination, source, rows)
    destinations, sources = (
        pieces.destinations + destination.data_ptr(),
        pieces.sources + source.data_ptr(),
    )
    error = _copy_batch(destinations, sources, pieces.sizes, stream.cuda_stream)
    if error:
        _refused(error, f"copy of {len(destinations)} pieces")


def _few_rectangles(
    destination: torch.Tensor, source: torch.Tensor, rows: RowRuns
) -> list[Rectangle] | None:
    """The rectangles that the rows consist of; None if they are many."""
    if rows.run_num > FEW_CALLS:
        return None
    each = (
        rectangles(destination.narrow(0, to, count), source.narrow(0, origin, count))
        for origin, to, count in rows.runs()
    )
    few = list(itertools.islice(itertools.chain.from_iterable(each), FEW_CALLS + 1))
    return few if len(few) <= FEW_CALLS else None


def _copy_rectangles(wanted: Iterable[Rectangle], stream: int) -> None:
    for to, to_pitch, origin, origin_pitch, width, height in wanted:
        if height == 1:
            # A block may be longer than a pitch.
            error = _memcpy()(to, origin, width, _DEFAULT_KIND, stream)
        else:
            error = _memcpy_2d()(
                to, to_pitch, origin, origin_pitch, width, height, _DEFAULT_KIND, stream
            )
        if error:
            _refused(error, f"copy of {height} rows of {width} bytes")


def _copy_batch(
    destinations: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor, stream: int
) -> int:
    batch = memcpy_batch()
    # The default stream takes no batches.
    if batch is not None and stream:
        error = batch(
            destinations.data_ptr(), sources.data_ptr(), sizes.data_ptr(), len(sizes), stream
        )
        if error not in _NO_BATCHES:
            return error
        # The driver knows no batches: its refusal must not surface at the next kernel.
        forget_error()
    copy = _memcpy()
    arrays = (cast("list[int]", numbers.tolist()) for numbers in (destinations, sources, sizes))
    errors = (
        copy(to, origin, size, _DEFAULT_KIND, stream)
        for to, origin, size in zip(*arrays, strict=True)
    )
    return next(filter(None, errors), 0)


def _refused(error: int, what: str) -> None:
    forget_error()
    raise StreamFailedError(f"{what} failed with CUDA error {error}")


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
            f"kernels cannot reach the host pool's memory (CUDA error {error}); make the pool "
            "with pin_memory=True, or pass another backend"
        )
    flat = relabelled(memory.view(-1).view(torch.uint8), address.value, _DL_CUDA, device.index)
    return flat.view(memory.dtype).view(memory.shape)


def relabelled(
    memory: torch.Tensor, address: int, device_type: int, device_id: int
) -> torch.Tensor:
    """Return the same memory as a tensor at another address, on another device.

    The tensor keeps the memory alive.

    `__cuda_array_interface__` would need NumPy, and put the tensor on the device that was current
    when the memory was locked.

    Args:
        memory: uint8, of one axis.
        address, device_type, device_id: as DLPack counts them.
    """
    # `from_dlpack` takes the capsule over, and with it the reference that keeps the memory.
    capsule = cast("object", memory.__dlpack__())
    lent = _Lent.from_address(_capsule_pointer(capsule, b"dltensor"))
    lent.data = address
    lent.device_type = device_type
    lent.device_id = device_id
    return from_dlpack(capsule)


class _Lent(ctypes.Structure):
    """The beginning of DLPack's `DLManagedTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


def _capsule_pointer(capsule: object, name: bytes) -> int:
    function = ctypes.pythonapi.PyCapsule_GetPointer
    function.argtypes = (ctypes.py_object, ctypes.c_char_p)
    function.restype = ctypes.c_void_p
    return int(function(capsule, name))


@functools.cache
def _host_get_device_pointer() -> Callable[..., int]:
    function = cuda_runtime().cudaHostGetDevicePointer
    # Without types ctypes passes integers as 32 bits, which cuts addresses.
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def is_capturing(stream: int) -> bool:
    """Return True while a stream is captured into a graph."""
    status = ctypes.c_int()
    error = _stream_is_capturing()(stream, ctypes.byref(status))
    if error:
        forget_error()
    return bool(status.value)


@functools.cache
def _stream_is_capturing() -> Callable[..., int]:
    function = cuda_runtime().cudaStreamIsCapturing
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function


@functools.cache
def _memcpy() -> Callable[..., int]:
    function = cuda_runtime().cudaMemcpyAsync
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    )
    function.restype = ctypes.c_int
    return function


@functools.cache
def _memcpy_2d() -> Callable[..., int]:
    function = cuda_runtime().cudaMemcpy2DAsync
    sizes = (ctypes.c_void_p, ctypes.c_size_t) * 2 + (
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    )
    function.argtypes = sizes
    function.restype = ctypes.c_int
    return function


class _Location(ctypes.Structure):
    """`cudaMemLocation`; zeros are no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`cudaMemcpyAttributes`."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def memcpy_batch() -> Callable[[int, int, int, int, int], int] | None:
    """Return `cudaMemcpyBatchAsync` of the loaded runtime.

    It takes arrays of destinations, sources and sizes, their length, and a stream.

    None before CUDA 12.8. CUDA 13 has dropped the argument that tells which copy was refused.
    """
    version = runtime_version()
    if version < _FIRST_WITH_BATCHES:
        return None
    function = cuda_runtime().cudaMemcpyBatchAsync
    attributes, first = _Attributes(source_access_order=_STREAM_ORDER), ctypes.c_size_t(0)
    failed = (ctypes.byref(ctypes.c_size_t(0)),) if version < _FIRST_WITHOUT_FAILED_INDEX else ()
    array, pointers = ctypes.c_void_p, (ctypes.c_void_p,) * len(failed)
    function.argtypes = (
        array,
        array,
        array,
        ctypes.c_size_t,
        array,
        array,
        ctypes.c_size_t,
        *pointers,
        ctypes.c_void_p,
    )
    function.restype = ctypes.c_int

    def copy(destinations: int, sources: int, sizes: int, count: int, stream: int) -> int:
        # One set of attributes, which holds from the first copy on.
        same = ctypes.byref(attributes), ctypes.byref(first), 1
        return int(function(destinations, sources, sizes, count, *same, *failed, stream))

    return copy


@functools.cache
def runtime_version() -> int:
    """Of the CUDA runtime, such as 12080."""
    version = ctypes.c_int()
    cuda_runtime().cudaRuntimeGetVersion(ctypes.byref(version))
    return version.value
