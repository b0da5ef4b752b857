"""Removals: the pages that were evicted, deleted or cleared last, in memory and bounded."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from hicache_metadata_server.protocol import RemovedBecause, RemovedPages

MAX_KEPT: Final = 65_536
"""Removals of one scope that are kept, and the rest of the oldest batch."""
MAX_KEPT_TOTAL: Final = 4 * MAX_KEPT
"""Removals of all scopes of a service. With keys of 64 characters they take 30 to
90 MB."""


class RemovalRoom:
    """The bound that all logs of a service share: the oldest removals of all go first."""

    def __init__(self) -> None:
        self.kept = 0
        self.order = deque[ScopeRemovals]()
        """Log of each batch, oldest first; also of batches that their log has dropped."""


class ScopeRemovals:
    """The latest removals of one scope, each at a position that is never used again.

    A restart, a takeover, and a scope that is made anew begin another log, to which the cursors of
    this one are unknown.
    """

    def __init__(self, room: RemovalRoom | None = None) -> None:
        self._id = secrets.token_hex(8)
        self._room = room or RemovalRoom()
        self._batches = deque[_Batch]()
        self._dropped = 0
        """Batches that this log has dropped, and that `RemovalRoom.order` still counts."""
        self._end = 0
        """Position of the next removal."""

    def add(
        self,
        keys: list[str],
        reason: RemovedBecause,
        seconds: float,
        by: str = "",
        unnamed: int = 0,
    ) -> None:
        """Add pages that are no longer live, behind `unnamed` ones of which no key is kept."""
        room, batches = self._room, self._batches
        if unnamed:
            # What is older cannot be read without a gap.
            self._drop(len(batches))
            self._end += unnamed
        if not keys:
            return
        batches.append(_Batch(self._end, reason, seconds, by, keys))
        room.order.append(self)
        self._end += len(keys)
        room.kept += len(keys)
        while len(batches) > 1 and self._end - batches[1].first >= MAX_KEPT:
            self._drop(1)
        # Both are bounded: behind an idle log, the order keeps the dropped batches of a busy one.
        while max(room.kept, len(room.order)) > MAX_KEPT_TOTAL:
            room.order.popleft()._leave_order()

    def read(self, cursor: str | None, limit: int) -> RemovedPages:
        """Return up to `limit` removals behind a cursor, and the cursor behind them.

        Without a cursor there are none. A cursor that is not of this log, or older than what is
        kept, is lost: all that is kept follows it.
        """
        batches, name = self._batches, f"{self._id}."
        kept = batches[0].first if batches else self._end
        at, lost = self._end, False
        if cursor is not None:
            number = cursor.removeprefix(name)
            known = number != cursor and number.isascii() and number.isdecimal()
            lost = not (known and kept <= int(number) <= self._end)
            at = kept if lost else int(number)
        keys, reasons, times, by = list[str](), list[RemovedBecause](), list[float](), list[str]()
        index = bisect_right(batches, at, key=attrgetter("first")) - 1
        while at < self._end and len(keys) < limit:
            batch = batches[index]
            begin = at - batch.first
            some = batch.keys[begin : begin + limit - len(keys)]
            keys += some
            reasons += [batch.reason] * len(some)
            times += [batch.seconds] * len(some)
            by += [batch.by] * len(some)
            at += len(some)
            index += 1
        return RemovedPages(
            keys=keys,
            reasons=reasons,
            times=times,
            by=by,
            cursor=f"{name}{at}",
            lost=lost,
            more=at < self._end,
        )

    def _drop(self, count: int) -> None:
        """Drop the oldest batches."""
        for _ in range(count):
            self._room.kept -= len(self._batches.popleft().keys)
        self._dropped += count

    def _leave_order(self) -> None:
        """Drop the oldest batch, unless the log has dropped it before."""
        if not self._dropped:
            self._drop(1)
        self._dropped -= 1


@dataclass(slots=True)
class _Batch:
    """Pages that were removed together."""

    first: int
    """Position of the first one."""
    reason: RemovedBecause
    seconds: float
    by: str
    keys: list[str]
