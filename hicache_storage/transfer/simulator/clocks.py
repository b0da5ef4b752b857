"""Vector clocks: the order of two operations, whenever they happened to run."""

from __future__ import annotations

from typing import Final

HOST: Final = 0
"""The actor that enqueues and waits.

Calls from several threads count as one actor: their order is the callers' business.
"""


class Clock:
    """A vector clock: the last known step of each actor."""

    __slots__ = ("_times",)

    def __init__(self, times: dict[int, int] | None = None) -> None:
        self._times = dict(times or {})

    def tick(self, actor: int) -> int:
        """Let an actor take a step; its new time."""
        self._times[actor] = time = self._times.get(actor, 0) + 1
        return time

    def join(self, other: Clock) -> None:
        """Know what `other` knows, too."""
        for actor, time in other._times.items():
            if time > self._times.get(actor, 0):
                self._times[actor] = time

    def knows(self, actor: int, time: int) -> bool:
        """Return True if a step of an actor happened before this clock."""
        return self._times.get(actor, 0) >= time

    def copy(self) -> Clock:
        """A snapshot."""
        return Clock(self._times)
