"""The time as the file server keeps it, which is the same for all nodes of a store, whatever their own clocks say."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE_NS = 2_000_000_000
"""A smaller difference is no difference: some file systems keep whole seconds."""


class Clock:
    """This node's clock, put right by the times that the file system gives to new files.

    Args:
        source: nanoseconds since 1970 by this node's clock.
    """

    def __init__(self, source: Callable[[], int] = time.time_ns) -> None:
        self._source = source
        self._offset_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds since 1970 by the file server's clock, within some seconds."""
        return self._source() + self._offset_ns

    def age_seconds(self, moment_ns: int) -> float:
        """How long ago the file server's clock said something."""
        return (self.now_ns() - moment_ns) / 1e9

    def adjust(self, ask: Callable[[], int]) -> None:
        """Take in what the file server's clock says.

        Args:
            ask: what it says at some moment of this call, which may take long.

        Raises:
            OSError: of `ask`.
        """
        before = self._source()
        moment = ask()
        # How long the answer was on its way is not known: no more is put right than must be wrong.
        offset = min(moment - before, max(self._offset_ns, moment - self._source()))
        self._offset_ns = offset if abs(offset) > TOLERANCE_NS else 0
