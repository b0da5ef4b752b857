"""All calls from many threads at once."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.concurrency import together
from hicache_conformance.harness.pools import GuardedPool
from hicache_conformance.history.checker import HistoryChecker
from hicache_conformance.history.counterexample import Story
from hicache_conformance.history.events import Call, Recorder
from hicache_conformance.history.workload import Lane, Workload
from hicache_conformance.model.case import covers
from hicache_storage.spec import PoolName, Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject
    from hicache_storage.spec import StorageIdentity

THREADS: Final = 8
LONGEST: Final = 6
MIX: Final[Mapping[Call, int]] = {Call.SET: 3, Call.GET: 3, Call.EXISTS: 1}


class ConcurrencyCases:
    """CC-1."""

    @covers("CC-1")
    def test_many_threads(self, lab: Lab) -> None:
        """Eight threads set, read and look up the same few keys, and ask for counters; their history can be."""
        subject, keys = lab.storage(pools=_wide_pool()), lab.keys(12)
        crowd = _Crowd(lab, subject.identity)
        together("CC-1", [*crowd.workers(subject, keys, MIX), _counting(lab, subject)])
        # Nobody deleted anything, so what the threads have left can be read, and is somebody's.
        last = crowd.lane("afterwards", subject.lane(0, THREADS, lab.chance("places afterwards")))
        last.call(Call.SET, keys, PoolName.KV, crowd.values(1))
        last.call(Call.GET, keys, PoolName.KV)
        crowd.judge()

    @covers("CC-1", needs=["clears"])
    def test_many_threads_and_clear(self, lab: Lab) -> None:
        """The same while one thread clears the namespace again and again."""
        subject, keys = lab.storage(pools=_wide_pool()), lab.keys(12)
        crowd = _Crowd(lab, subject.identity)
        clearing = crowd.lane("clears", subject)

        def clear() -> None:
            for _ in range(lab.profile.thread_calls // 4):
                clearing.call(Call.CLEAR, [], PoolName.KV)

        together("CC-1", [*crowd.workers(subject, keys, MIX), clear])
        crowd.judge()
        fresh = lab.keys(4)
        subject.store(fresh)
        subject.expect(fresh)

    @covers("CC-1")
    def test_many_storages(self, lab: Lab) -> None:
        """Eight storages of one identity, each opened, used and closed in a thread of its own."""
        identity, keys = lab.identity(), lab.keys(6)
        subjects = [lab.unopened(identity) for _ in range(THREADS)]
        # Storages that share nothing have a history each.
        shares = lab.capabilities.sharing is not Sharing.NONE
        crowds = [_Crowd(lab, identity)] * THREADS if shares else [_Crowd(lab, identity) for _ in subjects]

        def use(number: int, subject: Subject, lane: Lane) -> None:
            subject.call("open", subject.storage.open)
            for _ in range(5):
                lane.call(Call.SET, keys, PoolName.KV, crowds[number].values(1))
                lane.call(Call.GET, keys, PoolName.KV)
            subject.call("close", subject.storage.close)

        lanes = [crowds[number].lane(str(number), subject) for number, subject in enumerate(subjects)]
        together("CC-1", [partial(use, number, *pair) for number, pair in enumerate(zip(subjects, lanes, strict=True))])
        for crowd in dict.fromkeys(crowds):
            crowd.judge()


class _Crowd:
    """Threads on storages of one identity, and the history that they make together."""

    def __init__(self, lab: Lab, identity: StorageIdentity) -> None:
        self._lab, self._identity = lab, identity
        self._recorders = list[Recorder]()
        self._numbers, self._values = itertools.count(), itertools.count(1)

    def values(self, count: int) -> int:
        """The first of so many values that nobody else writes."""
        return next(itertools.islice(self._values, count - 1, count)) - count + 1

    def lane(self, name: str, subject: Subject) -> Lane:
        """A thread's share of a storage; what it does is part of the history."""
        recorder = Recorder()
        self._recorders.append(recorder)
        return Lane(name, subject, self._lab.book, recorder.note, self._numbers)

    def workers(self, subject: Subject, keys: list[str], mix: Mapping[Call, int]) -> list[Callable[[], object]]:
        """What the threads of one storage do."""
        calls = self._lab.profile.thread_calls
        work = Workload(
            seed=str(self._lab.number("crowd")), calls=calls, lanes=THREADS, keys=tuple(keys), longest=LONGEST, mix=dict(mix),
            first_value=self.values(THREADS * calls),
        )  # fmt: skip
        shares = [subject.lane(number, THREADS, self._lab.chance(f"places {number}")) for number in range(THREADS)]
        return [partial(self.lane(str(number), share).run, work, number) for number, share in enumerate(shares)]

    def judge(self) -> None:
        """Check the history.

        Raises:
            Violation: something that was answered cannot be.
        """
        events = [event for recorder in self._recorders for event in recorder.events()]
        findings = HistoryChecker(events, keeps=not self._lab.capabilities.evicts).check()
        if findings:
            raise Story(self._identity, self._lab.book, events).violation(findings, "CC-1")


def _wide_pool() -> dict[str, GuardedPool]:
    return {PoolName.KV: GuardedPool(pages=16 * THREADS)}


def _counting(lab: Lab, subject: Subject) -> Callable[[], object]:
    def count() -> None:
        for _ in range(lab.profile.thread_calls):
            subject.stats()

    return count
