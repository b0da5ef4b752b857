"""Writers delayed in the middle of a set, while others clear, delete and set."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.fault_calls import PATIENCE_SECONDS, check_hits
from hicache_conformance.fixtures.small_store import (
    BATCH,
    capacity_of,
    open_long_pages,
    shares_in_process,
)
from hicache_conformance.harness.concurrency import Pending
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.model.case import covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import NotPromised, check, checked
from hicache_storage.layers import StorageOptions
from hicache_storage.plugins import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_conformance.injectors.injector import FaultInjector

FAULTS: Final = (Level.FAULTS,)
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
CLEARING_SECONDS: Final = 0.6
"""How long a set is held up at most in the middle of which another storage clears; shorter than the
lease of a trial store."""
LEASE_SECONDS: Final = {"network": 1.3}
"""How long a writer is held up so that a lease of it runs out: that of a trial store takes a
second. On a disk nothing could keep it from writing in the end, so that it is held up for less;
drivers that lease places for a shorter time are found out there."""
LEASE_ROUNDS: Final = 2
BRIEF_SECONDS: Final = 0.3
HURRIED: Final = StorageOptions(deadline_seconds=CLEARING_SECONDS, breaker_threshold=0)


class StallCases:
    """SET-1, GET-1 and EV-2 of pages that others have set while a writer was held up."""

    @covers("SET-1", "GET-1", "EV-2", levels=FAULTS, needs=["clears"])
    def test_a_clear_in_the_middle_of_a_set(
        self, context: CaseContext, injector: FaultInjector
    ) -> None:
        """One storage is held up in a set, another one clears and sets.

        The late writer spoils no page of the other one.
        """
        met = [
            _meet(context, injector, config, plan, lambda other, _: other.clear())
            for config in _configs(context)
            for plan in _plans(injector)
        ]
        _require_meeting(met, injector)

    @covers("SET-1", "GET-1", "EV-2", levels=FAULTS)
    def test_a_writer_that_is_held_up(self, context: CaseContext, injector: FaultInjector) -> None:
        """A storage is held up in a set for longer than a lease, while another deletes and sets.

        The other one's pages stay right.
        """
        after = LEASE_SECONDS.get(injector.name, BRIEF_SECONDS)
        plans, config = _plans(injector), _configs(context)[-1]
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


def _plans(injector: FaultInjector) -> list[FaultPlan]:
    """One for each request of a set that is held up; none where no single request can be."""
    return [
        FaultPlan(
            injector.name,
            (Fault(kind=FaultKind.HANG, operations=operations, first=number, count=1),),
        )
        for operations, number in STALLS.get(injector.name, ())
    ]


def _require_meeting(met: Sequence[bool], injector: FaultInjector) -> None:
    """Make sure that a set was held up.

    Raises:
        NotPromised: no set makes a request that the injector can hold up by itself.
    """
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
        context: the case's.
        injector: where the set is held up.
        config: of both storages.
        plan: what holds it up.
        remove: done by the other storage first.
        after: seconds that the set was held up before.

    Returns:
        Whether a set was held up.
    """
    writer = open_long_pages(context, config)
    if shares_in_process(context):
        # In a set_deadline, because it may be held up, too; then nothing is learnt.
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
    stored, until = list[str](), time.monotonic() + CLEARING_SECONDS
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
    strict = config is context.config
    for reader in (
        (writer, open_long_pages(context, config, writer.identity))
        if shares_in_process(context)
        else (other,)
    ):
        _check_right(reader, stored, plan, keeps=strict)
    return True


def _check_right(
    reader: StorageUnderTest, stored: Sequence[str], plan: FaultPlan, *, keeps: bool
) -> None:
    """Pages that were acknowledged while another set was held up are right.

    Args:
        reader: a storage of the same identity.
        stored: their keys.
        plan: what held the other set up.
        keeps: whether they have to be there; else they may have been evicted.

    Raises:
        Violation: GET-1 for a wrong page, SET-1 for one that is damaged or gone.
    """
    if stored:
        checked("EV-2")
    found = reader.get(stored) if stored else []
    check_hits(reader, stored, found, plan)
    scenario = f"was stored (True) while another set was held up ({plan})"
    for key, content in zip(stored, found, strict=True):
        check(
            not keeps or content is not None,
            "SET-1",
            f"page key {short(key)} {scenario}, and a get answers False when that has gone on",
        )
    damaged = reader.stats().pages_damaged
    check(
        not damaged,
        "SET-1",
        f"a page of {len(stored)} {scenario}, and when that has gone on {damaged} of them are "
        f"damaged",
    )


def _delete(context: CaseContext, other: StorageUnderTest, keys: Sequence[str]) -> None:
    if context.capabilities.deletes:
        other.call("delete", lambda: other.storage.delete(list(keys)))
