"""Streams of a CUDA device, on torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.transfer.cuda_runtime import copy_with_gaps, mapped_tensor
from hicache_storage.transfer.rows import gather_rows, scatter_rows
from hicache_storage.transfer.streams import Rows

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
        return bool(self.native.query())  # type: ignore[no-untyped-call] # torch does not annotate it

    def synchronize(self) -> None:
        self.native.synchronize()


class CudaStream:
    """A `torch.cuda.Stream`; wrap `torch.cuda.current_stream()` to have copies wait for a model's kernels.

    A failed kernel surfaces as torch's own error in the next call that waits.
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
        self.native.synchronize()


class CudaDevice:
    """Makes streams of one CUDA device.

    Args:
        device: such as `"cuda:0"`; None means the current one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device("cuda" if device is None else device)

    def stream(self, name: str) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call] # torch does not annotate it

    def event(self) -> CudaEvent:
        return CudaEvent()

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        for native in (_cuda(stream).native for stream in streams):
            # Whoever had this memory before may still use it, on the stream that is the current one here.
            native.wait_stream(torch.cuda.current_stream(self._device))
            memory.record_stream(native)
        return memory

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        return mapped_tensor(memory, self._device)


def _cuda(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise TypeError(f"a CUDA event is recorded on a CUDA stream, not on {type(stream).__name__}")
    return stream
