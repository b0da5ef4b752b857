"""Events of a history: the caller, the times and the answer of each call.

Times are nanoseconds of `time.monotonic_ns()`, which all processes of a machine share. Two calls
whose intervals overlap are concurrent, and nothing is concluded from which of them ended first.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

VALUES = 1 << 16
"""How many values an identity's pages can be told apart by; a page's generation has two bytes."""


class Call(StrEnum):
    """The calls that a history knows."""

    SET = "set"
    GET = "get"
    EXISTS = "exists"
    DELETE = "delete"
    CLEAR = "clear"


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A call is about to be made."""

    number: int
    """Tells the calls of one recorder apart."""
    client: str
    """Process and thread, such as `B.2`."""
    call: Call
    at: int
    pool: str = ""
    keys: tuple[str, ...] = ()
    value: int = 0
    """Sets: written all over the pages. No other set of the history writes it, except one that
    repeats a refused set."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A call has returned."""

    number: int
    at: int
    done: tuple[bool, ...] = ()
    """Sets and deletes: the answer, one for each key."""
    found: tuple[int | bytes | None, ...] = ()
    """Gets, for each key: the value of a whole page; the bytes of what is none; None where nothing
    was delivered."""
    hit: int = 0
    """Exists: how many of the keys, from the first, are there."""
    raised: str = ""
    """Clears: the error that says that it did not happen, or may have happened; empty for one that
    returned."""


class Event(msgspec.Struct, frozen=True, eq=False):
    """A call, with what it was answered where it has returned."""

    begun: Begun
    ended: Ended | None = None

    @property
    def call(self) -> Call:
        return self.begun.call

    @property
    def keys(self) -> tuple[str, ...]:
        return self.begun.keys

    @property
    def began_at(self) -> int:
        return self.begun.at

    @property
    def ended_at(self) -> int | None:
        """The time of its end; None for a call that may take effect at any later time.

        Its process was killed in it, or it is a clear that raised.
        """
        return None if self.ended is None or self.ended.raised else self.ended.at

    def is_running(self, at: int) -> bool:
        """Return whether the call had begun and not ended at a time."""
        return self.began_at <= at and (self.ended_at is None or at <= self.ended_at)


class Recorder:
    """Puts the two ends of calls together. For one thread."""

    def __init__(self) -> None:
        self._open: dict[int, Begun] = {}
        self._whole = list[Event]()

    def note(self, end: Begun | Ended) -> None:
        """Take one end of a call."""
        if isinstance(end, Begun):
            self._open[end.number] = end
        else:
            self._whole.append(Event(self._open.pop(end.number), end))

    def events(self) -> list[Event]:
        """All calls, those that have not returned last."""
        # A call without an end stays: it may have taken effect at any later time.
        return [*self._whole, *map(Event, self._open.values())]

    def running(self) -> Begun | None:
        """One call that has begun and not returned."""
        return next(iter(self._open.values()), None)
