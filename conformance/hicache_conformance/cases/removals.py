"""Pages that cease to exist, in removals(): each once, not before, by whomever; and in clear().

A clear removes what its own namespaces hold, and nothing of others, or raises.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Final

from hicache_conformance.cases.pages import expect_content, store_content
from hicache_conformance.fixtures.context import NO_LAYERS, CaseContext
from hicache_conformance.fixtures.fault_calls import (
    HURRIED,
    HURRIED_SECONDS,
    PATIENCE_SECONDS,
    SLACK_SECONDS,
    UNGUARDED,
    hang_plan,
    serving_storage,
    under_fault,
    wait_until_serving,
)
from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.fixtures.small_store import BATCH, COMPONENTS, capacity_of, open_capped
from hicache_conformance.harness.concurrency import Pending, eventually, together
from hicache_conformance.harness.pools import GuardedPool, PoolShape, kv_and_state, short
from hicache_conformance.harness.storage_under_test import StorageUnderTest, check_each
from hicache_conformance.history.events import Call
from hicache_conformance.model.case import Inconclusive, Violation, check, checked, covers
from hicache_conformance.model.fault_plan import UNAVAILABLE, Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_storage.objects.removals import MAX_REMOVALS
from hicache_storage.spec import (
    PoolName,
    Removal,
    RemovalReason,
    Removals,
    StorageTimeoutError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_conformance.injectors.injector import FaultInjector


ALSO_SHARED: Final = [Level.CORE, Level.SHARED]
TELLS: Final = "removals>=process"
BETWEEN_PROCESSES: Final = ("removals>=store", "sharing>=processes")
CASE_SECONDS: Final = 600.0
"""Longer than a case takes, and than the clock of a store may differ."""
MANY: Final = 1024
"""Pages that are set and deleted at once, until more have been than a storage keeps."""
WATCHED_PAGES: Final = 24
ROUNDS: Final = 3

Page = tuple[str, str]
"""Pool and key."""


class RemovalListener:
    """A listener of the removals of one storage."""

    def __init__(self, sut: StorageUnderTest) -> None:
        self._sut = sut
        self.cursor: int | None = None
        first = self.ask()
        shown = f"the first call answered {first!r:.200}"
        check(not first.removed and not first.lost, "RM-4", shown)

    def ask(self) -> Removals:
        """Ask for what has been removed since the last call; anything may be lost."""
        ask = partial(self._sut.storage.removals, self.cursor, extra_info=self._sut.info)
        answer = self._sut.call("removals", ask)
        check(isinstance(answer, Removals), "RM-1", f"removals answered {answer!r:.200}")
        self.cursor = answer.cursor
        return answer

    def hear(self) -> list[Removal]:
        """Ask, where nothing can be lost, and check that what is told is gone; no page is set again."""
        answer = self.ask()
        check(not answer.lost, "RM-4", f"nothing can be missing, and lost is True: {answer!r:.200}")
        for pool in {str(one.pool) for one in answer.removed}:
            check(pool in self._sut.memories, "RM-3", f"pool {pool!r} is not registered")
            keys = [one.key for one in answer.removed if one.pool == pool]
            for key, there in zip(keys, self._sut.present(keys, pool), strict=True):
                check(not there, "RM-3", f"page key {short(key)} is reported, and exists")
        return answer.removed

    def expect(
        self, gone: Collection[Page], reason: RemovalReason, *, damaged: bool = False
    ) -> None:
        """Hear of pages that are gone and of no others, and then of nothing.

        Args:
            gone: each has to be told.
            reason: of all of them.
            damaged: they may be told once more, when what remains of them goes.
        """
        told = self.hear()
        judge(told if not damaged else list({one.key: one for one in told}.values()), gone, reason)
        again = self.hear()
        check(damaged or not again, "RM-2", f"the next call tells again of {again!r:.200}")


def judge(told: Sequence[Removal], gone: Collection[Page], reason: RemovalReason) -> None:
    """Check that these pages were told, once each, and no others.

    Raises:
        Violation: RM-1, RM-2, RM-3 or RM-5.
    """
    count = Counter((str(one.pool), one.key) for one in told)
    for page in gone:
        check(count[page], "RM-1", f"page {page} is gone ({reason}), and is not reported")
    for page, times in count.items():
        check(page in gone, "RM-3", f"page {page} is reported, and did not go")
        check(times == 1, "RM-2", f"page {page} went once, and is reported {times} times")
    for one in told:
        right = one.reason in (reason, RemovalReason.UNKNOWN)
        check(right, "RM-5", f"page key {short(one.key)} went as {reason}, not {one.reason}")
        age = time.time() - one.seconds
        dated = not one.seconds or abs(age) < CASE_SECONDS
        check(
            dated, "RM-5", f"page key {short(one.key)} went {age:.0f} s ago, before its case began"
        )


class RemovalCases:
    """RM-1 to RM-5."""

    @covers("RM-1", "RM-2", "RM-3", "RM-4", "RM-5", needs=[TELLS, "deletes"])
    def test_deleted_pages(self, context: CaseContext) -> None:
        """Two listeners hear of some pages of two pools, deleted and set again for three rounds.

        One listens after each round, the other after the last. Pages of the same batches stay.
        """
        sut, keys = context.storage(pools=kv_and_state()), context.keys(8)
        for pool in sut.memories:
            sut.store(keys, pool)
        often, seldom = RemovalListener(sut), RemovalListener(sut)
        every, gone = set[Page](), set[Page]()
        for _ in range(ROUNDS):
            some = [*keys[:2], *context.random.sample(keys[2:], 2)]
            gone = {(pool, key) for pool in sut.memories for key in some}
            every |= gone
            for pool in sut.memories:
                sut.store(keys, pool)
                sut.delete(some, pool)
            often.expect(gone, RemovalReason.DELETED)
        # A page that has been set again exists, and need not be told.
        answer = seldom.ask()
        told = {(str(one.pool), one.key) for one in answer.removed}
        check(not answer.lost, "RM-4", "nothing can be missing, and lost is True")
        check(gone <= told, "RM-1", f"a late listener does not hear of {sorted(gone - told)}")
        check(told <= every, "RM-3", f"a late listener hears of {sorted(told - every)}")
        seldom.expect((), RemovalReason.DELETED)

    @covers("RM-1", "RM-3", "RM-5", needs=[TELLS, "clears"])
    def test_cleared_pages(self, context: CaseContext) -> None:
        """A clear is told page by page, and to no listener of another identity."""
        sut, keys = context.storage(pools=kv_and_state()), context.keys(6)
        other = context.storage()
        other.store(keys)
        for pool in sut.memories:
            sut.store(keys, pool)
        own, others = RemovalListener(sut), RemovalListener(other)
        sut.clear()
        own.expect({(pool, key) for pool in sut.memories for key in keys}, RemovalReason.CLEARED)
        others.expect((), RemovalReason.CLEARED)

    @covers("RM-1", "RM-2", "RM-3", "RM-4", "RM-5", levels=Level.FAULTS, needs=[TELLS, "evicts"])
    def test_evicted_pages(self, context: CaseContext) -> None:
        """A full store goes on evicting: at the end a page is gone exactly if it was told."""
        sut = open_capped(context, context.capped(capacity_of(WATCHED_PAGES)))
        listener, stored, told = RemovalListener(sut), list[str](), list[Removal]()
        for _ in range(2 * context.profile.store_fills * WATCHED_PAGES // BATCH):
            keys = context.keys(BATCH)
            stored += compress(keys, sut.set(keys))
            told += listener.hear()
        judge(told + listener.hear(), _absent(sut, stored), RemovalReason.EVICTED)

    @covers("RM-1", "RM-5", needs=[TELLS], corrupts=True)
    def test_damaged_pages(self, context: CaseContext) -> None:
        """A page that a get finds damaged is told; its neighbours are not, nor its repair."""
        sut, keys = context.stored(5)
        context.require_checksums(sut)
        context.corrupt_page(sut, keys[2])
        listener = RemovalListener(sut)
        found = sut.get(keys)
        if found[2] is not None:
            raise Inconclusive("the damaged page is delivered, which is for other cases")
        listener.expect({(str(PoolName.KV), keys[2])}, RemovalReason.DAMAGED, damaged=True)
        sut.store(keys)
        # Its remains may go now; they are no page.
        told = {one.key for one in listener.ask().removed}
        check(told <= {keys[2]}, "RM-3", f"a repair of page 2 of {keys} tells of {told}")

    @covers("RM-4", needs=[TELLS])
    def test_cursors_of_nobody(self, context: CaseContext) -> None:
        """A cursor that the storage has not given out is answered with lost, and with one that works."""
        sut, _ = context.stored(2)
        listener = RemovalListener(sut)
        for strange in (0, -1, 1 << 60):
            listener.cursor = strange
            lost = listener.ask().lost
            check(lost, "RM-4", f"cursor {strange} was never given out, and lost is False")
            listener.expect((), RemovalReason.DELETED)

    @covers("RM-4", levels=Level.FAULTS, needs=[TELLS, "deletes"])
    def test_a_listener_that_is_far_behind(self, context: CaseContext) -> None:
        """More pages are removed between two calls than a storage keeps: all are told, or lost."""
        sut = context.storage(pools={PoolName.KV: GuardedPool(pages=MANY, components=(16,))})
        listener, every, gone = RemovalListener(sut), set[str](), set[str]()
        while len(gone) <= MAX_REMOVALS:
            if len(every) > 2 * MAX_REMOVALS:
                raise Inconclusive(f"of {len(every)} pages, {len(gone)} were stored and deleted")
            every.update(keys := context.keys(MANY))
            # A busy machine may be too slow for a lease.
            stored = list(compress(keys, sut.set(keys)))
            gone.update(compress(stored, sut.delete(stored)))
        answer = listener.ask()
        told = {one.key for one in answer.removed}
        check(told <= every, "RM-3", f"{len(told - every)} pages are told that were never stored")
        check(
            answer.lost or told >= gone,
            "RM-4",
            f"{len(gone)} pages were removed, {len(told)} are told, and lost is False",
        )
        listener.expect((), RemovalReason.DELETED)

    @covers("RM-3", "RM-1", needs=[TELLS, "deletes"])
    def test_removals_while_pages_go(self, context: CaseContext) -> None:
        """A thread listens while others set and delete: what it is told is gone at that moment."""
        sut = context.storage()
        *writers, asker = context.clients(sut, 3)
        listener, told, working = RemovalListener(asker), list[Removal](), [True] * len(writers)
        calls = context.profile.thread_calls // 4
        batches = [[context.keys(4) for _ in range(calls)] for _ in writers]

        def write(number: int) -> None:
            try:
                for keys in batches[number]:
                    writers[number].store(keys)
                    writers[number].delete(keys[:3])
            finally:
                working[number] = False

        def listen() -> None:
            while any(working):
                told.extend(listener.hear())

        together("RM-3", [listen, *(partial(write, number) for number in range(len(writers)))])
        keys = [key for some in batches for keys in some for key in keys]
        judge(told + listener.hear(), _absent(asker, keys), RemovalReason.DELETED)

    @covers("RM-4", levels=Level.FAULTS, needs=[TELLS, "deletes"])
    def test_removals_while_the_store_is_away(
        self, context: CaseContext, injector: FaultInjector
    ) -> None:
        """Calls meanwhile raise nothing, and the next one after it tells everything, or lost."""
        plan = FaultPlan(injector.name, UNAVAILABLE[injector.name])
        sut, keys = serving_storage(context, injector)
        listener, answers = RemovalListener(sut), list[Removals]()
        gone = set(compress(keys[:5], sut.delete(keys[:5])))
        with under_fault(injector, plan, sut):
            for _ in range(2):
                answers.append(listener.ask())
        wait_until_serving(context, sut, plan)
        answers.append(listener.ask())
        told = {one.key for answer in answers for one in answer.removed}
        lost = any(answer.lost for answer in answers)
        missing = sorted(gone - told)
        check(lost or not missing, "RM-4", f"after {plan}, {missing} are not told, nor lost")

    @covers("RM-1", "RM-3", needs=[TELLS, "sharing>=process", "deletes"])
    def test_what_another_storage_removes(self, context: CaseContext) -> None:
        """Another storage of the process deletes pages of both, and some that it has set itself."""
        one, keys = context.stored(6)
        two, more = context.storage(one.identity), context.keys(3)
        two.store(more)
        one.expect(more)
        listener, others = RemovalListener(one), RemovalListener(two)
        two.delete([*keys[:3], *more])
        for each in (listener, others):
            each.expect(_absent(one, [*keys, *more]), RemovalReason.DELETED)

    @covers("RM-1", "RM-3", levels=ALSO_SHARED, needs=(*BETWEEN_PROCESSES, "deletes"))
    def test_what_another_process_removes(self, context: CaseContext) -> None:
        """Another process deletes pages that each of the two has set, and clears the rest."""
        group = ProcessGroup(context)
        sut, worker = context.storage(group.identity), group.worker("worker")
        keys, theirs = group.new_keys(5), group.new_keys(5)
        sut.store(keys)
        group.store(worker, theirs, "SET-1")
        listener = RemovalListener(sut)
        worker.delete([*keys[1:3], *theirs[:2]])
        listener.expect(_absent(sut, [*keys, *theirs]), RemovalReason.DELETED)
        if context.capabilities.clears:
            worker.clear()
            left = {(str(PoolName.KV), key) for key in (keys[0], *keys[3:], *theirs[2:])}
            listener.expect(left, RemovalReason.CLEARED)

    @covers("RM-1", "RM-2", "RM-3", levels=Level.FAULTS, needs=(*BETWEEN_PROCESSES, "evicts"))
    def test_what_another_process_evicts(self, context: CaseContext) -> None:
        """Two processes fill a store in turn."""
        shape = PoolShape(pages=WATCHED_PAGES, components=COMPONENTS)
        config = context.capped(capacity_of(WATCHED_PAGES))
        group = ProcessGroup(context, {PoolName.KV: shape}, config)
        sut, worker = open_capped(context, config, group.identity), group.worker("worker")
        listener, stored, told = RemovalListener(sut), list[str](), list[Removal]()
        for turn in range(4 * WATCHED_PAGES // BATCH):
            keys = group.new_keys(BATCH)
            stored += compress(keys, sut.set(keys) if turn % 3 else worker.set(keys, group.value()))
            # So that this storage has found each page.
            sut.present(keys)
            told += listener.hear()
        judge(told + listener.hear(), _absent(sut, stored), RemovalReason.EVICTED)

    @covers("RM-1", "RM-3", levels=ALSO_SHARED, needs=(*BETWEEN_PROCESSES, "deletes"))
    def test_what_a_killed_process_deletes(self, context: CaseContext) -> None:
        """A process is killed at some step of a delete: what is gone is told, and nothing else."""
        group, steps = ProcessGroup(context), 0
        sut = context.storage(group.identity)
        for kill in range(context.profile.kills // 2 + 1):
            worker, keys = group.worker(f"worker{kill}", options=NO_LAYERS), group.new_keys(6)
            sut.store(keys)
            listener = RemovalListener(sut)
            # The first one, which lives, tells the number of steps.
            at = kill and 1 + context.random.randrange(steps)
            steps = worker.call_killed(Call.DELETE, keys[:4], 0, at) or steps
            if not steps:
                raise Inconclusive("a delete of this driver calls nothing outside of Python")
            # A server may carry out its request meanwhile.
            told, gone = listener.hear(), set[Page]()
            while gone != (gone := _absent(sut, keys)):
                told += listener.hear()
            # A worker may have ended what the one before it had begun, and that is told, too.
            judge([one for one in told if one.key in keys], gone, RemovalReason.DELETED)


def _absent(sut: StorageUnderTest, keys: Sequence[str]) -> set[Page]:
    there = sut.present(keys)
    return {(str(PoolName.KV), key) for key, ok in zip(keys, there, strict=True) if not ok}


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
