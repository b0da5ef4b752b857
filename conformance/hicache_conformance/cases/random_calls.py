"""Random calls, compared with a dictionary as the model, and under random plans of faults."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Flaky, FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from msgspec import structs

from hicache_conformance.fixtures.fault_calls import (
    DEADLINE_SECONDS,
    check_hits,
    check_kept,
    under_fault,
    wait_until_serving,
)
from hicache_conformance.fixtures.process_group import STORE_ATTEMPTS, STORE_PAUSE_SECONDS
from hicache_conformance.harness.oracle import PoolQuery, check_exists
from hicache_conformance.harness.pools import GuardedPool, short
from hicache_conformance.harness.storage_under_test import (
    StorageUnderTest,
    all_pages,
    block_groups,
    trailing,
)
from hicache_conformance.model.case import Violation, check, checked, covers
from hicache_conformance.model.fault_plan import MENU, UNTIMED, Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level, declares
from hicache_storage.layers import StorageOptions
from hicache_storage.plugins import registry
from hicache_storage.spec import HungReads, PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.injectors.injector import FaultInjector

KEYS = 6
PLACES = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=10)
POOLS = st.integers(0, 2)
SPEAKERS = st.integers(0, 1)
GENERATIONS = st.integers(0, 3)
WINDOWS = st.integers(0, 4)


class HistoryCases:
    """GET-1, SET-1 and their neighbours, in any order that calls can come in."""

    @covers("GET-1", "GET-3", "SET-1", "SET-3", "EX-2")
    def test_histories(self, context: CaseContext) -> None:
        """One pool: set, get, exists, delete, clear and reopen, with holes and repeated keys."""
        check_histories(context, [PoolName.KV])

    @covers("GET-1", "SET-1", "EX-1", "EX-3", levels=Level.POOLS)
    def test_histories_of_several_pools(self, context: CaseContext) -> None:
        """The same over three pools with hit policies."""
        check_histories(context, [PoolName.KV, PoolName.MAMBA, PoolName.INDEXER])


def check_histories(context: CaseContext, pools: Sequence[str]) -> None:
    """Run as many random histories as the profile says.

    Raises:
        Violation: the first rule found broken, with the shortest history found that breaks it as a
            note.
    """
    try:
        machine = partial(_StateMachine, context, pools)
        seeded: Any = hypothesis.seed(context.number("histories"))(machine)
        settings = search_settings(
            context, context.profile.histories, stateful_step_count=context.profile.steps
        )
        run_state_machine_as_test(seeded, settings=settings)
    except Flaky as flaky:
        # The same calls failed once and passed once. What failed is still a failure.
        errors = flaky.exceptions if isinstance(flaky, FlakyFailure) else [flaky.__context__]
        violation = next((error for error in errors if isinstance(error, Violation)), None)
        if violation is None:
            raise
        violation.add_note("The same history passed when it was tried again.")
        raise violation from flaky


def search_settings(context: CaseContext, examples: int, **more: Any) -> hypothesis.settings:
    """Settings of a search for an example that breaks a rule, and for a short one."""
    return hypothesis.settings(
        max_examples=examples,
        # Times say nothing here: a driver on a busy disk is not wrong.
        deadline=None,
        # Examples of one driver are of no use to another, and a run must not depend on those before
        # it.
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if context.profile.shrinks else [])],
        print_blob=False,
        suppress_health_check=(
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ),
        **more,
    )


class _StateMachine(RuleBasedStateMachine):
    """Two storages of one identity, and what they must hold.

    One storage where the driver does not share pages.
    """

    def __init__(self, context: CaseContext, pools: Sequence[str]) -> None:
        super().__init__()
        self.context = context
        self.pools = list(pools)
        self.identity = context.identity()
        self.stored = dict[tuple[str, str], int]()
        """Generation by pool and key."""
        self.keys = context.keys(KEYS)
        # Dozens of storages are opened in a history. A directory of its own spares each of them
        # from looking through what the writers of all histories before have left; a server's is
        # larger than that is worth.
        self.config = (
            context.config if registry().get(context.driver).trial_services else context.apart()[0]
        )
        self.suts: list[StorageUnderTest] = []
        self._open()

    @rule(pool=POOLS, places=PLACES, generation=GENERATIONS, speaker=SPEAKERS)
    def set(self, pool: int, places: list[int], generation: int, speaker: int) -> None:
        name, chain, sut = self._pool(pool), self._chain(places), self._speaker(speaker)
        for attempt in range(STORE_ATTEMPTS):
            faults = sut.storage.fault_count()
            try:
                sut.store(chain, name, generation=generation)
                break
            except Violation:
                # As in `ProcessGroup.expect`: what met a fault was rightly refused, once or twice.
                if attempt == STORE_ATTEMPTS - 1 or sut.storage.fault_count() == faults:
                    raise
            time.sleep(STORE_PAUSE_SECONDS)
        for key in chain:
            # The first generation stays: a set of what exists writes nothing (SET-3).
            self.stored.setdefault((name, key), generation)

    @rule(pool=POOLS, places=PLACES, speaker=SPEAKERS)
    def get(self, pool: int, places: list[int], speaker: int) -> None:
        name, chain, sut = self._pool(pool), self._chain(places), self._speaker(speaker)
        for index, (key, content) in enumerate(zip(chain, sut.get(chain, name), strict=True)):
            generation = self.stored.get((name, key))
            checked("GET-1")
            if generation is not None:
                sut.compare([key], [content], name, generation=generation)
            elif content is not None:
                held = sut.explain(key, content, name) or "holds its own bytes"
                raise Violation(
                    "GET-1",
                    f"page {index} key {short(key)} of pool {name!r} is not there, and a get "
                    f"delivers it: {held}",
                )

    @rule(places=PLACES, windows=st.tuples(WINDOWS, WINDOWS), speaker=SPEAKERS)
    def exists(self, places: list[int], windows: tuple[int, int], speaker: int) -> None:
        chain = self._chain(places)
        if not self.context.interface_profile.is_native:
            windows = (windows[0] % 4, windows[1] % 4)
        transfers = [
            _policy(pool, window) for pool, window in zip(self.pools[1:], windows, strict=False)
        ]
        present = {pool: [(pool, key) in self.stored for key in chain] for pool in self.pools}
        answer = self._speaker(speaker).exists(chain, *transfers)
        asked = [PoolQuery(transfer, present[transfer.name]) for transfer in transfers]
        verdicts = self.context.interface_profile.is_native
        check_exists(answer, present[PoolName.KV], asked, verdicts=verdicts)

    @precondition(lambda self: self.context.capabilities.deletes)
    @rule(pool=POOLS, places=PLACES, speaker=SPEAKERS)
    def delete(self, pool: int, places: list[int], speaker: int) -> None:
        name, doomed = self._pool(pool), list(dict.fromkeys(self._chain(places)))
        removed = self._speaker(speaker).delete(doomed, name)
        wanted = [self.stored.pop((name, key), None) is not None for key in doomed]
        check(
            removed == wanted,
            "SET-1",
            f"deleting {[short(key) for key in doomed]} from {name!r} answered {removed}, must "
            f"be {wanted}",
        )

    @precondition(
        lambda self: (
            self.context.capabilities.clears and self.context.interface_profile.setup.clears_at_once
        )
    )
    @rule(speaker=SPEAKERS)
    def clear(self, speaker: int) -> None:
        sut = self._speaker(speaker)
        sut.call("clear", sut.storage.clear)
        self.stored.clear()

    @rule()
    def reopen(self) -> None:
        self._close()
        if not declares(self.context.capabilities, "durability>=reopen"):
            # Pages may be gone and may be there; a new identity has none for certain.
            self.identity = replace(self.identity, salt=f"{self.identity.salt}+")
            self.stored.clear()
        self._open()

    def teardown(self) -> None:
        self._close()

    def _open(self) -> None:
        count = 2 if self.context.shares else 1
        self.suts = [
            self.context.storage(
                self.identity,
                pools={pool: GuardedPool(pages=16, components=(40, 24)) for pool in self.pools},
                config=self.config,
            )
            for _ in range(count)
        ]

    def _close(self) -> None:
        for sut in self.suts:
            sut.call("close", sut.storage.close)

    def _speaker(self, number: int) -> StorageUnderTest:
        return self.suts[number % len(self.suts)]

    def _pool(self, number: int) -> str:
        return self.pools[number % len(self.pools)]

    def _chain(self, places: Sequence[int]) -> list[str]:
        chain = [self.keys[place] for place in places]
        return chain if self.context.interface_profile.is_native else list(dict.fromkeys(chain))


def _policy(pool: str, window: int) -> PoolTransfer:
    if window == 0:
        return all_pages(pool)
    return block_groups(pool, 2, 1) if window == 4 else trailing(pool, window)


SEARCH_SECONDS: Final = 150.0
"""Longest search for faults and calls that break a rule: fewer are tried on a busy machine."""
SHRINK_SECONDS: Final = 60.0
"""Longest search for fewer faults and calls. A case that took as long as the driver may hang would
be blamed on the driver."""
PLAN_KEYS: Final = 20
GUARDED: Final = StorageOptions(breaker_threshold=4, breaker_cooldown_seconds=0.05)

Step = tuple[str, tuple[int, ...]]
"""A call, and places of the keys that it is about."""

CALLS: Final[st.SearchStrategy[Step]] = st.tuples(
    st.sampled_from(("none", "get", "set", "exists", "get", "set")),
    st.lists(st.integers(0, PLAN_KEYS - 1), min_size=1, max_size=8, unique=True).map(tuple),
)


class PlanCases:
    """GET-1, SET-1, FT-1 and FT-4 under faults that nobody thought of."""

    @covers("GET-1", "SET-1", "FT-1", "FT-3", "FT-4", "FT-6", levels=Level.FAULTS)
    def test_random_faults(self, context: CaseContext, injector: FaultInjector) -> None:
        """Random faults under random calls, and what was acknowledged afterwards."""
        search = _Search(context, injector)
        # Of an open storage, because a driver may know only then what it stands on.
        promised = context.storage().storage.capabilities
        plans = fault_plans(
            injector.name,
            # Reads may not wait by declaration, and methods must be able to hang.
            hangs=promised.hung_reads is HungReads.BOUNCE_BUFFER
            and (injector.name != "objects" or promised.may_hang),
        )
        count = context.profile.plan_steps

        @search_settings(context, context.profile.plans)
        @hypothesis.seed(context.number("plans"))
        @hypothesis.given(plan=plans, calls=st.lists(CALLS, min_size=count, max_size=count))
        def check(plan: FaultPlan, calls: list[Step]) -> None:
            search.check(plan, calls)

        check()


@st.composite
def fault_plans(draw: st.DrawFn, injector: str, *, hangs: bool) -> FaultPlan:
    """Plans of one to four faults.

    Args:
        hangs: whether operations may hang; each costs its deadlines, so that only some plans have
            one.
    """
    menu = MENU[injector]
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


class _Search:
    """Runs plans and calls, each pair once; repeated, it ends as it did."""

    def __init__(self, context: CaseContext, injector: FaultInjector) -> None:
        self._context = context
        self._injector = injector
        self._found: dict[tuple[FaultPlan, tuple[Step, ...]], Violation | None] = {}
        """By example."""
        self._has_failed = False
        self._until = time.monotonic() + SEARCH_SECONDS
        """End of the search, and once there is an example, of that for shorter ones."""

    def check(self, plan: FaultPlan, steps: Sequence[Step]) -> None:
        """Make the calls under the faults."""
        example = plan, tuple(steps)
        if example not in self._found:
            if time.monotonic() > self._until:
                return
            recorded = list(self._injector.plans)
            violation = self._found[example] = self._violation(plan, steps)
            if self._has_failed:
                # What is tried in order to shorten the first is of no interest.
                self._injector.plans[:] = recorded
            elif violation is not None:
                self._has_failed = True
                self._until = time.monotonic() + SHRINK_SECONDS
        found = self._found[example]
        if found is not None:
            raise found

    def _violation(self, plan: FaultPlan, steps: Sequence[Step]) -> Violation | None:
        """Make the calls with an identity and a storage of their own; the rule that was broken."""
        sut, keys = self._context.storage(options=GUARDED), self._context.keys(PLAN_KEYS)
        try:
            self._run(sut, keys, plan, steps)
        except Violation as violation:
            return violation
        finally:
            # Before close(), which would otherwise meet the fault and wait for its deadline.
            self._injector.heal()
            sut.storage.close()
        return None

    def _run(
        self, sut: StorageUnderTest, keys: Sequence[str], plan: FaultPlan, steps: Sequence[Step]
    ) -> None:
        # Some pages are there before anything goes wrong.
        stored = set[str]()
        for what, places in (("set", tuple(range(PLAN_KEYS // 2))), *steps[:2]):
            self._call(sut, what, [keys[place] for place in places], plan, stored)
        with under_fault(self._injector, plan, sut, DEADLINE_SECONDS):
            for what, places in steps[2:]:
                self._call(sut, what, [keys[place] for place in places], plan, stored)
        wait_until_serving(self._context, sut, plan)
        check_kept(self._context, sut, sorted(stored), plan)

    def _call(
        self, sut: StorageUnderTest, what: str, chain: list[str], plan: FaultPlan, stored: set[str]
    ) -> None:
        match what:
            case "set":
                stored.update(key for key, ok in zip(chain, sut.set(chain), strict=True) if ok)
            case "get":
                check_hits(sut, chain, sut.get(chain), plan)
            case "exists":
                sut.exists(chain)
            case _:
                pass
