"""Events of a history (the caller, the times and the answer of each call), and the calls themselves.

Times are nanoseconds of `time.monotonic_ns()`, which all processes of a machine share. Two calls
whose intervals overlap are concurrent, and nothing is concluded from which of them ended first.
"""

from __future__ import annotations

import time
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

import msgspec

from hicache_conformance.harness.pools import Page, PagePatterns
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    import itertools
    from collections.abc import Callable

    from hicache_conformance.harness.storage_under_test import StorageUnderTest


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


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the threads of a process."""

    seed: str
    clients: int = 1
    """Threads."""
    calls: int
    """Of each thread."""
    keys: tuple[str, ...]
    max_keys: int = 6
    """Most keys of a call."""
    pools: tuple[str, ...] = (str(PoolName.KV),)
    mix: dict[Call, int]
    """How often each call is made, in proportion to the others."""
    first_value: int
    """The sets of all threads write the values from here on, each its own; there are as many as
    calls."""
    start_at: int = 0
    """Time to begin at, by `time.monotonic_ns()`, for processes that shall meet."""


class Client:
    """A thread's share of a storage: makes calls, and tells both ends of each."""

    def __init__(
        self,
        name: str,
        sut: StorageUnderTest,
        patterns: PagePatterns,
        note: Callable[[Begun | Ended], None],
        numbers: itertools.count[int],
    ) -> None:
        self._name = name
        self._sut = sut
        self._patterns = patterns
        self._note = note
        self._numbers = numbers

    def run(self, work: Workload, number: int) -> None:
        """Make the calls of one thread of a workload.

        Raises:
            Violation: a call raised, or its answer has not the form that it must have.
        """
        random = Random(f"{work.seed}/{number}")
        calls, weights = list(work.mix), list(work.mix.values())
        # Polled and not slept through in one go: processes that wake up late by the scheduler would
        # not overlap.
        while time.monotonic_ns() < work.start_at:
            time.sleep(0.0005)
        for step in range(work.calls):
            call = random.choices(calls, weights)[0]
            # Without repetitions: of a page that is set twice in one call the history could not
            # tell which answer is whose.
            chain = random.sample(work.keys, random.randint(1, min(work.max_keys, len(work.keys))))
            # What an exists says of other pools is the business of the rules EX; here it is asked
            # about the KV pool alone.
            pool = str(PoolName.KV) if call is Call.EXISTS else random.choice(work.pools)
            self.call(call, chain, pool, work.first_value + number * work.calls + step)

    def call(self, call: Call, keys: list[str], pool: str, value: int = 0) -> Ended:
        """Make one call; its answer."""
        number = next(self._numbers)
        shown = tuple(keys) if call is not Call.CLEAR else ()
        # Taken before the event is sent, so that the interval in the history contains the call. An
        # interval that is too short would contradict answers that are right.
        at = time.monotonic_ns()
        self._note(
            Begun(
                number=number,
                client=self._name,
                call=call,
                at=at,
                pool=pool,
                keys=shown,
                value=value,
            )
        )
        ended = self._made(number, call, keys, pool, value)
        self._note(ended)
        return ended

    def _made(self, number: int, call: Call, keys: list[str], pool: str, value: int) -> Ended:
        sut, now = self._sut, time.monotonic_ns
        match call:
            case Call.SET:
                done = sut.set(keys, pool, generation=value)
                return Ended(number=number, at=now(), done=tuple(done))
            case Call.GET:
                contents = sut.get(keys, pool)
                # Before the bytes are compared, which takes as long as some gets.
                at = now()
                found = (
                    None if content is None else self._value(key, content, pool)
                    for key, content in zip(keys, contents, strict=True)
                )
                return Ended(number=number, at=at, found=tuple(found))
            case Call.EXISTS:
                answer = sut.exists(keys)
                return Ended(number=number, at=now(), hit=answer.kv_hit_pages)
            case Call.DELETE:
                removed = sut.delete(keys, pool)
                return Ended(number=number, at=now(), done=tuple(removed))
            case Call.CLEAR:
                raised = sut.clear()
                return Ended(number=number, at=now(), raised=raised)

    def _value(self, key: str, content: bytes, pool: str) -> int | bytes:
        whole = self._patterns.generation(content, Page(self._sut.identity, pool, key))
        return content if whole is None else whole
