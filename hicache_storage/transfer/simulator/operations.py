"""Operations in the queue of a simulated stream."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hicache_storage.transfer.regions.rows import gather_rows, move_rows, scatter_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    import torch

MAX_PIECES = 4


class StreamOperation(Protocol):
    """Something that a stream's thread runs."""

    def run(self, random: Random) -> None: ...


class Place:
    """Position of a recorded event in a stream. `error` is the failure of an earlier operation."""

    __slots__ = ("_reached", "error")

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        """Wake all waiting threads."""
        self.error = error
        self._reached.set()

    def reached(self) -> bool:
        """Return True if the stream has reached the position."""
        return self._reached.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the stream comes here; `False` if it takes longer."""
        return self._reached.wait(seconds)


class Wait:
    """Lets a stream wait for a place in another one."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def run(self, random: Random) -> None:
        self._place.wait()


class PiecewiseOperation:
    """An operation that takes effect piece by piece with pauses in between.

    A missing wait then exposes a partial copy.

    Args:
        pause_seconds: the longest pause.
        admitted: blocks while a hold keeps the operation from beginning.
    """

    def __init__(self, pause_seconds: float, admitted: Callable[[], None]) -> None:
        self._pause_seconds = pause_seconds
        self._admitted = admitted

    def run(self, random: Random) -> None:
        self._admitted()
        for piece in self.pieces(random.randint(1, MAX_PIECES)):
            self._pause(random)
            piece()

    def pieces(self, count: int) -> Iterator[Callable[[], object]]:
        """The operation cut into so many pieces, or fewer."""
        raise NotImplementedError

    def _pause(self, random: Random) -> None:
        # Half of the pauses are none, so that streams also overtake each other by much.
        if random.random() < 0.5:
            time.sleep(random.random() * self._pause_seconds)


class Copy(PiecewiseOperation):
    """Copies between tensors of one shape."""

    def __init__(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        pause_seconds: float,
        admitted: Callable[[], None],
    ) -> None:
        super().__init__(pause_seconds, admitted)
        self._destination = destination
        self._source = source

    def pieces(self, count: int) -> Iterator[Callable[[], object]]:
        axis = _longest_axis(self._destination)
        pairs = zip(
            self._destination.tensor_split(count, axis),
            self._source.tensor_split(count, axis),
            strict=True,
        )
        return (partial(destination.copy_, source) for destination, source in pairs)


class Gather(PiecewiseOperation):
    """Copies numbered rows of a tensor to adjacent rows of another."""

    def __init__(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        rows: torch.Tensor,
        pause_seconds: float,
        admitted: Callable[[], None],
    ) -> None:
        super().__init__(pause_seconds, admitted)
        self._destination = destination
        self._source = source
        self._rows = rows

    def pieces(self, count: int) -> Iterator[Callable[[], object]]:
        pairs = zip(
            self._destination.tensor_split(count), self._rows.tensor_split(count), strict=True
        )
        return (
            partial(gather_rows, destination, self._source, rows)
            for destination, rows in pairs
            if len(rows)
        )


class Scatter(PiecewiseOperation):
    """Copies adjacent rows of a tensor to numbered rows of another."""

    def __init__(
        self,
        destination: torch.Tensor,
        rows: torch.Tensor,
        source: torch.Tensor,
        pause_seconds: float,
        admitted: Callable[[], None],
    ) -> None:
        super().__init__(pause_seconds, admitted)
        self._destination = destination
        self._rows = rows
        self._source = source

    def pieces(self, count: int) -> Iterator[Callable[[], object]]:
        pairs = zip(self._rows.tensor_split(count), self._source.tensor_split(count), strict=True)
        return (
            partial(scatter_rows, self._destination, rows, source)
            for rows, source in pairs
            if len(rows)
        )


class Move(PiecewiseOperation):
    """Copies numbered rows of a tensor to numbered rows of another."""

    def __init__(
        self,
        destination: torch.Tensor,
        destination_rows: torch.Tensor,
        source: torch.Tensor,
        source_rows: torch.Tensor,
        pause_seconds: float,
        admitted: Callable[[], None],
    ) -> None:
        super().__init__(pause_seconds, admitted)
        self._destination = destination
        self._destination_rows = destination_rows
        self._source = source
        self._source_rows = source_rows

    def pieces(self, count: int) -> Iterator[Callable[[], object]]:
        pairs = zip(
            self._destination_rows.tensor_split(count),
            self._source_rows.tensor_split(count),
            strict=True,
        )
        return (
            partial(move_rows, self._destination, to, self._source, origin)
            for to, origin in pairs
            if len(to)
        )


def _longest_axis(tensor: torch.Tensor) -> int:
    return max(range(tensor.dim()), key=lambda axis: tensor.shape[axis], default=0)
