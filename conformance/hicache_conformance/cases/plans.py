"""Random plans of faults under random work."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.random_run import RandomRun, Step, random_steps, shrink
from hicache_conformance.injectors.random_plan import generate_plan
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.injectors.injector import FaultInjector
    from hicache_conformance.model.fault_plan import FaultPlan
    from hicache_conformance.model.violation import Violation

FAULTS: Final = (Level.FAULTS,)
SHRINK_SECONDS: Final = 30.0
"""Longest search for fewer faults, and for fewer calls. A case that took as long as the driver may
hang would be blamed on the driver."""


class PlanCases:
    """GET-1, SET-1, FT-1 and FT-4 under faults that nobody thought of."""

    @covers("GET-1", "SET-1", "FT-1", "FT-3", "FT-4", "FT-6", levels=FAULTS)
    def test_random_faults(self, context: CaseContext, injector: FaultInjector) -> None:
        """Random faults under random calls: each hit is right, and nothing raises.

        What was acknowledged outlives the faults that did not destroy it.
        """
        random_run = RandomRun(context, injector)
        hangs, engines = random_run.may_hang(), random_run.has_others()
        for number in range(context.profile.plans):
            random = context.chance(f"plan {number}")
            # A hang costs its deadlines, so that only some plans have one.
            plan = generate_plan(
                injector.name, random, hangs=hangs and number % 4 == 3, engines=engines
            )
            steps = random_steps(random, context.profile.plan_steps)
            violation = random_run.run(plan, steps)
            if violation is not None:
                raise _told(random_run, plan, steps, violation)


def _told(
    random_run: RandomRun, plan: FaultPlan, steps: list[Step], violation: Violation
) -> Violation:
    """The violation with what leads to it, as short as it could be made."""
    again, injector = "as it was drawn", random_run.injector
    recorded = list(injector.plans)
    if random_run.context.profile.shrinks:
        faults = shrink(
            plan.faults,
            lambda some: random_run.breaks_same_rule(violation, plan.only(some), steps),
            tries=24,
            seconds=SHRINK_SECONDS,
        )
        plan = plan.only(faults)
        steps = shrink(
            steps,
            partial(random_run.breaks_same_rule, violation, plan),
            tries=24,
            seconds=SHRINK_SECONDS,
        )
        last = random_run.run(plan, steps)
        again = (
            "made as short as it could be"
            if last
            else "made short; the last time it passed, so that timing decides"
        )
        violation = last or violation
        # What was tried in order to shrink them is of no interest.
        injector.plans[:] = recorded
    violation.add_note(f"Faults ({again}): {plan}")
    violation.add_note(
        "\n".join(
            ["Calls:", *(f"  {number}. {step}" for number, step in enumerate(steps, start=1))]
        )
    )
    violation.add_note(f"Plan: {plan.as_json()}")
    return violation
