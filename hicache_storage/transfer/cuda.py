"""Streams of a CUDA device, on torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
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
            destination.copy_(source, non_blocking=True)

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


def _cuda(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise TypeError(f"a CUDA event is recorded on a CUDA stream, not on {type(stream).__name__}")
    return stream
