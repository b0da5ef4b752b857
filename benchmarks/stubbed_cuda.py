"""A CUDA device whose calls are counted, and made by the CPU or not at all: what enqueueing itself
costs, and where it leads."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections import Counter, deque
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch

from hicache_storage.transfer import CudaEvent, CudaStream
from hicache_storage.transfer.cuda import device as cuda_module
from hicache_storage.transfer.cuda import runtime as cuda_runtime
from hicache_storage.transfer.regions.rows import gather_rows, scatter_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_storage.transfer import Stream


class _Native:
    """Stands for a stream or an event of torch: everything is over at once."""

    cuda_stream, device = 1, torch.device("cpu")

    def record(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class StubbedDevice:
    """Makes the SDK's streams and events of CUDA, on top of nothing. To be used within `stubbed`.

    Args:
        moves_rows: whether there seems to be Triton.
    """

    def __init__(self, *, moves_rows: bool = True) -> None:
        self.moves_rows = moves_rows
        self._events = cast("deque[torch.cuda.Event]", deque[_Native]())

    def stream(self, name: str) -> CudaStream:
        return CudaStream(cast("torch.cuda.Stream", _Native()), event=self.event)

    def event(self) -> CudaEvent:
        if not self._events:
            self._events.append(cast("torch.cuda.Event", _Native()))
        return CudaEvent(self._events)

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def is_locked(self, memory: torch.Tensor) -> bool:
        return True

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        return memory


@contextmanager
def stubbed(*, executes: bool = False, batches: bool = True) -> Iterator[Counter[str]]:
    """Replace the calls of CUDA; gives how often each was made.

    Args:
        executes: let the CPU do what they would.
        batches: whether there seems to be `cudaMemcpyBatchAsync`.
    """
    calls = Counter[str]()

    def counted(name: str, call: Callable[..., object]) -> Callable[..., Any]:
        def stub(*arguments: Any) -> Any:
            calls[name] += 1
            return call(*arguments) if executes else 0

        return stub

    kernel = _Kernel(counted("kernel", _no_kernel))
    with ExitStack() as patches:
        sys_modules = (
            {}
            if "triton" in sys.modules
            else {"triton": _triton(), "triton.language": ModuleType("triton.language")}
        )
        patches.enter_context(patch.dict(sys.modules, sys_modules))
        row_kernel = importlib.import_module("hicache_storage.transfer.cuda.row_kernel")
        stubs: list[tuple[object, str, object]] = [
            (torch.cuda, "stream", lambda native: nullcontext()),
            (cuda_module, "_pinned", lambda rows: torch.empty(rows, dtype=torch.int64)),
            (cuda_module, "is_capturing", lambda stream: False),
            (cuda_module, "gather_rows", counted("kernel", gather_rows)),
            (cuda_module, "scatter_rows", counted("kernel", scatter_rows)),
            (row_kernel, "_copy_rows", kernel),
            (cuda_runtime, "_memcpy", lambda: counted("copy", _copy)),
            (cuda_runtime, "_memcpy_2d", lambda: counted("copy", _copy_2d)),
            (
                cuda_runtime,
                "memcpy_batch",
                lambda: counted("batch", _copy_batch) if batches else None,
            ),
        ]
        for owner, name, stub in stubs:
            patches.enter_context(patch.object(owner, name, stub))
        yield calls


class _Kernel:
    """Stands for a kernel of Triton, which is launched by `kernel[grid](...)`."""

    def __init__(self, launch: Callable[..., object]) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *arguments, **options: self._launch(*arguments)


def _triton() -> ModuleType:
    """As much of Triton as the import of a kernel needs."""
    made = ModuleType("triton")
    vars(made)["jit"] = lambda **options: lambda function: function
    return made


def _no_kernel(*arguments: object) -> None:
    raise NotImplementedError(
        "kernels of Triton are not executed here; test_row_kernel.py does that"
    )


def _copy(to: int, origin: int, size: int, kind: int, stream: int) -> int:
    ctypes.memmove(to, origin, size)
    return 0


def _copy_2d(
    to: int,
    to_pitch: int,
    origin: int,
    origin_pitch: int,
    width: int,
    height: int,
    kind: int,
    stream: int,
) -> int:
    for row in range(height):
        ctypes.memmove(to + row * to_pitch, origin + row * origin_pitch, width)
    return 0


def _copy_batch(destinations: int, sources: int, sizes: int, count: int, stream: int) -> int:
    arrays = (
        (ctypes.c_uint64 * count).from_address(address)
        for address in (destinations, sources, sizes)
    )
    for to, origin, size in zip(*arrays, strict=True):
        ctypes.memmove(to, origin, size)
    return 0
