"""clear() that cannot be done, because the store refuses or hangs: it raises."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.fault_calls import (
    PATIENCE_SECONDS,
    SLACK_SECONDS,
    UNGUARDED,
    hang_plan,
    serving_storage,
    wait_until_serving,
)
from hicache_conformance.harness.concurrency import Pending
from hicache_conformance.injectors.named_faults import UNAVAILABLE
from hicache_conformance.model.case import covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation, check, checked
from hicache_storage.layers import StorageOptions
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_conformance.injectors.injector import FaultInjector

FAULTS: Final = (Level.FAULTS,)
CLEARING_SECONDS: Final = 0.6
"""Deadline of a storage whose clear hangs; it has to work with it before."""
HURRIED: Final = StorageOptions(deadline_seconds=CLEARING_SECONDS, breaker_threshold=0)


class FailedClearCases:
    """LC-7."""

    @covers("LC-7", "FT-4", levels=FAULTS, needs=["clears"])
    def test_a_clear_that_is_refused(self, context: CaseContext, injector: FaultInjector) -> None:
        """While nothing works, clear() raises StorageUnavailableError, or has cleared.

        Done again afterwards, it clears.
        """
        plan = FaultPlan(injector.name, UNAVAILABLE[injector.name])
        sut, keys = serving_storage(context, injector, pages=4)
        _clear_under(context, injector, sut, keys, plan, PATIENCE_SECONDS)

    @covers("LC-7", "FT-3", "FT-4", levels=FAULTS, needs=["clears"])
    def test_a_clear_that_hangs(self, context: CaseContext, injector: FaultInjector) -> None:
        """While the store hangs, clear() raises StorageTimeoutError in time, or has cleared.

        Done again afterwards, it clears.
        """
        sut, keys = serving_storage(context, injector, pages=4, options=HURRIED)
        within = CLEARING_SECONDS + SLACK_SECONDS
        _clear_under(context, injector, sut, keys, _lost(injector, sut), within, late=True)


def _clear_under(
    context: CaseContext,
    injector: FaultInjector,
    sut: StorageUnderTest,
    keys: list[str],
    plan: FaultPlan,
    within: float,
    *,
    late: bool = False,
) -> None:
    """Clear under a fault, and again afterwards.

    Raises:
        Violation: FT-3, the clear has not ended in so many seconds; LC-7; FT-4.
    """
    injector.inject(plan)
    clearing = Pending(sut.storage.clear)
    checked("FT-3")
    if not clearing.ended(within):
        injector.heal()
        clearing.comes_back(context.profile.recovery_seconds)
        raise Violation("FT-3", f"clear has not ended {within:.1f} s after it began; {plan}")
    returned = _returned(clearing, plan, late=late)
    injector.heal()
    _check_cleared(context, sut, keys, plan, returned=returned)


def _lost(injector: FaultInjector, sut: StorageUnderTest) -> FaultPlan:
    """Everything hangs, and what has hung fails in the end.

    A clear that returned all the same has removed nothing.
    """
    plan = hang_plan(injector, sut)
    ends = {"network": (Fault(kind=FaultKind.CUT),), "services": ()}
    failing = (
        ends.get(injector.name, (Fault(kind=FaultKind.ERROR, error="EIO"),)) if plan.hangs else ()
    )
    return FaultPlan(injector.name, (*plan.faults, *failing))


def _returned(clearing: Pending[None], plan: FaultPlan, *, late: bool = False) -> bool:
    """Return whether a clear under a fault returned.

    Args:
        clearing: has ended.
        plan: the fault.
        late: whether one that ends at the deadline has to say so.

    Raises:
        Violation: LC-7, it raised something else than what the rule names.
    """
    checked("LC-7")
    try:
        clearing.answer()
    except StorageTimeoutError:
        return False
    except StorageUnavailableError as error:
        seconds = clearing.seconds or 0.0
        if late and seconds >= CLEARING_SECONDS:
            raise Violation(
                "LC-7",
                f"clear ended at its deadline and may still happen ({plan}), and raised "
                f"{type(error).__name__}, which is no "
                f"StorageTimeoutError: {error}",
            ) from error
        return False
    except Exception as error:
        raise Violation(
            "LC-7",
            f"clear raised {type(error).__name__}, which is no StorageUnavailableError ({plan}): "
            f"{error}",
        ) from error
    return True


def _check_cleared(
    context: CaseContext, sut: StorageUnderTest, keys: list[str], plan: FaultPlan, *, returned: bool
) -> None:
    """After the fault: nothing is left by a clear that returned, nor by one that is done again.

    Raises:
        Violation: LC-7 for a page that is left; FT-4 for a clear that goes on failing.
    """
    wait_until_serving(context, sut, plan)
    if returned:
        why = f"was cleared by a clear() that returned ({plan})"
        # LC-7 speaks of any storage: one that cleared may miss by its own index only, one that
        # opens now shows what is in the store.
        for reader in (sut, context.storage(sut.identity, options=UNGUARDED)):
            reader.expect_missing(keys, rule="LC-7", why=why)
    checked("FT-4")
    allowed = context.profile.recovery_seconds
    until = time.monotonic() + allowed
    # Done again in any case. A clear that raised may be repeated by its caller, and it has to
    # succeed once the store serves.
    while raised := sut.clear():
        check(
            time.monotonic() <= until,
            "FT-4",
            f"{allowed:.0f} s after the fault was gone ({plan}), clear still raises {raised}",
        )
        time.sleep(0.02)
    why = "was cleared, when the store served again"
    for reader in (sut, context.storage(sut.identity, options=UNGUARDED)):
        reader.expect_missing(keys, rule="LC-7", why=why)
