"""clear(): removes what its own namespaces hold, and nothing of others, or raises."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hicache_conformance.cases.pages import expect_content, store_content
from hicache_conformance.fixtures.fault_calls import (
    HURRIED,
    HURRIED_SECONDS,
    PATIENCE_SECONDS,
    SLACK_SECONDS,
    UNGUARDED,
    hang_plan,
    serving_storage,
    wait_until_serving,
)
from hicache_conformance.harness.concurrency import Pending, eventually
from hicache_conformance.harness.pools import kv_and_state
from hicache_conformance.harness.storage_under_test import StorageUnderTest, check_each
from hicache_conformance.model.case import Violation, check, checked, covers
from hicache_conformance.model.fault_plan import UNAVAILABLE, Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_storage.spec import PoolName, StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.injectors.injector import FaultInjector

LATE_SECONDS: Final = 0.1
"""How long late effects of a clear are waited for."""


class ClearingCases:
    """LC-4."""

    @covers("LC-4", levels=Level.IDENTITY, needs=["clears"])
    def test_clear_removes_its_own(self, context: CaseContext) -> None:
        """Cleared pages of every pool are gone, those that were read, too; sets stay."""
        sut, keys = context.storage(pools=kv_and_state()), context.keys(6)
        for _ in range(2):
            sut.call("clear", sut.storage.clear)
        for number in range(2):
            for pool in sut.memories:
                # Other bytes under the same keys: a clear that hides pages and keeps them would
                # deliver the old ones.
                sut.store(keys, pool, generation=number)
                if number and context.interface_profile.setup.clears_at_once:
                    for key in keys:
                        sut.has(key, pool)
                    sut.expect(keys, pool, generation=number)
            sut.call("clear", sut.storage.clear)
            for pool in sut.memories:
                why = f"was cleared by clear {number} of 2"
                sut.expect_missing(keys, pool, rule="LC-4", why=why)
        for pool in sut.memories:
            sut.store(keys, pool, generation=2)
        time.sleep(LATE_SECONDS)
        for pool in sut.memories:
            gone = f"of pool {pool!r} was set after a clear had returned, and is gone"
            check_each(keys, sut.get(keys, pool), "LC-4", gone)
            sut.expect(keys, pool, generation=2)

    @covers("LC-4", levels=Level.IDENTITY, needs=["clears", "sharing>=process"])
    def test_clear_reaches_other_storages(self, context: CaseContext) -> None:
        """Pages that another storage of equal identity has read are gone for it too."""
        one, keys = context.storage(pools=kv_and_state()), context.keys(4)
        two = context.storage(replace(one.identity), pools=kv_and_state())
        for pool in one.memories:
            one.store(keys, pool)
            if context.interface_profile.setup.clears_at_once:
                two.expect(keys, pool)
                for key in keys:
                    two.has(key, pool)
        one.call("clear", one.storage.clear)
        for pool in two.memories:
            two.expect_missing(keys, pool, rule="LC-4", why="was cleared by another storage")

    @covers("LC-4", levels=Level.IDENTITY, needs=["clears", "durability>=reopen"])
    def test_cleared_pages_stay_gone(self, context: CaseContext) -> None:
        """A storage that is opened when all others are closed finds no page that was cleared."""
        one, keys = context.stored(4)
        one.call("clear", one.storage.clear)
        one.call("close", one.storage.close)
        two = context.storage(replace(one.identity))
        two.expect_missing(keys, rule="LC-4", why="was cleared before the store was reopened")

    @covers("LC-4", levels=Level.IDENTITY, needs=["clears"])
    def test_clear_leaves_others_alone(self, context: CaseContext) -> None:
        """Other models, tenants, ranks and salts keep their pages, equal ones, too."""
        own = context.storage(context.identity(tp_size=2), pools=kv_and_state())
        keys, equal, words = context.keys(4), context.keys(1)[0], "a page of equal bytes"
        content = context.random.randbytes(own.memories[PoolName.KV].page_bytes)
        changes: list[dict[str, object]] = [
            {"model": "conformance/model2"},
            # A prefix of the cleared model's name. A driver that clears by the beginning of a name
            # takes this one along, or is cleared by it.
            {"model": "conformance"},
            {"tenant": "other"},
            {"tp_rank": 1},
            {"salt": "other"},
            {"kv_dtype": "float16"},
            {"revision": "2"},
        ]
        changes = [change for change in changes if context.interface_profile.distinguishes(change)]
        others = [
            context.storage(
                replace(own.identity, **change),  # type: ignore[arg-type]
                pools=kv_and_state(),
            )
            for change in changes
        ]
        for sut in (own, *others):
            for pool in sut.memories:
                sut.store(keys, pool)
            store_content(sut, equal, content, words)
        own.call("clear", own.storage.clear)
        for change, other in zip(changes, others, strict=True):
            for pool in other.memories:
                taken = f"of pool {pool!r} belongs to {change}; another's clear removed it"
                check_each(keys, other.get(keys, pool), "LC-4", taken)
            expect_content(other, equal, content, words, rule="LC-4")
        bare = context.storage(replace(own.identity, model="conformance/model3"), pools={})
        bare.call("clear", bare.storage.clear)
        taken = "was removed by another's clear, which has no pools and is of another model"
        check_each(keys, others[0].get(keys), "LC-4", taken)

    @covers("LC-4", levels=Level.IDENTITY, needs=["clears"])
    def test_clear_leaves_strangers_files_alone(self, context: CaseContext) -> None:
        """Files that somebody else put beside the store's own are still there."""
        sut, _ = context.stored(2)
        # The directory given to the driver, and those that its options name in there.
        named = [
            context.tmp / value
            for value in context.config.values()
            if isinstance(value, str) and value.startswith(str(context.tmp))
        ]
        homes = [home for home in dict.fromkeys([context.tmp, *named]) if home.is_dir()]
        strangers = [home / "a file of somebody else" for home in homes]
        for path in strangers:
            path.write_bytes(b"not a page")
        sut.call("clear", sut.storage.clear)
        for path in strangers:
            check(
                path.exists(),
                "LC-4",
                f"clear removed {path.name}, which no driver has written, from {path.parent.name}/",
            )
            # The sandbox is shared by all cases of the class, and the file would be in the way of
            # others.
            path.unlink()


class FailedClearCases:
    """LC-7."""

    @covers("LC-7", "FT-4", levels=Level.FAULTS, needs=["clears"])
    def test_a_clear_that_is_refused(self, context: CaseContext, injector: FaultInjector) -> None:
        """A clear while nothing works, and another one afterwards."""
        sut, keys = serving_storage(context, injector, pages=4)
        plan = FaultPlan(injector.name, UNAVAILABLE[injector.name])
        _clear_under(context, injector, sut, keys, plan)

    @covers("LC-7", "FT-3", "FT-4", levels=Level.FAULTS, needs=["clears"])
    def test_a_clear_that_hangs(self, context: CaseContext, injector: FaultInjector) -> None:
        """A clear while the store hangs, and another one afterwards."""
        sut, keys = serving_storage(context, injector, pages=4, options=HURRIED)
        _clear_under(context, injector, sut, keys, _lost(injector, sut), hangs=True)


def _clear_under(
    context: CaseContext,
    injector: FaultInjector,
    sut: StorageUnderTest,
    keys: list[str],
    plan: FaultPlan,
    *,
    hangs: bool = False,
) -> None:
    """Clear under a fault, and again afterwards."""
    within = HURRIED_SECONDS + SLACK_SECONDS if hangs else PATIENCE_SECONDS
    injector.inject(plan)
    clearing = Pending(sut.storage.clear)
    checked("FT-3")
    if not clearing.ended(within):
        injector.heal()
        clearing.comes_back(context.profile.recovery_seconds)
        raise Violation("FT-3", f"clear has not ended {within:.1f} s after it began; {plan}")
    returned = _returned(clearing, plan, hangs=hangs)
    injector.heal()
    wait_until_serving(context, sut, plan)
    if returned:
        _check_cleared(context, sut, keys, f"was cleared by a clear() that returned ({plan})")
    allowed, raised = context.profile.recovery_seconds, [""]

    def clears() -> bool:
        raised[0] = sut.clear()
        return not raised[0]

    # Done again in any case. A clear that raised may be repeated by its caller, and it has to
    # succeed once the store serves.
    again = eventually(clears, allowed)
    late = f"{allowed:.0f} s after the fault was gone ({plan})"
    check(again, "FT-4", f"{late}, clear still raises {raised[0]}")
    _check_cleared(context, sut, keys, "was cleared, when the store served again")


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


def _returned(clearing: Pending[None], plan: FaultPlan, *, hangs: bool) -> bool:
    """Return whether a clear under a fault returned; one that ends at the deadline has to say so."""
    checked("LC-7")
    try:
        clearing.answer()
    except Exception as error:
        # At its deadline it may still happen, which only the error of a timeout says.
        late = hangs and (clearing.seconds or 0.0) >= HURRIED_SECONDS
        wanted = StorageTimeoutError if late else StorageUnavailableError
        if not isinstance(error, wanted):
            told = f"clear raised {type(error).__name__}, which is no {wanted.__name__}"
            raise Violation("LC-7", f"{told} ({plan}): {error}") from error
        return False
    return True


def _check_cleared(context: CaseContext, sut: StorageUnderTest, keys: list[str], why: str) -> None:
    # LC-7 speaks of any storage: one that cleared may miss by its own index only, one that opens now
    # shows what is in the store.
    for reader in (sut, context.storage(sut.identity, options=UNGUARDED)):
        reader.expect_missing(keys, rule="LC-7", why=why)
