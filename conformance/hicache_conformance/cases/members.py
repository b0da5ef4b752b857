"""One of several stores is away, under reads and sets: it costs its own pages, and no others.

Which page lies on which store is the driver's business. Known to lie on a store that is there are
pages that were set while the other one was away, and pages that a get delivers in the end. A page
that stays in its place is missed with one store at most.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from hicache_conformance.fixtures.fault_calls import (
    SLACK_SECONDS,
    check_hits,
    count_faults,
    loses_pages,
    may_wait,
    serving_storage,
)
from hicache_conformance.fixtures.target import SEVERAL_STORES
from hicache_conformance.harness.concurrency import Pending, eventually
from hicache_conformance.harness.pools import short
from hicache_conformance.model.case import NotPromised, Violation, check, checked, covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_storage.layers import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_conformance.injectors.servers import MemberInjector

OUTAGES: Final = {"killed": FaultKind.KILL, "stopped": FaultKind.HANG}
DEADLINE_SECONDS: Final = 2.0
"""Of every call: what a store that is there has comes within it, on a busy machine too."""
OPTIONS: Final = StorageOptions(deadline_seconds=DEADLINE_SECONDS, breaker_cooldown_seconds=0.5)
UNBROKEN: Final = StorageOptions(deadline_seconds=DEADLINE_SECONDS, breaker_threshold=0)
IN_TIME: Final = DEADLINE_SECONDS + 3 * SLACK_SECONDS
"""Within which each call of a round ends. Many end at a time, for which a busy machine needs
longer; the cases of hung stores judge single calls."""
READERS: Final = 8
WRITERS: Final = 2
PAGES: Final = 32
"""Stored before a store goes away, and read in each round, in batches of pages of all stores."""
RECENT: Final = 16
"""Pages set during the outage that are read with them: the last ones."""
SET_PAGES: Final = 4
STEADY_ROUNDS: Final = 3
"""So many rounds have to deliver all pages of the stores that are there."""
SETTLING_SECONDS: Final = 1.0
"""Rounds that begin sooner after the event are not judged."""
LATE_SECONDS: Final = 8.0
"""By then one round has to: some seconds, and what a busy machine adds."""
LAST_SECONDS: Final = 24.0
"""By then they have to in a row. A busy machine may cost a round now and then."""
PAUSE_SECONDS: Final = 0.05


class MemberCases:
    """FT-8, and SET-1, FT-1 and FT-3 while one of several stores is away."""

    @covers("FT-8", "SET-1", "GET-1", "FT-1", "FT-3", levels=Level.FAULTS, needs=[SEVERAL_STORES])
    @pytest.mark.parametrize("kind", OUTAGES.values(), ids=OUTAGES)
    def test_one_of_several_stores(
        self, context: CaseContext, members: MemberInjector, kind: FaultKind
    ) -> None:
        """One store after the other is killed or stopped, under calls."""
        load = _Load(context, members)
        if kind is FaultKind.HANG and may_wait(load.storage):
            raise NotPromised("a get may wait for a store that is stopped (hung_reads)")
        order = context.chance("order").sample(members.members, len(members.members))
        for member in islice(cycle(order), context.profile.outages):
            load.check_outage(member, FaultPlan(members.name, (Fault(kind=kind, member=member),)))


class _Round(NamedTuple):
    """What one round of calls came to."""

    acknowledged: Sequence[str]
    """Pages that were read, and that sets had acknowledged during the outage before."""
    delivered: set[str]

    def missed(self, there: set[str]) -> set[str]:
        """Pages that lie on a store that is there, and were not delivered."""
        return there.union(self.acknowledged) - self.delivered


class _Outage(NamedTuple):
    """What is known when a store has been away for long enough."""

    acknowledged: list[str]
    """Pages that sets have acknowledged meanwhile."""
    away: list[str]
    """Older pages that no get delivers."""
    violation: Violation | None
    """FT-8. What was acknowledged has to be looked at first: it may be lost."""


class _Load:
    """Readers and writers of one storage, and the pages that they use."""

    def __init__(self, context: CaseContext, members: MemberInjector) -> None:
        self._context = context
        self._members = members
        self.storage, self._pages = serving_storage(context, members, pages=PAGES, options=OPTIONS)
        # Another storage, where there may be one: it has no circuit breaker, which could be open
        # because of the pages that are away, and SET-1 is about any storage.
        self._other = self.storage
        if context.shares:
            self._other = context.storage(self.storage.identity, options=UNBROKEN)
        clients = context.clients(self.storage, READERS + WRITERS)
        self._readers = clients[:READERS]
        self._writers = clients[READERS:]
        self._others = context.clients(self._other, READERS)
        self._missed_with: dict[str, str] = {}
        """Pages that no get has delivered while a store was away and that were there afterwards,
        and that store."""

    def check_outage(self, member: str, plan: FaultPlan) -> None:
        """Take a store away, use the storage, bring the store back, and look at the pages."""
        faults = count_faults(self.storage)
        self._members.inject(plan)
        acknowledged, away, violation = self._use(plan)
        missed = f"{len(away)} stored pages are missed because of {plan}"
        counted = count_faults(self.storage) != faults
        check(counted or not away, "FT-1", f"{missed}, and get_stats() counts no fault")
        loses = loses_pages(self._context, plan)
        if away and loses:
            # As an engine does that has missed them. Those that are stored may lie elsewhere then.
            [again] = self._together([("batch_set_v2", partial(_set, self.storage, away))], plan)
            acknowledged += sorted(again)
            away = [key for key in away if key not in again]
            for key in again:
                self._missed_with.pop(key, None)
        self._members.heal()
        recovery = self._context.profile.recovery_seconds
        self._check_kept(acknowledged, recovery, plan)
        if violation is not None:
            raise violation
        if loses:
            lost = self._missing(away, SETTLING_SECONDS, plan)
            self._pages = [key for key in self._pages if key not in lost]
        else:
            self._check_kept(self._pages, recovery, plan)
        self._check_places(member, [key for key in away if key in self._pages], plan)
        self._pages = [*self._pages, *self._check_sets(recovery, plan)][:PAGES]

    def _use(self, plan: FaultPlan) -> _Outage:
        """Read and set until the pages of the stores that are there come for some rounds in a row.

        Or until it is late.
        """
        began, rounds, acknowledged = time.monotonic(), list[_Round](), list[str]()
        old = set(self._pages)
        while True:
            begins = time.monotonic() - began
            found = self._round(acknowledged, plan)
            if begins > SETTLING_SECONDS:
                rounds.append(found)
            last, seconds = rounds[-STEADY_ROUNDS:], time.monotonic() - began
            seen = old.intersection(set[str]().union(*(one.delivered for one in last)))
            steady = len(last) == STEADY_ROUNDS and not any(one.missed(seen) for one in last)
            if steady or seconds > LATE_SECONDS:
                # What comes alone lies on a store that is there, also if it never came with others.
                there = seen | self._get_alone(old - seen, plan)
                missed = [one.missed(there) for one in last]
                limit = LATE_SECONDS if all(one.missed(there) for one in rounds) else LAST_SECONDS
                late = seconds > limit
                if late or (steady and not any(missed)):
                    return _Outage(
                        acknowledged,
                        sorted(old - there),
                        _violation(missed, old, seconds, plan) if any(missed) else None,
                    )
            time.sleep(PAUSE_SECONDS)

    def _round(self, acknowledged: list[str], plan: FaultPlan) -> _Round:
        """Read all pages and set new ones, in several threads at once."""
        recent = acknowledged[-RECENT:]
        asked = [*self._pages, *recent]
        # Other batches in each round, most of them with pages of all stores.
        self._context.random.shuffle(asked)
        gets = [
            ("batch_get_v2", partial(_get, reader, asked[number::READERS], plan))
            for number, reader in enumerate(self._readers)
        ]
        sets = [
            ("batch_set_v2", partial(_set, writer, self._context.keys(SET_PAGES)))
            for writer in self._writers
        ]
        found = self._together([*gets, *sets], plan)
        acknowledged += sorted(set[str]().union(*found[READERS:]))
        return _Round(recent, set[str]().union(*found[:READERS]))

    def _get_alone(self, keys: set[str], plan: FaultPlan) -> set[str]:
        """Read some pages, each in a call of its own; those that are delivered."""
        some = self._context.random.sample(sorted(keys), min(len(keys), READERS))
        gets = [
            ("batch_get_v2", partial(_get, reader, [key], plan))
            for reader, key in zip(self._others, some, strict=False)
        ]
        return set[str]().union(*self._together(gets, plan))

    def _together(
        self, calls: Sequence[tuple[str, Callable[[], set[str]]]], plan: FaultPlan
    ) -> list[set[str]]:
        """Make calls at once, in a thread each."""
        begun = [(name, Pending(ask)) for name, ask in calls]
        for name, call in begun:
            check(
                call.ended(IN_TIME),
                "FT-3",
                f"{name} with a deadline of {DEADLINE_SECONDS:.0f} s has not ended after "
                f"{IN_TIME:.0f} s ({plan})",
            )
        return [call.answer() for _, call in begun]

    def _check_kept(self, keys: Sequence[str], seconds: float, plan: FaultPlan) -> None:
        """Make sure that pages are found when all stores are there again."""
        missing = self._missing(keys, seconds, plan)
        checked("SET-1", "FT-8")
        if missing:
            alone = self._get_alone(missing, plan)
            lost = len(alone) < min(len(missing), READERS)
            raise Violation(
                "SET-1" if lost else "FT-8",
                f"page key {short(min(missing - alone or missing))} was stored (True), and a get "
                f"{'' if lost else 'with other pages '}answers False when all stores are there "
                f"again, as for {len(missing)} of {len(keys)} pages ({plan})",
            )

    def _check_sets(self, seconds: float, plan: FaultPlan) -> list[str]:
        """Make sure that new pages are stored and read again; these pages.

        Some of many, because others may know a store that was killed for a while.
        """
        found = set[str]()

        def serves() -> bool:
            new = sorted(_set(self.storage, self._context.keys(PAGES // 2)))
            found.update(_get(self.storage, new, plan) if new else ())
            return bool(found)

        check(
            eventually(serves, seconds, PAUSE_SECONDS),
            "FT-4",
            f"{seconds:.0f} s after all stores were there again ({plan}), no new page is stored and "
            f"read",
        )
        return sorted(found)

    def _missing(self, keys: Sequence[str], seconds: float, plan: FaultPlan) -> set[str]:
        """Pages that one of the storages does not find, in so many seconds."""
        missing = {reader: set(keys) for reader in (self.storage, self._other)}

        def are_there() -> bool:
            for reader, some in missing.items():
                asked = sorted(some)
                for start in range(0, len(asked), PAGES):
                    some -= _get(reader, asked[start : start + PAGES], plan)
            return not any(missing.values())

        # Not once: the driver may leave a store out for a while that was away.
        eventually(are_there, seconds, PAUSE_SECONDS)
        return set[str]().union(*missing.values())

    def _check_places(self, member: str, keys: Sequence[str], plan: FaultPlan) -> None:
        """Make sure that pages which are there again were not missed with another store, too."""
        for key in keys:
            before = self._missed_with.setdefault(key, member)
            check(
                before == member,
                "FT-8",
                f"page key {short(key)} is there, and no get has delivered it while the store "
                f"{before!r} was away, nor while {member!r} was: it lies on one of them at "
                f"most ({plan})",
            )


def _get(sut: StorageUnderTest, keys: Sequence[str], plan: FaultPlan) -> set[str]:
    """Read pages; those that are delivered."""
    pages = sut.get(keys)
    check_hits(sut, keys, pages, plan)
    return {key for key, page in zip(keys, pages, strict=True) if page is not None}


def _set(sut: StorageUnderTest, keys: Sequence[str]) -> set[str]:
    """Set pages; those that were acknowledged."""
    return {key for key, ok in zip(keys, sut.set(keys), strict=True) if ok}


def _violation(
    missed: Sequence[set[str]], old: set[str], seconds: float, plan: FaultPlan
) -> Violation:
    key = min(set[str]().union(*missed))
    told = (
        "lies on a store that is there, since a get delivers it"
        if key in old
        else "was stored (True) meanwhile"
    )
    times = sum(key in some for some in missed)
    return Violation(
        "FT-8",
        f"page key {short(key)} {told}, and {times} of {len(missed)} gets have missed it, "
        f"{seconds:.0f} s after the fault has begun ({plan})",
    )
