"""Host memory of pools: page-aligned, page-locked with CUDA, and seen as bytes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDE_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
_SERIAL_ELEMENTS = 32_768
"""Elements that torch copies in the calling thread.

With more it uses its OpenMP threads, whose start takes longer than the copy while an engine keeps
all cores busy.
"""


def host_tensor(
    shape: Sequence[int], dtype: torch.dtype, *, pin_memory: bool = True
) -> torch.Tensor:
    """Allocate a contiguous CPU tensor in a memory mapping of its own.

    The mapping goes when its last view does.

    The first byte is aligned to the machine's page (4096 bytes at least), as O_DIRECT wants it.
    Nothing is written: the kernel hands out zeroed pages when they are first touched.

    Args:
        shape: may hold zeros; such a tensor has no mapping.
        dtype: any element type.
        pin_memory: lock the memory for CUDA copies, in the context of the current device; all
            devices can use it then, and a forked child has no part in it. Has no effect where CUDA
            is not available.

    Raises:
        InvalidPoolError: there is not that much memory, or CUDA refuses to lock it.
    """
    size = math.prod(shape) * dtype.itemsize
    # `mmap` refuses a length of 0.
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    mapping = _map(size)
    # The array, not the mapping, is what the tensor keeps: at its end it calls finalizers before it
    # lets go of the mapping, whereas an mmap object unmaps first.
    owner = _array_type(size).from_buffer(mapping)
    tensor = torch.frombuffer(owner, dtype=torch.uint8)
    if pin_memory and torch.cuda.is_available():
        # After a fork the first to write gets another page, and the device would go on with the old
        # one.
        mapping.madvise(mmap.MADV_DONTFORK)
        _lock_pages(owner, tensor.data_ptr(), size)
    return tensor.view(dtype).view(tuple(shape))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor: writable, flat, without a copy.

    The view keeps the tensor alive.

    Raises:
        InvalidPoolError: the tensor is not contiguous or not in host memory.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InvalidPoolError(
            f"a tensor on {tensor.device} of shape {tuple(tensor.shape)} and stride "
            f"{tensor.stride()} has no flat host bytes"
        )
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    array = _array_type(size).from_address(tensor.data_ptr())
    # The array only has an address; this attribute keeps the tensor, and with it the memory.
    vars(array)["tensor"] = tensor
    return memoryview(array).cast("B")


def copy_columns(
    whole: memoryview, part: memoryview, rows: int, number: int, *, gathers: bool
) -> None:
    """Copy one of the equal columns of a matrix of bytes to a matrix of its own, or back.

    Args:
        whole: the matrix, row by row.
        part: the column, row by row.
        rows: rows of both.
        number: of the column.
        gathers: from `whole` to `part`; otherwise back.
    """
    width = len(part) // rows
    element = next(kind for kind in _WIDE_TYPES if width % kind.itemsize == 0)
    column = width // element.itemsize
    wide = torch.frombuffer(whole, dtype=element).view(rows, -1)
    wide = wide.narrow(1, number * column, column)
    narrow = torch.frombuffer(part, dtype=element).view(rows, column)
    source, target = (wide, narrow) if gathers else (narrow, wide)
    step = max(1, _SERIAL_ELEMENTS // column)
    for start in range(0, rows, step):
        target[start : start + step].copy_(source[start : start + step])


def in_host_memory(ranges: Sequence[tuple[int, int]]) -> bool:
    """Return True if this process can read and write all `(address, length)` ranges.

    Device memory is not: CUDA reserves its addresses without giving the CPU access.
    """
    mapped = _writable_mappings()
    return all(
        any(start <= address and address + size <= end for start, end in mapped)
        for address, size in ranges
    )


# The same few sizes come again and again, and making a type costs 7 us.
@functools.lru_cache(maxsize=64)
def _array_type(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * size


def _map(size: int) -> mmap.mmap:
    # Private, unlike the default of `mmap`: a forked child must not write into its parent's pool.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        raise InvalidPoolError(
            f"cannot map {size} bytes of host memory ({error}); pass a smaller size"
        ) from error
    # First touch of a GiB: 0.6 s in huge pages, 1.6 s in small ones. A kernel without them says
    # EINVAL.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _lock_pages(owner: ctypes.Array[ctypes.c_ubyte], address: int, size: int) -> None:
    runtime = cast("Any", torch.cuda.cudart())  # type: ignore[no-untyped-call] # torch does not annotate it
    error = runtime.cudaHostRegister(address, size, 0)
    if int(error):
        take_error()
        raise InvalidPoolError(
            f"CUDA cannot lock {size} bytes of host memory ({error}); pass a smaller size, or "
            "pin_memory=False"
        )
    # At exit the CUDA context may go first, and the kernel releases the memory anyway.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False


def take_error() -> None:
    """Take back the error of a call that CUDA has just refused.

    The runtime keeps it for this thread, and torch would raise it after the next kernel that it
    launches: after this one.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _writable_mappings() -> list[tuple[int, int]]:
    """Readable and writable ranges `[start, end)` of this process, adjacent ones joined."""
    ranges: list[tuple[int, int]] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _ = line.split(maxsplit=2)
            if not access.startswith("rw"):
                continue
            start, end = (int(text, 16) for text in span.split("-"))
            # The kernel may split one allocation into several mappings, as for `madvise` on a part
            # of it.
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
    return ranges
