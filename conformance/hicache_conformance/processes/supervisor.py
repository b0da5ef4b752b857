"""Supervisor of worker processes: collects their events, and kills some of them on schedule."""

from __future__ import annotations

import selectors
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hicache_conformance.history.events import Begun, Ended
from hicache_conformance.processes.worker import SILENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.processes.worker import WorkerProcess

MIN_SPREAD_SECONDS: Final = 300e-6


@dataclass(frozen=True, slots=True)
class KillSchedule:
    """Time to kill a worker."""

    after_calls: int
    """That many calls have begun."""
    fraction: float
    """And then so much of the time has passed that two of its calls took on average, from 0 to 1.
    Its first call does not count, which opens the store: with `after_calls` of at least 3, half of
    the kills fall into the call that has begun."""


def watch(
    workers: Sequence[WorkerProcess], kills: Mapping[WorkerProcess, KillSchedule] | None = None
) -> None:
    """Read events until every workload has come to its end or its process has been killed.

    Raises:
        Violation: a rule was broken, a process died by itself, or hangs (FT-3).
    """
    kills = kills or {}
    killers = {worker: _Killer(worker, schedule) for worker, schedule in kills.items()}
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.channel, selectors.EVENT_READ, worker)
        heard_at = {worker: time.monotonic() for worker in workers}
        while selector.get_map():
            # A second at most, so that the silence of a worker is noticed although no other one
            # says anything.
            ready: list[WorkerProcess] = [key.data for key, _ in selector.select(1.0)]
            for worker in ready:
                heard_at[worker] = time.monotonic()
                _listen(worker, killers.get(worker))
            for worker, at in heard_at.items():
                if worker.busy and time.monotonic() - at > SILENCE_SECONDS:
                    raise worker.hangs()
            # A worker that is done, or was killed, sends nothing more, and its closed socket would
            # be ready for ever.
            for worker in [key.data for key in selector.get_map().values() if not key.data.busy]:
                selector.unregister(worker.channel)


def _listen(worker: WorkerProcess, killer: _Killer | None) -> None:
    try:
        messages = worker.channel.pending()
    except EOFError:
        raise worker.unexpected_end() from None
    for message in messages:
        worker.note(message)
        if killer and isinstance(message, Begun | Ended):
            killer.count(message)
    if killer:
        killer.kill_if_due()


class _Killer:
    """Kills one worker."""

    def __init__(self, worker: WorkerProcess, schedule: KillSchedule) -> None:
        self._worker = worker
        self._schedule = schedule
        self._warm_at: int | None = None
        self._begun = 0
        self._ended = 0
        self._busy_ns = 0

    def count(self, message: Begun | Ended) -> None:
        """Take a message of a workload."""
        if isinstance(message, Begun):
            self._begun += 1
        else:
            self._ended += 1
            # From the end of the first call on, which opened connections and files and would make
            # calls look longer than they are.
            self._warm_at = self._warm_at or message.at
            self._busy_ns = message.at - self._warm_at

    def kill_if_due(self) -> None:
        """Kill if the moment has come."""
        if self._begun < self._schedule.after_calls or not self._worker.busy:
            return
        spread = 2e-9 * self._busy_ns / (self._ended - 1) if self._ended > 1 else 0.0
        # At least `MIN_SPREAD_SECONDS`: calls of a fast driver are over before the next message is
        # read, and all kills would fall between them.
        time.sleep(self._schedule.fraction * max(spread, MIN_SPREAD_SECONDS))
        self._worker.kill()
