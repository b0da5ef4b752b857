"""Streams of a CUDA device, on torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.pools.cuda_runtime import cuda_runtime
from hicache_storage.spec import ConfigError, InvalidPoolError
from hicache_storage.transfer.cuda_runtime import copy_with_gaps, mapped_tensor
from hicache_storage.transfer.rows import gather_rows, scatter_rows
from hicache_storage.transfer.streams import Rows, StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.transfer.streams import Event, Stream


class CudaEvent:
    """A `torch.cuda.Event` without timing."""

    def __init__(self) -> None:
        self.native: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch does not annotate it

    def record(self, stream: Stream) -> None:
        self.native.record(_cuda(stream).native)

    def query(self) -> bool:
        try:
            return bool(self.native.query())  # type: ignore[no-untyped-call] # torch does not annotate it
        except RuntimeError as error:
            raise StreamFailedError(str(error)) from error

    def synchronize(self) -> None:
        _wait(self.native)


class CudaStream:
    """A `torch.cuda.Stream`; wrap `torch.cuda.current_stream()` to have copies wait for a model's kernels.

    After a kernel has failed, CUDA refuses every further call on the device: what waits raises `StreamFailedError`, what
    enqueues torch's own error.
    """

    def __init__(self, native: torch.cuda.Stream) -> None:
        self.native = native

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError(f"a CUDA stream waits for CUDA events, not for {type(event).__name__}")
        self.native.wait_event(event.native)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        with torch.cuda.stream(self.native):
            if destination.device == source.device or (destination.is_contiguous() and source.is_contiguous()):
                destination.copy_(source, non_blocking=True)
            else:
                copy_with_gaps(destination, source, self.native)

    def upload(self, rows: torch.Tensor) -> Rows:
        host = rows.pin_memory()
        with torch.cuda.stream(self.native):
            return Rows(host, host.to(self.native.device, non_blocking=True))

    def gather(self, destination: torch.Tensor, source: torch.Tensor, rows: Rows, what: str) -> None:
        with torch.cuda.stream(self.native):
            gather_rows(destination, source, rows.device)

    def scatter(self, destination: torch.Tensor, rows: Rows, source: torch.Tensor, what: str) -> None:
        with torch.cuda.stream(self.native):
            scatter_rows(destination, rows.device, source)

    def synchronize(self) -> None:
        _wait(self.native)


class CudaDevice:
    """Makes streams of one CUDA device.

    Args:
        device: such as `"cuda:0"`; without a number, or None, the one that is current now.

    Raises:
        ConfigError: there is no such device.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = cuda_device("cuda" if device is None else device)
        cuda_runtime()

    def stream(self, name: str) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call] # torch does not annotate it

    def event(self) -> CudaEvent:
        return CudaEvent()

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise InvalidPoolError(
                f"cannot allocate {size} bytes of staging on {self._device} ({error}); pass a smaller staging_bytes, "
                "or the backend 'direct', which needs none"
            ) from error
        for native in (_cuda(stream).native for stream in streams):
            # Whoever had this memory before may still use it, on the stream that is the current one here.
            native.wait_stream(torch.cuda.current_stream(self._device))
            memory.record_stream(native)
        return memory

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        return mapped_tensor(memory, self._device)


def cuda_device(device: torch.device | str) -> torch.device:
    """A CUDA device with its number; each thread has a current device of its own, and a new thread's is the first.

    Raises:
        ConfigError: it is no CUDA device, or not there.
    """
    place = torch.device(device)
    if place.type != "cuda":
        raise ConfigError(f"device must be a CUDA device such as 'cuda:0', got {str(device)!r}")
    index = place.index if ":" in str(place) else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device is {str(device)!r}, and there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", index)


def _wait(native: torch.cuda.Event | torch.cuda.Stream) -> None:
    try:
        native.synchronize()
    except RuntimeError as error:
        raise StreamFailedError(str(error)) from error


def _cuda(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise TypeError(f"a CUDA event is recorded on a CUDA stream, not on {type(stream).__name__}")
    return stream
