"""Streams of a CUDA device, on torch."""

from __future__ import annotations

import importlib.util
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from hicache_storage.pools.cuda_runtime import cuda_runtime
from hicache_storage.spec import ConfigError, InvalidPoolError, InvalidTransferError
from hicache_storage.transfer.cuda.runtime import (
    copy_rows,
    copy_with_gaps,
    is_capturing,
    mapped_tensor,
)
from hicache_storage.transfer.regions.rows import gather_rows, scatter_rows
from hicache_storage.transfer.streams import Rows, StreamFailedError
from hicache_storage.transfer.uploads import UploadBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.transfer.regions.runs import RowRuns
    from hicache_storage.transfer.streams import Event, Stream

logger = logging.getLogger(__name__)

COPY_BLOCKS: Final = 8
"""Multiprocessors that a kernel of the backend `mapped` occupies at most."""


class CudaEvent:
    """A `torch.cuda.Event` without timing.

    Args:
        pool: where it comes from and goes back to; making an event of CUDA for every copy costs as
            much as a small copy.
    """

    _pool: deque[torch.cuda.Event] | None = None
    _is_recorded = False

    def __init__(self, pool: deque[torch.cuda.Event] | None = None) -> None:
        self.native: torch.cuda.Event = pool.pop() if pool else torch.cuda.Event()  # type: ignore[no-untyped-call] # torch does not annotate it
        self._pool = pool

    def __del__(self) -> None:
        # Streams that wait for it already go on waiting for the place it stood for then.
        if self._pool is not None:
            self._pool.append(self.native)

    @property
    def is_recorded(self) -> bool:
        return self._is_recorded

    def record(self, stream: Stream) -> None:
        native = _cuda(stream).native
        _refuse_capture(native)
        self.native.record(native)
        self._is_recorded = True

    def query(self) -> bool:
        if not self._is_recorded:
            return True
        try:
            return bool(self.native.query())  # type: ignore[no-untyped-call] # torch does not annotate it
        except RuntimeError as error:
            raise StreamFailedError(str(error)) from error

    def synchronize(self) -> None:
        if self._is_recorded:
            _wait(self.native)


class CudaStream:
    """A `torch.cuda.Stream`.

    Wrap `torch.cuda.current_stream()` to have copies wait for a model's kernels.

    After a kernel has failed, CUDA refuses every further call on the device: what waits raises
    `StreamFailedError`, what enqueues torch's own error.

    Args:
        native: the stream.
        copy_blocks: multiprocessors that `move_rows` occupies at most.
        event: makes the events that it records itself.
    """

    def __init__(
        self,
        native: torch.cuda.Stream,
        *,
        copy_blocks: int = COPY_BLOCKS,
        event: Callable[[], CudaEvent] = CudaEvent,
    ) -> None:
        self.native = native
        self._copy_blocks = copy_blocks
        self._uploads = UploadBuffers(_pinned, event)

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError(f"a CUDA stream waits for CUDA events, not for {type(event).__name__}")
        _refuse_capture(self.native)
        if event.is_recorded:
            self.native.wait_event(event.native)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        with torch.cuda.stream(self.native):
            # torch copies these without gaps in one asynchronous call. With gaps between host and
            # device it would copy through pageable memory and wait.
            if destination.device == source.device or (
                destination.is_contiguous() and source.is_contiguous()
            ):
                destination.copy_(source, non_blocking=True)
            else:
                copy_with_gaps(destination, source, self.native)

    def copy_rows(
        self, destination: torch.Tensor, source: torch.Tensor, rows: RowRuns, what: str
    ) -> None:
        with torch.cuda.stream(self.native):
            copy_rows(destination, source, rows, self.native)

    def upload(self, rows: torch.Tensor) -> Rows:
        pinned, uploaded = self._uploads.take(len(rows))
        pinned.copy_(rows)
        with torch.cuda.stream(self.native):
            # Of this stream's own memory, which comes again only to what is enqueued behind the
            # kernels that read it.
            device = torch.empty(len(rows), dtype=torch.int64, device=self.native.device)
            device.copy_(pinned, non_blocking=True)
        uploaded.record(self)
        # A copy: the caller may change `rows` before the stream has come here.
        return Rows(rows.clone(), device)

    def gather(
        self, destination: torch.Tensor, source: torch.Tensor, rows: Rows, what: str
    ) -> None:
        with torch.cuda.stream(self.native):
            gather_rows(destination, source, rows.device)

    def scatter(
        self, destination: torch.Tensor, rows: Rows, source: torch.Tensor, what: str
    ) -> None:
        with torch.cuda.stream(self.native):
            scatter_rows(destination, rows.device, source)

    def move_rows(
        self,
        destination: torch.Tensor,
        destination_rows: Rows,
        source: torch.Tensor,
        source_rows: Rows,
        what: str,
    ) -> None:
        from hicache_storage.transfer.cuda.row_kernel import launch

        with torch.cuda.stream(self.native):
            launch(
                destination, destination_rows.device, source, source_rows.device, self._copy_blocks
            )

    def synchronize(self) -> None:
        _wait(self.native)


class CudaDevice:
    """Makes streams of one CUDA device.

    Its streams have the lowest priority that CUDA knows, so that the blocks of a model's kernels go
    first where the model runs on a stream of a higher one, such as
    `torch.cuda.Stream(priority=-1)`.

    Args:
        device: such as `"cuda:0"`; without a number, or None, the one that is current now.
        copy_blocks: multiprocessors that a kernel of the backend `mapped` occupies at most.

    Raises:
        ConfigError: there is no such device, or `copy_blocks` is not positive.
    """

    def __init__(
        self, device: torch.device | str | None = None, *, copy_blocks: int = COPY_BLOCKS
    ) -> None:
        if copy_blocks < 1:
            raise ConfigError(f"copy_blocks must be at least 1, got {copy_blocks}")
        self._device = cuda_device("cuda" if device is None else device)
        self._copy_blocks = copy_blocks
        self._moves_rows: bool | None = None
        self._events = deque[torch.cuda.Event]()
        cuda_runtime()

    @property
    def moves_rows(self) -> bool:
        """True if Triton is installed and compiles for this device.

        Tried once, which takes a second or two.
        """
        if self._moves_rows is None:
            self._moves_rows = self._compiles()
        return self._moves_rows

    def _compiles(self) -> bool:
        if importlib.util.find_spec("triton") is None:
            return False
        try:
            from hicache_storage.transfer.cuda.row_kernel import launch

            rows, memory = (
                torch.zeros(1, dtype=torch.int64, device=self._device),
                torch.zeros(2, 8, device=self._device),
            )
            with torch.cuda.device(self._device):
                # Only a launch tells: Triton compiles at the first call, with a compiler of this
                # machine.
                launch(memory, rows, memory, rows + 1, 1)
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # noqa: BLE001 - a compiler can fail in any way, and there is another kernel
            logger.warning(
                "Triton cannot compile for %s; 'mapped' copies through a buffer: %r",
                self._device,
                error,
            )
            return False
        return True

    def stream(self, name: str) -> CudaStream:
        # The lowest priority: kernels of a model on a stream of a higher one go first.
        native = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call] # torch does not annotate it
        return CudaStream(native, copy_blocks=self._copy_blocks, event=self.event)

    def event(self) -> CudaEvent:
        return CudaEvent(self._events)

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise InvalidPoolError(
                f"cannot allocate {size} bytes of staging on {self._device} ({error}); pass a "
                "smaller staging_bytes, or the backend 'direct', which needs none"
            ) from error
        for native in (_cuda(stream).native for stream in streams):
            # A former owner of this memory may still use it, on the current stream.
            native.wait_stream(torch.cuda.current_stream(self._device))
            # torch's allocator would otherwise hand the memory out again while this stream still
            # uses it.
            memory.record_stream(native)
        return memory

    def is_locked(self, memory: torch.Tensor) -> bool:
        return memory.device.type == "cuda" or memory.is_pinned()

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        return mapped_tensor(memory, self._device)


def cuda_device(device: torch.device | str) -> torch.device:
    """Return a CUDA device with its number.

    Each thread has a current device of its own, and a new thread's is the first.

    Raises:
        ConfigError: it is no CUDA device, or not there.
    """
    place = torch.device(device)
    if place.type != "cuda":
        raise ConfigError(f"device must be a CUDA device such as 'cuda:0', got {str(device)!r}")
    index = place.index if ":" in str(place) else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {str(device)!r}, and there are {torch.cuda.device_count()} CUDA devices, "
            "counted from 0"
        )
    return torch.device("cuda", index)


def _pinned(rows: int) -> torch.Tensor:
    return torch.empty(rows, dtype=torch.int64, pin_memory=True)


def _refuse_capture(native: torch.cuda.Stream) -> None:
    """Refuse a stream that is being captured into a graph.

    A copy would become part of the graph, or end its capture: each replay needs events and pages of
    its own.
    """
    if is_capturing(native.cuda_stream):
        raise InvalidTransferError(
            "a CUDA graph is being captured on this stream; call the cache, and LayerCounter.wait "
            "for the graph's last layer, before the graph is replayed"
        )


def _wait(native: torch.cuda.Event | torch.cuda.Stream) -> None:
    try:
        native.synchronize()
    except RuntimeError as error:
        raise StreamFailedError(str(error)) from error


def _cuda(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise TypeError(
            f"a CUDA event is recorded on a CUDA stream, not on {type(stream).__name__}"
        )
    return stream
