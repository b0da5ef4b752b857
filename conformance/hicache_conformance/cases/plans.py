"""Random plans of faults under random work, drawn and shortened by Hypothesis."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

import hypothesis
from hypothesis import strategies as st
from msgspec import structs

from hicache_conformance.cases.histories import search_settings
from hicache_conformance.fixtures.fault_calls import (
    call_bounded,
    check_hits,
    check_kept,
    set_deadline,
    wait_until_serving,
)
from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.harness.pools import PoolShape
from hicache_conformance.history.events import Call
from hicache_conformance.injectors.active_faults import find_fault
from hicache_conformance.injectors.named_faults import KILLED_ENGINE, MENU
from hicache_conformance.model.case import covers
from hicache_conformance.model.fault_plan import UNTIMED, Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level, declares
from hicache_conformance.model.violation import Violation
from hicache_conformance.processes.worker import KillSchedule
from hicache_storage.layers import StorageOptions
from hicache_storage.spec import HungReads, PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_conformance.injectors.injector import FaultInjector

SHRINK_SECONDS: Final = 60.0
"""Longest search for fewer faults and calls. A case that took as long as the driver may hang would
be blamed on the driver."""
KEYS: Final = 20
GUARDED: Final = StorageOptions(breaker_threshold=4, breaker_cooldown_seconds=0.05)
OTHERS: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=16, components=(3_000, 5_000))
}

Step = tuple[str, tuple[int, ...]]
"""A call, and places of the keys that it is about."""

CALLS: Final[st.SearchStrategy[Step]] = st.tuples(
    st.sampled_from(("none", "get", "set", "exists", "get", "set")),
    st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=8, unique=True).map(tuple),
)


class PlanCases:
    """GET-1, SET-1, FT-1 and FT-4 under faults that nobody thought of."""

    @covers("GET-1", "SET-1", "FT-1", "FT-3", "FT-4", "FT-6", levels=Level.FAULTS)
    def test_random_faults(self, context: CaseContext, injector: FaultInjector) -> None:
        """Random faults under random calls, and what was acknowledged afterwards."""
        search = _Search(context, injector)
        plans = fault_plans(
            injector.name,
            # Asked of an open storage, because a driver may know only then what it stands on.
            hangs=_may_hang(injector, context.storage()),
            engines=declares(context.capabilities, "sharing>=processes"),
        )
        count = context.profile.plan_steps

        @search_settings(context, context.profile.plans)
        @hypothesis.seed(context.number("plans"))
        @hypothesis.given(plan=plans, calls=st.lists(CALLS, min_size=count, max_size=count))
        def check(plan: FaultPlan, calls: list[Step]) -> None:
            search.check(plan, calls)

        check()


@st.composite
def fault_plans(draw: st.DrawFn, injector: str, *, hangs: bool, engines: bool) -> FaultPlan:
    """Plans of one to four faults.

    Args:
        hangs: whether operations may hang; each costs its deadlines, so that only some plans have
            one.
        engines: whether another engine may be killed.
    """
    menu = [*MENU[injector], *([KILLED_ENGINE] if engines else [])]
    brief = [fault for fault in menu if fault.kind is not FaultKind.HANG]
    fault = st.sampled_from(brief).flatmap(partial(_timed, injector))
    if hangs:
        fault |= fault | fault | st.sampled_from(menu).flatmap(partial(_timed, injector))
    faults = draw(st.lists(fault, min_size=1, max_size=4))
    # Faults without a time are states, such as a killed server, and hold once or not at all.
    once = {fault.kind: fault for fault in faults if fault.kind in UNTIMED}
    timed = [fault for fault in faults if fault.kind not in UNTIMED]
    return FaultPlan(injector, (*timed, *once.values()))


def _timed(injector: str, fault: Fault) -> st.SearchStrategy[Fault]:
    """The fault at some time, for some time."""
    places = st.integers(0, 10_000).map(lambda number: number / 10_000)
    if fault.kind is FaultKind.ENGINE:
        return places.map(lambda place: structs.replace(fault, place=place))
    # What is done to a server has no operations to count.
    if fault.kind in UNTIMED or injector == "services":
        return st.just(fault)
    delays = st.integers(1, 20).map(lambda number: number / 1000)
    return st.builds(
        partial(structs.replace, fault),
        # Mostly early: short calls make few operations, and a fault on the fortieth is rarely met.
        first=st.just(0) | st.integers(0, 3) | st.integers(0, 39),
        # One hit is the common case of a passing fault; 0 stands for all from then on.
        count=st.just(1) | st.integers(1, 20) | st.just(0),
        seconds=delays if fault.kind is FaultKind.DELAY else st.just(0.0),
        place=places,
    )


def _may_hang(injector: FaultInjector, sut: StorageUnderTest) -> bool:
    """Return whether a plan may hang here.

    Reads may not wait by declaration, and methods must be able to hang.
    """
    promised = sut.storage.capabilities
    return promised.hung_reads is HungReads.BOUNCE_BUFFER and (
        injector.name != "objects" or promised.may_hang
    )


class _Search:
    """Runs plans and calls, each pair once; repeated, it ends as it did."""

    def __init__(self, context: CaseContext, injector: FaultInjector) -> None:
        self._run = RandomRun(context, injector)
        self._injector = injector
        self._found: dict[tuple[FaultPlan, tuple[Step, ...]], Violation | None] = {}
        """By example."""
        self._until: float | None = None
        """End of the search for shorter examples, once there is one."""

    def check(self, plan: FaultPlan, steps: Sequence[Step]) -> None:
        """Make the calls under the faults."""
        example = plan, tuple(steps)
        if example not in self._found:
            if self._until is not None and time.monotonic() > self._until:
                return
            recorded = list(self._injector.plans)
            violation = self._found[example] = self._run.run(plan, steps)
            if self._until is not None:
                # What is tried in order to shorten the first is of no interest.
                self._injector.plans[:] = recorded
            elif violation is not None:
                self._until = time.monotonic() + SHRINK_SECONDS
        found = self._found[example]
        if found is not None:
            raise found


class RandomRun:
    """Runs calls with an injector, each time with an identity and a storage of its own."""

    def __init__(self, context: CaseContext, injector: FaultInjector) -> None:
        self._context = context
        self._injector = injector

    def run(self, plan: FaultPlan, steps: Sequence[Step]) -> Violation | None:
        """Make the calls; the rule that was broken, if one was."""
        sut, keys = self._context.storage(options=GUARDED), self._context.keys(KEYS)
        try:
            self._run_steps(sut, keys, plan, steps)
        except Violation as violation:
            return violation
        finally:
            # Before close(), which would otherwise meet the fault and wait for its deadline.
            self._injector.heal()
            sut.storage.close()
        return None

    def _run_steps(
        self, sut: StorageUnderTest, keys: Sequence[str], plan: FaultPlan, steps: Sequence[Step]
    ) -> None:
        # Some pages are there before anything goes wrong.
        stored = set[str]()
        for what, places in (("set", tuple(range(KEYS // 2))), *steps[:2]):
            self._call(sut, what, [keys[place] for place in places], plan, stored)
        # A kill is not something that an injector does; it happens once, before the faults below
        # the driver begin.
        engine = find_fault(plan.faults, FaultKind.ENGINE)
        if engine is not None:
            self._kill_another(sut, engine.place)
        set_deadline(sut)
        self._injector.inject(plan)
        for what, places in steps[2:]:
            self._call(sut, what, [keys[place] for place in places], plan, stored)
        self._injector.heal()
        set_deadline(sut, None)
        wait_until_serving(self._context, sut, plan)
        check_kept(self._context, sut, sorted(stored), plan)

    def _call(
        self, sut: StorageUnderTest, what: str, chain: list[str], plan: FaultPlan, stored: set[str]
    ) -> None:
        bounded = partial(call_bounded, self._injector, plan)
        match what:
            case "set":
                answers: list[bool] = bounded("batch_set_v2", partial(sut.set, chain))
                stored.update(key for key, ok in zip(chain, answers, strict=True) if ok)
            case "get":
                check_hits(sut, chain, bounded("batch_get_v2", partial(sut.get, chain)), plan)
            case "exists":
                bounded("batch_exists_v2", partial(sut.exists, chain))
            case _:
                pass

    def _kill_another(self, sut: StorageUnderTest, place: float) -> None:
        """Let another engine of the same identity set its own pages, and kill it in the middle."""
        group = ProcessGroup(self._context, OTHERS)
        group.identity = sut.identity
        engine = group.worker("another")
        work = group.work(group.new_keys(8), {Call.SET: 1}, calls=8, max_keys=4)
        group.run({engine: work}, {engine: KillSchedule(1 + int(place * 4), place)})
        engine.close()
