"""Sets whose requests fail after they took effect, that are interrupted, or held up half-way."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Final
from unittest import mock

import pytest

from hicache_conformance.fixtures.context import NO_LAYERS, CaseContext
from hicache_conformance.fixtures.fault_calls import (
    HURRIED,
    HURRIED_SECONDS,
    PATIENCE_SECONDS,
    UNGUARDED,
    check_hits,
    serving_storage,
    under_fault,
    wait_until_serving,
)
from hicache_conformance.fixtures.small_store import BATCH, capacity_of, open_long_pages
from hicache_conformance.harness.concurrency import Pending
from hicache_conformance.harness.driver_calls import CallSteps
from hicache_conformance.harness.storage_under_test import StorageUnderTest, check_each
from hicache_conformance.model.case import Inconclusive, NotPromised, check, checked, covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_storage.plugins import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.injectors.injector import FaultInjector

MUTATING: Final = {
    "disk": ("create", "write", "name", "sync", "remove"),
    "network": ("reply",),
    "objects": ("write", "remove"),
}
"""Sorts of requests of each injector that change something; a lost reply is one to a request that
may have."""
MAX_STEPS: Final = 12
"""Requests of a set that are struck, one after the other; no more than there are."""
READ_PAGES: Final = 48
APPLIED_SECONDS: Final = 2.0
"""Deadline of calls under the fault: a client whose reply was lost may try again."""


class AppliedCases:
    """SET-1 and GET-1 where a request took effect and reported an error."""

    @covers("SET-1", "GET-1", "FT-1", "FT-6", levels=Level.FAULTS)
    @pytest.mark.parametrize("error", ["EIO", "retransmitted"])
    def test_requests_that_took_effect_and_failed(
        self, context: CaseContext, injector: FaultInjector, error: str
    ) -> None:
        """Each request of a set in turn takes effect and fails."""
        writer, keys = serving_storage(context, injector, pages=2)
        # A second storage, because the writer itself may answer from what it remembers of its own
        # set: only another one shows what the store holds.
        suts = [writer]
        if context.shares:
            suts.append(context.storage(writer.identity, options=UNGUARDED))
        plan = FaultPlan(injector.name, ())
        stored = dict.fromkeys(keys, plan)
        # One request of the set is struck in each turn. A driver that takes an error for "nothing
        # happened" goes wrong at one of them only, such as the rename that publishes.
        for step in range(MAX_STEPS):
            plan = _applied(injector, error, step)
            with under_fault(injector, plan, writer, APPLIED_SECONDS):
                # The one that is struck, and others of other sizes, which may take what it has left
                # behind for theirs.
                written = {
                    key: plan
                    for pages in (3, 1 + step % 2, 2)
                    for key in _set(context, writer, pages)
                }
                reached = injector.injected_count()
            stored |= written
            for sut in suts:
                _check_there(sut, written)
            # The set has fewer requests than `step`: nothing was struck, and no later step would
            # be.
            if not reached:
                break
        wait_until_serving(context, writer, plan)
        if context.shares:
            suts.append(context.storage(writer.identity, options=UNGUARDED))
        for sut in suts:
            _check_there(sut, stored)

    @covers("SET-1", "FT-4", "GET-1", levels=Level.FAULTS, needs=["sharing>=process"])
    def test_sets_are_interrupted(self, context: CaseContext) -> None:
        """A KeyboardInterrupt after each step of a set, as of Ctrl-C or a time limit."""
        writer = context.storage(options=NO_LAYERS)
        reader = context.storage(writer.identity)
        steps = CallSteps(writer.storage, mock.Mock(side_effect=KeyboardInterrupt))
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


def _applied(injector: FaultInjector, error: str, step: int) -> FaultPlan:
    """Nothing where no single request can be made to fail after it took effect."""
    fault = Fault(
        kind=FaultKind.APPLIED,
        operations=MUTATING.get(injector.name, ()),
        first=step,
        count=1,
        error="" if error == "retransmitted" else error,
    )
    return FaultPlan(injector.name, (fault,) if injector.name in MUTATING else ())


def _set(context: CaseContext, writer: StorageUnderTest, pages: int) -> list[str]:
    """Set fresh pages; those that were acknowledged."""
    keys = context.keys(pages)
    return [key for key, ok in zip(keys, writer.set(keys), strict=True) if ok]


def _check_there(sut: StorageUnderTest, stored: Mapping[str, object]) -> None:
    """Read pages that were acknowledged, each under or after a fault of its own."""
    keys = list(stored)
    for start in range(0, len(keys), READ_PAGES):
        some = keys[start : start + READ_PAGES]
        for key, content in zip(some, sut.get(some), strict=True):
            check_hits(sut, [key], [content], stored[key])
            below = f"was stored (True), and a get answers False; below the driver: {stored[key]}"
            check_each([key], [content], "SET-1", below)


STALLS: Final[Mapping[str, Sequence[tuple[tuple[str, ...], int]]]] = {
    # A kernel lets one program at a time write into a file, so that a hung write may hold up the
    # other writer, too.
    "disk": ((("open",), 0), (("write",), 0)),
    "network": tuple((("request", "reply"), number) for number in range(6)),
    "objects": ((("write",), 0),),
}
"""Point at which a set is delayed, by injector: a sort of requests, and how many of them pass;
another one in each round."""
STORE_PAGES: Final = BATCH
"""What the small store holds: the pages of the writer that is held up, whose places another one
needs."""
LEASE_SECONDS: Final = {"network": 2.3}
"""How long a writer is held up so that a lease of it runs out: that of a trial store takes
two. On a disk nothing could keep it from writing in the end, so that it is held up for less;
drivers that lease places for a shorter time are found out there."""
LEASE_ROUNDS: Final = 2
BRIEF_SECONDS: Final = 0.3


class StallCases:
    """SET-1, GET-1 and EV-2 of pages that others have set while a writer was held up."""

    @covers("SET-1", "GET-1", "EV-2", levels=Level.FAULTS, needs=["clears"])
    def test_a_clear_in_the_middle_of_a_set(
        self, context: CaseContext, injector: FaultInjector
    ) -> None:
        """One storage is held up in a set; another one clears and sets."""
        met = [
            _meet(context, injector, config, plan, lambda other, _: other.clear())
            for config in _configs(context)
            for plan in _held_up(injector)
        ]
        _require_meeting(met, injector)

    @covers("SET-1", "GET-1", "EV-2", levels=Level.FAULTS)
    def test_a_writer_that_is_held_up(self, context: CaseContext, injector: FaultInjector) -> None:
        """A set is held up for longer than a lease, while another deletes and sets."""
        after = LEASE_SECONDS.get(injector.name, BRIEF_SECONDS)
        plans, config = _held_up(injector), _configs(context)[-1]
        # Leases take their time, so that only some requests are tried, other ones with another
        # seed.
        met = [
            _meet(context, injector, config, plan, partial(_delete, context), after=after)
            for plan in context.chance("where").sample(plans, min(len(plans), LEASE_ROUNDS))
        ]
        _require_meeting(met, injector)


def _configs(context: CaseContext) -> list[Mapping[str, object]]:
    """Options of a store with much room, and of a small one, where a capacity can be given.

    The small one has to give the places of a set to the next.
    """
    small = (
        [context.capped(capacity_of(STORE_PAGES))]
        if registry().get(context.driver).capacity_option
        else []
    )
    return [context.config, *small]


def _held_up(injector: FaultInjector) -> list[FaultPlan]:
    """One for each request of a set that is held up; none where no single request can be."""
    return [
        FaultPlan(
            injector.name,
            (Fault(kind=FaultKind.HANG, operations=operations, first=number, count=1),),
        )
        for operations, number in STALLS.get(injector.name, ())
    ]


def _require_meeting(met: Sequence[bool], injector: FaultInjector) -> None:
    """Make sure that a set was held up: some injectors cannot hold up a request by itself."""
    if not any(met):
        raise NotPromised(
            f"no single request of a set can be held up on the injector {injector.name}"
        )


def _meet(
    context: CaseContext,
    injector: FaultInjector,
    config: Mapping[str, object],
    plan: FaultPlan,
    remove: Callable[[StorageUnderTest, Sequence[str]], object],
    *,
    after: float = 0.0,
) -> bool:
    """Hold up a set, let another storage remove and set pages meanwhile, and look at those.

    Args:
        after: seconds that the set was held up before.

    Returns:
        Whether a set was held up.
    """
    writer = open_long_pages(context, config)
    if context.shares:
        # With a deadline, because it may be held up, too; then nothing is learnt.
        other = open_long_pages(context, config, writer.identity, options=HURRIED)
    else:
        # What two storages of one driver do to each other is nothing then.
        writer, other = context.clients(writer, 2)
    held, keys = context.keys(BATCH), context.keys(BATCH)
    injector.inject(plan)
    setting = Pending(partial(writer.set, held))
    while not injector.injected_count() and setting.seconds is None:
        time.sleep(0.001)
    if not injector.injected_count():
        # A set makes no such request.
        injector.heal()
        setting.answer()
        return False
    time.sleep(after)
    remove(other, held)
    stored, until = list[str](), time.monotonic() + HURRIED_SECONDS
    while not stored and time.monotonic() < until:
        stored = [key for key, ok in zip(keys, other.set(keys), strict=True) if ok]
    injector.heal()
    check(
        setting.comes_back(PATIENCE_SECONDS),
        "FT-4",
        f"a set that was held up ({plan}) has not come back {PATIENCE_SECONDS:.0f} s after it "
        f"could go on",
    )
    setting.answer()
    readers = [other]
    if context.shares:
        readers = [writer, open_long_pages(context, config, writer.identity)]
    for reader in readers:
        # In the small store they may have been evicted.
        _check_right(reader, stored, plan, keeps=config is context.config)
    return True


def _check_right(
    reader: StorageUnderTest, stored: Sequence[str], plan: FaultPlan, *, keeps: bool
) -> None:
    """Check pages that were acknowledged while another set was held up."""
    if stored:
        checked("EV-2")
    found = reader.get(stored) if stored else []
    check_hits(reader, stored, found, plan)
    scenario = f"was stored (True) while another set was held up ({plan})"
    if keeps:
        gone = f"{scenario}, and a get answers False when that has gone on"
        check_each(stored, found, "SET-1", gone)
    damaged = reader.stats().pages_damaged
    check(
        not damaged,
        "SET-1",
        f"a page of {len(stored)} {scenario}, and when that has gone on {damaged} of them are "
        f"damaged",
    )


def _delete(context: CaseContext, other: StorageUnderTest, keys: Sequence[str]) -> None:
    if context.capabilities.deletes:
        other.delete(keys)
