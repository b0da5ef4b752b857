"""Random plans of faults under random work."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.random_run import Rehearsal, Step, drawn_steps, least
from hicache_conformance.injectors.random_plan import drawn_plan
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.injectors.injector import Ground
    from hicache_conformance.model.fault_plan import FaultPlan
    from hicache_conformance.model.violation import Violation

FAULTS: Final = (Level.FAULTS,)


class PlanCases:
    """GET-1, SET-1, FT-1 and FT-4 under faults that nobody thought of."""

    @covers("GET-1", "SET-1", "FT-1", "FT-3", "FT-4", "FT-6", levels=FAULTS)
    def test_random_faults(self, lab: Lab, ground: Ground) -> None:
        """Random faults under random calls: each hit is right, nothing raises, and what was acknowledged outlives what did not destroy it."""
        rehearsal = Rehearsal(lab, ground)
        hangs, engines = rehearsal.may_hang(), rehearsal.has_others()
        for number in range(lab.profile.plans):
            random = lab.chance(f"plan {number}")
            # A hang costs its deadlines, so that only some plans have one.
            plan = drawn_plan(ground.name, random, hangs=hangs and number % 4 == 3, engines=engines)
            steps = drawn_steps(random, lab.profile.plan_steps)
            violation = rehearsal.play(plan, steps)
            if violation is not None:
                raise _told(rehearsal, plan, steps, violation)


def _told(rehearsal: Rehearsal, plan: FaultPlan, steps: list[Step], violation: Violation) -> Violation:
    """The violation with what leads to it, as short as it could be made."""
    again, ground = "as it was drawn", rehearsal.ground
    recorded = list(ground.plans)
    if rehearsal.lab.profile.shrinks:
        faults = least(plan.faults, lambda some: rehearsal.fails_like(violation, plan.only(some), steps), tries=24)
        plan = plan.only(faults)
        steps = least(steps, partial(rehearsal.fails_like, violation, plan), tries=24)
        last = rehearsal.play(plan, steps)
        again = "made as short as it could be" if last else "made short; the last time it passed, so that timing decides"
        violation = last or violation
        # What was tried in order to shrink them is of no interest.
        ground.plans[:] = recorded
    violation.add_note(f"Faults ({again}): {plan}")
    violation.add_note("\n".join(["Calls:", *(f"  {number}. {step}" for number, step in enumerate(steps, start=1))]))
    violation.add_note(f"Plan: {plan.as_json()}")
    return violation
