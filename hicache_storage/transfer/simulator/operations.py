"""What a simulated stream holds in its queue."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    import torch

MAX_PIECES = 4


class Operation(Protocol):
    """Something that a stream's thread runs."""

    def run(self, random: Random) -> None: ...


class Place:
    """Where a recorded event stands in a stream. `error` is what had failed by then."""

    __slots__ = ("_reached", "error")

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        """Let everybody go on who waits."""
        self.error = error
        self._reached.set()

    def reached(self) -> bool:
        """Whether the stream has come here."""
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


class Copy:
    """Copies in several pieces with pauses in between, so that whoever does not wait finds it half done.

    Args:
        destination, source: of one shape.
        pause_seconds: the longest pause.
        admitted: blocks while a hold keeps the copy from beginning.
    """

    def __init__(
        self, destination: torch.Tensor, source: torch.Tensor, pause_seconds: float, admitted: Callable[[], None]
    ) -> None:
        self._destination, self._source = destination, source
        self._pause_seconds = pause_seconds
        self._admitted = admitted

    def run(self, random: Random) -> None:
        self._admitted()
        axis = _longest_axis(self._destination)
        count = random.randint(1, MAX_PIECES)
        pieces = zip(self._destination.tensor_split(count, axis), self._source.tensor_split(count, axis), strict=True)
        for destination, source in pieces:
            self._pause(random)
            destination.copy_(source)

    def _pause(self, random: Random) -> None:
        # Half of the pauses are none, so that streams also overtake each other by much.
        if random.random() < 0.5:
            time.sleep(random.random() * self._pause_seconds)


def _longest_axis(tensor: torch.Tensor) -> int:
    return max(range(tensor.dim()), key=lambda axis: tensor.shape[axis], default=0)
