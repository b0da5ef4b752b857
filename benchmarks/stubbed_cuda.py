"""A CUDA device whose calls are counted, and made by the CPU or not at all: what enqueueing itself
costs, and where it leads."""

from __future__ import annotations

import ctypes
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch

from hicache_storage.transfer import CudaDevice, CudaStream
from hicache_storage.transfer.cuda import device as cuda_module
from hicache_storage.transfer.cuda import kernel as kernel_module

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


class CurrentDevice:
    """Stands for `torch.cuda.device`: makes a device the current one within a `with` statement."""

    number = 0
    """Of the current device."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = [device.index or 0]

    def _exchange(self, *error: object) -> None:
        self._numbers.append(CurrentDevice.number)
        CurrentDevice.number = self._numbers.pop(0)

    __enter__ = __exit__ = _exchange


class StubbedDevice(CudaDevice):
    """Makes the SDK's streams of CUDA, on top of nothing. To be used within `stubbed`.

    Args:
        number: of the device. Its memory is the CPU's.
    """

    def __init__(self, number: int = 0) -> None:
        self._device = torch.device("cpu", number)

    def stream(self, name: str, priority: str | None = None) -> CudaStream:
        native = cast("torch.cuda.Stream", _Native())
        return CudaStream(native, may_capture=priority is None)

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


@contextmanager
def stubbed(launch: Callable[[int, int, int], object] | None = None) -> Iterator[Counter[str]]:
    """Replace the calls of CUDA; gives how often each was made.

    Args:
        launch: runs the kernel, given the bytes of a word, its blocks and the address of its
            arguments; DMA is executed, too, then. None: nothing is.
    """
    calls = Counter[str]()

    def counted(name: str, call: Callable[..., object]) -> Callable[..., Any]:
        def stub(*arguments: Any) -> Any:
            calls[name] += 1
            if launch is not None:
                call(*arguments)
            return 0

        return stub

    def run(function: int, blocks: int, stream: int, arguments: int) -> None:
        assert launch is not None
        launch(function, blocks, arguments)

    stubs: list[tuple[object, str, object]] = [
        (torch.cuda, "device", CurrentDevice),
        (torch.cuda, "Event", _Native),
        (torch.cuda, "stream", lambda native: nullcontext()),
        (torch.cuda, "current_stream", lambda device: _Native()),
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (cuda_module, "_pinned", lambda rows: torch.empty(rows, dtype=torch.int64)),
        (cuda_module, "is_capturing", lambda stream: False),
        (cuda_module, "memcpy", counted("upload", _copy)),
        (cuda_module, "copy_pieces", counted("DMA", _copy_pieces)),
        (kernel_module, "address", lambda view: view.data_ptr()),
        (kernel_module, "kernel", lambda arch, word: word),
        (kernel_module, "launch", counted("kernel", run)),
    ]
    with ExitStack() as patches:
        for owner, name, stub in stubs:
            patches.enter_context(patch.object(owner, name, stub))
        yield calls


def _copy(to: int, origin: int, size: int, stream: int) -> None:
    ctypes.memmove(to, origin, size)


def _copy_pieces(destinations: int, sources: int, count: int, size: int, stream: int) -> None:
    arrays = ((ctypes.c_uint64 * count).from_address(each) for each in (destinations, sources))
    for to, origin in zip(*arrays, strict=True):
        ctypes.memmove(to, origin, size)
