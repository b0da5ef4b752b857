"""Faults that take effect and are reported as errors, and sets that are interrupted.

Lost replies, soft mounts, NFS retransmissions; Ctrl-C.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.context import NO_LAYERS
from hicache_conformance.fixtures.fault_calls import (
    UNGUARDED,
    call_bounded,
    check_hits,
    serving_storage,
    set_deadline,
    wait_until_serving,
)
from hicache_conformance.harness.call_steps import CallSteps
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.model.case import covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level, declares
from hicache_conformance.model.violation import Inconclusive, check

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_conformance.injectors.injector import FaultInjector

FAULTS: Final = (Level.FAULTS,)
MUTATING: Final = {
    "disk": ("create", "write", "name", "sync", "remove"),
    "network": ("reply",),
    "objects": ("write", "remove"),
}
"""Sorts of requests of each injector that change something; a lost reply is one to a request that
may have."""
MAX_STEPS: Final = 12
"""Requests of a set that are struck, one after the other; no more than there are."""
BATCH: Final = 48
APPLIED_SECONDS: Final = 2.0
"""Deadline of calls under the fault: a client whose reply was lost may try again."""


class AppliedCases:
    """SET-1 and GET-1 where a request took effect and reported an error."""

    @covers("SET-1", "GET-1", "FT-1", "FT-6", levels=FAULTS)
    @pytest.mark.parametrize("error", ["EIO", "retransmitted"])
    def test_requests_that_took_effect_and_failed(
        self, context: CaseContext, injector: FaultInjector, error: str
    ) -> None:
        """What sets acknowledge under a struck request is found by all, then and later.

        Each request of a set is struck in turn; storages that open later find it, too.
        """
        writer, keys = serving_storage(context, injector, pages=2)
        shared = declares(context.capabilities, "sharing>=process")
        # A second storage, because the writer itself may answer from what it remembers of its own
        # set: only another one shows what the store holds.
        reader = context.storage(writer.identity, options=UNGUARDED) if shared else writer
        plan = FaultPlan(injector.name, ())
        stored = dict.fromkeys(keys, plan)
        # One request of the set is struck in each turn. A driver that takes an error for "nothing
        # happened" goes wrong at one of them only, such as the rename that publishes.
        for step in range(MAX_STEPS):
            plan = _plan(injector, error, step)
            set_deadline(writer, APPLIED_SECONDS)
            injector.inject(plan)
            # The one that is struck, and others of other sizes, which may take what it has left
            # behind for theirs.
            new = [
                key
                for pages in (3, 1 + step % 2, 2)
                for key in _set(context, injector, writer, pages, plan)
            ]
            reached = injector.injected_count()
            injector.heal()
            set_deadline(writer, None)
            written = dict.fromkeys(new, plan)
            stored |= written
            for sut in (writer, reader):
                _check_there(sut, written)
            # The set has fewer requests than `step`: nothing was struck, and no later step would
            # be.
            if not reached:
                break
        wait_until_serving(context, writer, plan)
        for sut in (
            writer,
            reader,
            context.storage(writer.identity, options=UNGUARDED) if shared else writer,
        ):
            _check_there(sut, stored)

    @covers("SET-1", "FT-4", "GET-1", levels=FAULTS, needs=["sharing>=process"])
    def test_sets_are_interrupted(self, context: CaseContext) -> None:
        """A KeyboardInterrupt after each step of a set: what later sets acknowledge is there.

        As of Ctrl-C, of a handler that raises, or of a test's time limit.
        """
        writer = context.storage(options=NO_LAYERS)
        reader, steps = context.storage(writer.identity), CallSteps(writer.storage, _interrupt)
        counts = list[int]()
        for steps.at in (0, 0, 0):
            writer.store(context.keys(2))
            counts.append(steps.count)
        # A set may open what is kept, or look at what others have stored.
        if not (count := min(counts)):
            raise Inconclusive("a set of this driver calls nothing outside of Python")
        for at in range(1, count + 1):
            steps.at, interrupted = at, context.keys(2)
            with contextlib.suppress(KeyboardInterrupt):
                writer.set(interrupted)
            steps.at, plan = None, f"a KeyboardInterrupt after step {at} of {count} of a set"
            # Seen by the reader before the next set, as in a store that is in use.
            check_hits(reader, interrupted, reader.get(interrupted), plan)
            later = [*interrupted, *context.keys(2)]
            stored = {key: plan for key, ok in zip(later, writer.set(later), strict=True) if ok}
            for sut in (late := context.storage(writer.identity), reader, writer):
                _check_there(sut, stored)
            late.storage.close()
            wait_until_serving(context, writer, plan)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _plan(injector: FaultInjector, error: str, step: int) -> FaultPlan:
    """Nothing where no single request can be made to fail after it took effect."""
    if injector.name not in MUTATING:
        return FaultPlan(injector.name, ())
    name = "" if error == "retransmitted" else error
    return FaultPlan(
        injector.name,
        (
            Fault(
                kind=FaultKind.APPLIED,
                operations=MUTATING[injector.name],
                first=step,
                count=1,
                error=name,
            ),
        ),
    )


def _set(
    context: CaseContext,
    injector: FaultInjector,
    writer: StorageUnderTest,
    pages: int,
    plan: FaultPlan,
) -> list[str]:
    """Set fresh pages; those that were acknowledged."""
    keys = context.keys(pages)
    answers = call_bounded(injector, plan, "batch_set_v2", partial(writer.set, keys))
    return [key for key, ok in zip(keys, answers, strict=True) if ok]


def _check_there(sut: StorageUnderTest, stored: Mapping[str, object]) -> None:
    """Read pages that were acknowledged, each under or after a fault of its own."""
    keys = list(stored)
    for start in range(0, len(keys), BATCH):
        some = keys[start : start + BATCH]
        for key, content in zip(some, sut.get(some), strict=True):
            check_hits(sut, [key], [content], stored[key])
            check(
                content is not None,
                "SET-1",
                f"page key {short(key)} was stored (True), and a get answers False; below the "
                f"driver: {stored[key]}",
            )
