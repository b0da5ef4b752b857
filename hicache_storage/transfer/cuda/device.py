"""Streams of a CUDA device, on torch."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from hicache_storage.spec import ConfigError, InvalidPoolError, InvalidTransferError
from hicache_storage.transfer.cuda.driver import copy_pieces, is_capturing, memcpy
from hicache_storage.transfer.cuda.kernel import CudaRowCopy
from hicache_storage.transfer.streams import StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.pools.pages import Numbers
    from hicache_storage.transfer.streams import Priority, RowSide

PREPARED_UPLOADS: Final = 4
"""Page-locked buffers that a page table has from the beginning on."""


class CudaEvent:
    """A recorded `torch.cuda.Event` without timing.

    Args:
        pool: where it goes back to; making one for every copy costs as much as a small copy.
    """

    def __init__(self, native: torch.cuda.Event, pool: deque[torch.cuda.Event]) -> None:
        self.native = native
        self._pool = pool

    def __del__(self) -> None:
        # Streams that wait for it already go on waiting for the place it stood for then.
        self._pool.append(self.native)

    def query(self) -> bool:
        try:
            return bool(self.native.query())  # type: ignore[no-untyped-call] # torch does not annotate it
        except RuntimeError as error:
            raise StreamFailedError(str(error)) from error

    def synchronize(self) -> None:
        _wait(self.native)


class CudaStream:
    """A `torch.cuda.Stream`.

    Wrap `torch.cuda.current_stream()` to have copies wait for a model's kernels.

    After a kernel has failed, CUDA refuses every further call on the device: what waits raises
    `StreamFailedError`, what enqueues torch's own error or that.

    Args:
        may_capture: False for a stream that no graph captures: one question less at each call.
    """

    def __init__(self, native: torch.cuda.Stream, *, may_capture: bool = True) -> None:
        self.native = native
        self.may_capture = may_capture
        self._handle: int = native.cuda_stream
        self._events = deque[torch.cuda.Event]()

    def record(self) -> CudaEvent:
        self._refuse_capture()
        native = self._events.pop() if self._events else torch.cuda.Event()  # type: ignore[no-untyped-call] # torch does not annotate it
        native.record(self.native)
        return CudaEvent(native, self._events)

    def wait_event(self, event: CudaEvent) -> None:
        self._refuse_capture()
        self.native.wait_event(event.native)

    def upload(self, table: CudaPageTable, numbers: Numbers) -> None:
        pinned = table.fill(numbers)
        _check(memcpy(table.rows[0], pinned.data_ptr(), numbers.nbytes, self._handle), "upload")
        table.used.append((pinned, self.record()))

    def copy_rows(self, rows: CudaRowCopy, parts: range, pages: range, what: str) -> None:
        _check(rows.launch(self._handle, parts, pages), what)

    def copy_pieces(
        self, destinations: int, sources: int, count: int, size: int, what: str
    ) -> None:
        _check(copy_pieces(destinations, sources, count, size, self._handle), what)

    def synchronize(self) -> None:
        _wait(self.native)

    def _refuse_capture(self) -> None:
        # A copy would become part of the graph, or end its capture: each replay needs events and
        # pages of its own.
        if self.may_capture and is_capturing(self._handle):
            raise InvalidTransferError(
                "a CUDA graph is being captured on this stream; call the cache, and "
                "LayerCounter.wait for the graph's last layer, before the graph is replayed"
            )


class CudaPageTable:
    """Page numbers on the device, and page-locked buffers that they are uploaded from in turn.

    Locking memory may wait for the device, so there are no new buffers as long as the oldest is
    free.
    """

    def __init__(self, pages: int, device: torch.device) -> None:
        self._memory = torch.empty(2 * pages, dtype=torch.int64, device=device)
        # A former owner of this memory may still use it.
        torch.cuda.current_stream(device).synchronize()
        # An event that was never recorded counts as reached.
        free = CudaEvent(torch.cuda.Event(), deque())  # type: ignore[no-untyped-call] # torch does not annotate it
        self.used = deque((_pinned(2 * pages), free) for _ in range(PREPARED_UPLOADS))
        """Buffers, and the events behind the uploads from them."""
        self.rows = [self._memory.data_ptr()] * 2
        """Addresses of the two rows of the last upload."""

    def fill(self, numbers: Numbers) -> torch.Tensor:
        """Put page numbers into a buffer; returns it."""
        is_free = self.used and self.used[0][1].query()
        buffer = self.used.popleft()[0] if is_free else _pinned(self._memory.numel())
        self.rows[1] = self.rows[0] + numbers.nbytes // 2
        buffer.numpy()[: numbers.size] = numbers.ravel()
        return buffer


class CudaDevice:
    """Makes streams of one CUDA device.

    Args:
        device: such as `"cuda:0"`; without a number the one that is current now.

    Raises:
        ConfigError: there is no such device.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        place, count = torch.device(device), torch.cuda.device_count()
        if place.type != "cuda" or (place.index or 0) >= count:
            raise ConfigError(
                f"device must be a CUDA device, of which there are {count}, such as 'cuda:0'; got "
                f"{str(device)!r}"
            )
        # Each thread has a current device of its own, and a new thread's is the first.
        index = place.index if ":" in str(place) else torch.cuda.current_device()
        self._device = torch.device("cuda", index)

    def current(self) -> torch.cuda.device:
        return torch.cuda.device(self._device)

    def stream(self, name: str, priority: Priority | None = None) -> CudaStream:
        lowest, highest = cast("Any", torch.cuda.Stream).priority_range()
        number = highest if priority == "highest" else lowest
        native = torch.cuda.Stream(self._device, priority=number)  # type: ignore[no-untyped-call] # torch does not annotate it
        return CudaStream(native, may_capture=priority is None)

    def scratch(self, size: int, streams: Sequence[Any]) -> torch.Tensor:
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise InvalidPoolError(
                f"cannot allocate {size} bytes of staging on {self._device} ({error}); free some, "
                "or pass way='kernel', which needs none"
            ) from error
        for native in (stream.native for stream in streams):
            # A former owner of this memory may still use it, on the current stream.
            native.wait_stream(torch.cuda.current_stream(self._device))
            # torch's allocator would otherwise hand the memory out again while this stream still
            # uses it.
            memory.record_stream(native)
        return memory

    def page_table(self, pages: int) -> CudaPageTable:
        return CudaPageTable(pages, self._device)

    def row_copy(self, destination: RowSide, source: RowSide, table: CudaPageTable) -> CudaRowCopy:
        with self.current():
            return CudaRowCopy((destination, source), table.rows, self._device)


def _pinned(rows: int) -> torch.Tensor:
    return torch.empty(rows, dtype=torch.int64, pin_memory=True)


def _check(error: int, what: str) -> None:
    if error:
        raise StreamFailedError(f"{what} failed with CUDA error {error}")


def _wait(native: torch.cuda.Event | torch.cuda.Stream) -> None:
    try:
        native.synchronize()
    except RuntimeError as error:
        raise StreamFailedError(str(error)) from error
