"""Hung stores: every call ends by its deadline, and has no effect after it has returned."""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

from hicache_conformance.fixtures.fault_calls import (
    DEADLINE_SECONDS,
    HURRIED,
    HURRIED_SECONDS,
    SLACK_SECONDS,
    check_hits,
    check_kept,
    hang_plan,
    may_wait,
    serving_storage,
    set_deadline,
    wait_until_serving,
)
from hicache_conformance.harness.concurrency import Pending, eventually
from hicache_conformance.harness.driver_calls import has_steps
from hicache_conformance.harness.pools import spent
from hicache_conformance.harness.process_state import OpenResources, left_open
from hicache_conformance.harness.storage_under_test import PageGroup, StorageUnderTest, check_raises
from hicache_conformance.model.case import Violation, check, checked, covers
from hicache_conformance.model.cause import places_in_driver
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_storage.layers import StorageOptions
from hicache_storage.layers.deadline import MAX_HUNG_CALLS
from hicache_storage.spec import HiCacheError, HiCacheStorageExtraInfo, PoolName, StorageClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.injectors.injector import FaultInjector

AnswerT = TypeVar("AnswerT")

IN_TIME: Final = DEADLINE_SECONDS + SLACK_SECONDS
LIVES: Final = 3
"""What every one of so many storages has left behind is a leak; a library's own pool of connections
is full before that."""
SETTLING_SECONDS: Final = 1.0
"""How long is waited for what a storage that was closed leaves, before another one is closed."""
SILENCE_SECONDS: Final = 15.0
"""Longest timeout of a driver's own on a connection that is silent; 5 s is what clients of servers
have without any setting."""
LATE_SECONDS: Final = 0.3
"""How long late effects are waited for when the store serves again."""
LOOKS: Final = 3


DEADLINES: Final = (DEADLINE_SECONDS, 0.0, -0.5, -1.0, math.nan, math.inf, 1e10)
"""Of calls: a usual one; passed already, as a caller's clock may say; no number; and longer than a
lock can wait."""
HUNG_SORTS: Final[Mapping[str, tuple[str, ...]]] = {
    "everything": (),
    "reads": ("read", "reply"),
    "writes": ("write", "create", "name", "sync", "request"),
}
"""What hangs: a driver may look whether its call is over in front of a request, and not behind it."""


class DeadlineCases:
    """FT-3, GET-9, SET-8, and LC-2 under fault."""

    @covers("FT-3", "FT-1", "FT-4", levels=Level.FAULTS)
    def test_a_hung_store(self, context: CaseContext, injector: FaultInjector) -> None:
        """Calls while the store hangs end in time; afterwards the storage serves."""
        sut, keys = serving_storage(context, injector)
        plan = hang_plan(injector, sut)
        # An interface without deadlines has a patience of its own, that of the engine which calls
        # it.
        new, within = context.keys(4), context.interface_profile.patience_seconds or IN_TIME
        set_deadline(sut)
        injector.inject(plan)
        reading = _ask_in_time(sut, keys, new, plan, within)
        injector.heal()
        # A get that was allowed to wait has to come back now, with right bytes or none.
        check_hits(sut, keys, _come_back(context, reading, "batch_get_v2", plan), plan)
        set_deadline(sut, None)
        wait_until_serving(context, sut, plan)
        check_kept(context, sut, keys, plan)

    @covers("FT-3", "LC-1", levels=Level.FAULTS)
    def test_opening_a_hung_store(self, context: CaseContext, injector: FaultInjector) -> None:
        """open() and health() of a store that hangs end in time, and say so."""
        plan = hang_plan(injector, serving_storage(context, injector, pages=1)[0])
        options = StorageOptions(deadline_seconds=DEADLINE_SECONDS, breaker_threshold=0)
        sut = context.unopened(options=options)
        injector.inject(plan)
        opening = Pending(sut.storage.open)
        # open() may raise, or return and connect with the first call; the rule asks only that it
        # ends.
        with contextlib.suppress(HiCacheError):
            _check_time(opening, "open", plan)
        health = _check_time(
            Pending(partial(sut.call, "health", sut.storage.health)), "health", plan
        )
        check(
            not injector.injected_count() or not plan.hangs or not health.ok,
            "FT-3",
            f"nothing answers ({plan}), and health() says that all is well",
        )
        injector.heal()
        # Now with a deadline that a busy machine keeps.
        allowed = context.profile.recovery_seconds
        # A storage whose open() failed has to serve when the store is back: an engine does not
        # construct it a second time.
        check(
            eventually(lambda: sut.set(context.keys(1)) == [True], allowed),
            "FT-4",
            f"a storage that was opened while the store hung stores nothing {allowed:.0f} s later",
        )

    @covers("FT-3", "FT-1", "FT-2", "GET-9", "SET-8", levels=Level.FAULTS)
    @pytest.mark.parametrize("hung", HUNG_SORTS)
    def test_calls_of_a_hung_store_are_over(
        self, context: CaseContext, injector: FaultInjector, hung: str
    ) -> None:
        """Calls with all kinds of deadlines while the store hangs, and what they leave."""
        sut, keys = serving_storage(context, injector, pages=2, options=HURRIED)
        plan = hang_plan(injector, sut, *HUNG_SORTS[hung])
        clients = context.clients(sut, len(DEADLINES))
        calls = [
            _Calls(client, seconds, waits=may_wait(sut))
            for client, seconds in zip(clients, DEADLINES, strict=True)
        ]
        injector.inject(plan)
        # All calls begin before any is waited for, so that one with an endless deadline cannot hold
        # up the threads that serve the others.
        for call in calls:
            call.begin(keys, context.keys(2))
        try:
            for call in calls:
                own = min(call.seconds, HURRIED_SECONDS)
                call.check_ended(own if call.seconds > 0 else 0.0, plan)
        finally:
            injector.heal()
        for call in calls:
            call.let_go(context, plan)
        # Time for what hung to go on: what writes into a page after its call has ended does so now.
        for _ in range(LOOKS):
            time.sleep(LATE_SECONDS / LOOKS)
            for call in calls:
                call.check_untouched(plan)
        wait_until_serving(context, sut, plan)
        for call in calls:
            call.check_unpublished(plan)

    @covers("FT-3", "FT-1", "FT-2", levels=Level.FAULTS)
    def test_unusual_deadlines_of_a_working_store(self, context: CaseContext) -> None:
        """All kinds of deadlines without the SDK's deadline layer."""
        options = StorageOptions(deadline_seconds=None, breaker_threshold=0)
        sut, keys = context.stored(2, options=options)
        # No fault and no deadline layer: what a deadline that has passed does is up to the driver
        # alone here.
        plan = FaultPlan("none", ())
        for client, seconds in zip(context.clients(sut, len(DEADLINES)), DEADLINES, strict=True):
            call = _Calls(client, seconds)
            call.begin(keys, context.keys(2))
            call.check_ended(0.0, plan)
            call.check_untouched(plan)
            call.check_unpublished(plan)

    @covers("LC-2", "FT-3", levels=Level.FAULTS)
    def test_closing_a_hung_store(self, context: CaseContext, injector: FaultInjector) -> None:
        """close() while calls hang, twice; when the store comes back, nothing is left."""
        # A first life that is not counted: it fills pools of connections and threads that a library
        # keeps for good.
        _life_under_hang(context, injector)
        # What is there for good is waited for once, behind the last of them.
        waits = [*[SETTLING_SECONDS] * (LIVES - 1), context.profile.recovery_seconds]
        left = "all"
        for seconds in waits:
            before = OpenResources.now()
            _life_under_hang(context, injector)
            left = left and left_open(before, seconds)
        check(
            not left,
            "LC-2",
            f"a storage was closed while calls hung, and {waits[-1]:.0f} s after the store came "
            f"back there is still {left}, and something each of the {LIVES} times",
        )

    @covers("FT-4", "FT-3", levels=Level.FAULTS, needs=["the injector network"])
    def test_half_open_connections(self, context: CaseContext, injector: FaultInjector) -> None:
        """Calls on connections that stay open and silent for good."""
        sut, keys = serving_storage(context, injector, pages=4)
        # Each connection that is used meanwhile, because a store with one request for each page may
        # be asked by many before the get.
        half_open = Fault(kind=FaultKind.HALF_OPEN, operations=("request",))
        plan = FaultPlan(injector.name, (half_open,))
        set_deadline(sut)
        injector.inject(plan)
        reading = _ask_in_time(sut, keys, context.keys(4), plan)
        injector.heal()
        try:
            # A get that is allowed to wait has to give the connection up by itself.
            check_hits(sut, keys, _come_back(context, reading, "batch_get_v2", plan), plan)
            eventually(lambda: not places_in_driver(), SILENCE_SECONDS, 0.05)
            waiting = places_in_driver()
            check(
                not waiting,
                "FT-4",
                f"{SILENCE_SECONDS:.0f} s after connections became half-open, {len(waiting)} calls "
                f"still wait for them, the first one in {''.join(waiting[:1])}: its connection has "
                f"no timeout; each such call keeps its thread, and beyond {MAX_HUNG_CALLS} of them "
                f"every call is a miss",
            )
            set_deadline(sut, None)
            wait_until_serving(context, sut, plan)
        finally:
            # What still waits must not last longer than the case.
            injector.inject(FaultPlan(injector.name, (Fault(kind=FaultKind.REFUSE),)))
            injector.heal()


class _Calls:
    """An exists, a get and a set of one client at the same time, with a deadline.

    Args:
        waits: the get may wait for as long as something hangs.
    """

    def __init__(self, sut: StorageUnderTest, seconds: float, *, waits: bool = False) -> None:
        self.seconds = seconds
        # What is refused as misuse does not get as far as the store.
        self._waits = waits and not math.isnan(seconds)
        self._sut = sut
        self._memory = sut.memories[PoolName.KV]
        self._calls: dict[str, Pending[Any]] = {}
        self._new = list[str]()
        self._pages = list[int]()

    def begin(self, keys: list[str], new: list[str]) -> None:
        """Make the calls: ask for pages that are there, and set new ones."""
        storage = self._sut.storage
        self._new = new
        self._pages = self._sut.own_pages([*keys, *new])
        read, written = self._pages[: len(keys)], self._pages[len(keys) :]
        getting = self._sut.transfers([PageGroup(keys)], [read])
        setting = self._sut.transfers([PageGroup(new)], [written])
        self._sut.fill(PageGroup(new), written)
        asks: dict[str, Callable[[], object]] = {
            "batch_exists_v2": lambda: storage.batch_exists_v2(keys, None, self._info()),
            "batch_set_v2": lambda: storage.batch_set_v2(setting, self._info()),
            "batch_get_v2": lambda: storage.batch_get_v2(getting, self._info()),
        }
        self._calls = {name: Pending(ask) for name, ask in asks.items()}

    def _info(self) -> HiCacheStorageExtraInfo:
        # Made in the call, because it may refuse what is no number.
        return HiCacheStorageExtraInfo(deadline_seconds=self.seconds)

    def check_ended(self, within: float, plan: FaultPlan) -> None:
        """Make sure that they end in time and the slack, without an error that is not the caller's."""
        for name, call in self._calls.items():
            if name == "batch_get_v2" and self._waits:
                continue
            told = f"{name} with deadline_seconds={self.seconds}"
            check(
                call.ended(within + SLACK_SECONDS),
                "FT-3",
                f"{told} has not ended {within + SLACK_SECONDS:.1f} s after it began ({plan})",
            )
            checked("FT-1")
            try:
                call.answer()
            except HiCacheError as error:
                if not math.isnan(self.seconds):
                    raise Violation(
                        "FT-1", f"{told} raised {type(error).__name__} ({plan}): {error}"
                    ) from error
            except Exception as error:
                rule = "FT-2" if math.isnan(self.seconds) else "FT-1"
                raise Violation(
                    rule, f"{told} raised {type(error).__name__}, which is no HiCacheError: {error}"
                ) from error
        if not self._waits:
            self._give_back()

    def let_go(self, context: CaseContext, plan: FaultPlan) -> None:
        """Wait for a get that was allowed to wait, when nothing hangs any more."""
        if self._waits:
            _come_back(context, self._calls["batch_get_v2"], "batch_get_v2", plan)
            self._give_back()

    def _give_back(self) -> None:
        """Use the host pages for something else, as an engine does at once."""
        self._memory.fill(self._pages, spent(self._memory.page_bytes))

    def check_untouched(self, plan: FaultPlan) -> None:
        """Make sure that nothing was read into the host pages afterwards."""
        changed = self._memory.changed(self._pages, spent(self._memory.page_bytes))
        advice = (
            "; copy with ObjectRead.fill(), or within call.shield(), which know if the call is over"
        )
        check(
            not changed,
            "GET-9",
            f"host pages {changed}: each was written after the get with deadline_seconds="
            f"{self.seconds} had ended ({plan}){advice * has_steps(self._sut.storage)}",
        )

    def check_unpublished(self, plan: FaultPlan) -> None:
        """Make sure that nothing was stored of what the host pages hold since."""
        late = f", left by a set with deadline_seconds={self.seconds} ({plan}),"
        self._sut.check_right(self._new, self._sut.get(self._new), rule="SET-8", when=late)


def _life_under_hang(context: CaseContext, injector: FaultInjector) -> None:
    sut, keys = serving_storage(context, injector, pages=4, options=HURRIED)
    plan, one, two, three = hang_plan(injector, sut), *context.clients(sut, 3)
    # Far beyond the closing deadline, so that it is close() that ends the calls and not their own
    # deadline.
    for client in (one, two, three):
        set_deadline(client, 60.0)
    injector.inject(plan)
    asks = partial(one.exists, keys), partial(two.get, keys), partial(three.set, context.keys(4))
    calls = [Pending(partial(_until_closed, ask)) for ask in asks]
    # Each of them shall hang; some drivers have one call wait for another.
    eventually(lambda: injector.injected_count() >= len(calls), DEADLINE_SECONDS, 0.005)
    allowed = HURRIED_SECONDS + SLACK_SECONDS
    # LC-2 asks for an idempotent close(), here also while calls of before the first one hang.
    checked("LC-2")
    for name in ("close", "close again"):
        closing = Pending(partial(sut.call, name, sut.storage.close))
        if not closing.ended(allowed):
            injector.heal()
            closing.comes_back(context.profile.recovery_seconds)
            raise Violation(
                "LC-2",
                f"{name} has not ended {allowed:.1f} s after it began, {plan}; the deadline is "
                f"{HURRIED_SECONDS:.1f} s",
            )
        closing.answer()
    asking = Pending(partial(sut.storage.batch_exists_v2, keys))
    name = "batch_exists_v2 after close()"
    check_raises(StorageClosedError, "LC-2", name, partial(_check_time, asking, name, plan))
    injector.heal()
    for call in calls:
        _come_back(context, call, "a call that hung when the storage was closed", plan)


def _until_closed(ask: Callable[[], object]) -> None:
    try:
        ask()
    except Violation as violation:
        # A call that comes back to a closed storage may say so.
        if not isinstance(violation.__cause__, StorageClosedError):
            raise


def _ask_in_time(
    sut: StorageUnderTest, keys: list[str], new: list[str], plan: FaultPlan, within: float = IN_TIME
) -> Pending[list[bytes | None]]:
    """Look up, set and read pages while nothing answers; the get, which may wait."""
    for name, ask in (
        ("batch_exists_v2", partial(sut.exists, keys)),
        ("batch_set_v2", partial(sut.set, new)),
        ("batch_present", partial(sut.present, keys)),
        # Asked again behind a set that hung: a driver with one connection or one worker has used
        # it up by now, and would wait for it without end.
        ("batch_exists_v2 again", partial(sut.exists, keys)),
    ):
        _check_time(Pending(ask), name, plan, within)
    # Last, because a driver may say that its reads wait.
    reading = Pending(partial(sut.get, keys))
    if not may_wait(sut):
        check_hits(sut, keys, _check_time(reading, "batch_get_v2", plan, within), plan)
    return reading


def _check_time(
    call: Pending[AnswerT], name: str, plan: FaultPlan, within: float = IN_TIME
) -> AnswerT:
    """The answer of a call that has to end in time; FT-3 if it does not."""
    checked("FT-1")
    check(
        call.ended(within),
        "FT-3",
        f"{name} has not ended {within:.1f} s after it began, with a deadline of "
        f"{within - SLACK_SECONDS:.1f} s; {plan}",
    )
    return call.answer()


def _come_back(context: CaseContext, call: Pending[AnswerT], name: str, plan: FaultPlan) -> AnswerT:
    allowed = context.profile.recovery_seconds
    check(
        call.comes_back(allowed),
        "FT-4",
        f"{name} has not come back {allowed:.0f} s after the fault was gone ({plan})",
    )
    return call.answer()
