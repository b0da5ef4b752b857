"""Faults below a driver: misses that are counted and logged once, and recovery afterwards.

Stores that are a directory are deleted, too, or files of others are put into it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import shutil
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final
from unittest import mock

import pytest

from hicache_conformance.fixtures.context import NO_LAYERS, CaseContext
from hicache_conformance.fixtures.fault_calls import (
    UNGUARDED,
    call_bounded,
    check_hits,
    check_kept,
    count_faults,
    deadline_on,
    serving_storage,
    set_deadline,
    under_fault,
    wait_until_serving,
)
from hicache_conformance.fixtures.small_store import BATCH, capacity_of, open_long_pages
from hicache_conformance.fixtures.target import DIRECTORY
from hicache_conformance.harness.concurrency import CALL_THREAD, eventually, together
from hicache_conformance.harness.driver_calls import has_steps
from hicache_conformance.harness.process_state import OpenResources, records_above_debug
from hicache_conformance.harness.storage_under_test import check_each
from hicache_conformance.injectors.disk import DiskInjector
from hicache_conformance.injectors.driver_methods import DriverMethodInjector
from hicache_conformance.injectors.injector import failure
from hicache_conformance.model.case import check, covers
from hicache_conformance.model.fault_plan import (
    NAMED_FAULTS,
    REFUSALS,
    UNAVAILABLE,
    Fault,
    FaultKind,
    FaultPlan,
)
from hicache_conformance.model.rules import Level
from hicache_storage.layers import StorageOptions
from hicache_storage.plugins import registry
from hicache_storage.spec import HiCacheError, is_refusal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from pathlib import Path

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_conformance.injectors.injector import FaultInjector
    from hicache_storage.spec import StorageIdentity


ROUNDS: Final = 3
LINES: Final = 5
"""Most lines of one episode: lookups, reads and writes may each have one, and so may the connection
and the breaker."""

RETRYING_SECONDS: Final = 2.0
"""Deadline of calls that a client may try a few times. One that ends sooner is counted by the
deadline layer, whatever the driver does with the errors of its store."""
IMPATIENT: Final = StorageOptions(breaker_threshold=3, breaker_cooldown_seconds=0.1)
BESIDE: Final = 8
_WRITES: Final = ("write", "request")
_FAILING_ONCE: Final = {
    "disk": (Fault(kind=FaultKind.ERROR, error="EIO", operations=("write",), count=1),),
    "objects": (Fault(kind=FaultKind.ERROR, error="EIO", operations=("write",), count=1),),
    "network": (Fault(kind=FaultKind.CUT, operations=("request",), count=1),),
}


class FaultCases:
    """FT-1, FT-4, FT-6, and SET-6 where one page of a batch fails."""

    @covers("FT-1", "FT-6", "FT-4", "GET-1", "SET-1", "SET-3", levels=Level.FAULTS)
    def test_a_trouble_is_a_miss(
        self, context: CaseContext, injector: FaultInjector, named_fault: str
    ) -> None:
        """Calls under each kind of fault, their counters and log lines, and afterwards."""
        plan = FaultPlan(injector.name, NAMED_FAULTS[injector.name][named_fault])
        outage = plan.faults == UNAVAILABLE[injector.name]
        sut, keys = serving_storage(context, injector)
        # Opening and the first stores may have counted something; only what the fault adds is
        # judged.
        before = count_faults(sut)
        with records_above_debug() as records, under_fault(injector, plan, sut):
            if outage:
                set_deadline(sut, RETRYING_SECONDS)
                _ask_once(sut, keys, plan)
                set_deadline(sut, deadline_on(injector))
            stored, missed, calls = _use(context, sut, keys, plan)
        if injector.injected_count() and not _silent(plan):
            _check_counted(sut, "calls were", before, plan, missed=missed)
        check(
            not (outage and missed and not records),
            "FT-1",
            f"{calls} calls were answered with misses because of {plan}, and nothing was "
            f"logged{_swallowed(sut)}",
        )
        # A fault that destroys pages is one episode for each damaged page, and each may have its
        # line (GET-7).
        most = calls if plan.destroys else LINES
        lines = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
        check(
            len(lines) <= most,
            "FT-1",
            f"one episode ({plan}) was logged in {len(lines)} lines, of which {most} are enough; "
            f"first {''.join(lines[:1])!r:.200}",
        )
        wait_until_serving(context, sut, plan)
        check_kept(context, sut, [*keys, *stored], plan)

    @covers("FT-1", "FT-4", "LC-1", levels=Level.FAULTS)
    def test_a_store_that_is_away(self, context: CaseContext, injector: FaultInjector) -> None:
        """Opened while nothing works, the storage serves when the store comes."""
        plan = FaultPlan(injector.name, UNAVAILABLE[injector.name])
        # Served once without faults, by another storage: otherwise a driver that never works here
        # would pass, since misses are legal.
        serving_storage(context, injector, pages=1)
        sut, keys = context.unopened(options=UNGUARDED), context.keys(3)
        with under_fault(injector, plan, sut):
            with contextlib.suppress(HiCacheError):
                call_bounded(injector, plan, "open", sut.storage.open)
            _use(context, sut, keys, plan)
        wait_until_serving(context, sut, plan)

    @covers("FT-4", levels=Level.FAULTS)
    def test_the_same_storage_recovers(self, context: CaseContext, injector: FaultInjector) -> None:
        """Several outages in a row, behind a circuit breaker."""
        plan = FaultPlan(injector.name, UNAVAILABLE[injector.name])
        sut, keys = serving_storage(context, injector, options=IMPATIENT)
        # Twice: a breaker that has been half open and closed again must trip and recover as it did
        # the first time.
        for _ in range(2):
            with under_fault(injector, plan, sut):
                _use(context, sut, keys, plan)
            wait_until_serving(context, sut, plan)
            state = sut.call("get_stats", sut.storage.get_stats).breaker_state
            check(
                state == "closed",
                "FT-4",
                f"the store answers again after {plan}, and the circuit breaker is {state}",
            )
        check_kept(context, sut, keys, plan)

    @covers("FT-6", "FT-4", levels=Level.FAULTS)
    @pytest.mark.parametrize("scarce", ["descriptors", "threads"])
    def test_the_process_is_at_its_limit(self, context: CaseContext, scarce: str) -> None:
        """Calls and new storages while the process may open or start nothing more."""
        sut, keys = context.stored(6, options=UNGUARDED)
        here, (limit, error) = DriverMethodInjector(), _LIMITS[scarce]
        fault = Fault(kind=FaultKind.ERROR, error=error, operations=(scarce,))
        plan = FaultPlan("process", (fault,))
        # Used once before descriptors run out, so that what a driver opens on first use is open
        # already.
        _use(context, sut, keys, plan)
        with under_fault(here, plan, sut), limit():
            stored, _, _ = _use(context, sut, keys, plan)
        before = OpenResources.now()
        with limit():
            for _ in range(ROUNDS):
                late = context.unopened(sut.identity, options=NO_LAYERS)
                late.bound = partial(call_bounded, here, plan)
                with contextlib.suppress(HiCacheError):
                    call_bounded(here, plan, "open", late.storage.open)
                _use(context, late, keys, plan, rounds=1)
                call_bounded(here, plan, "close", late.storage.close)
        left = OpenResources.now().beyond(before)
        check(not left, "FT-6", f"storages that were opened and closed ({plan}) left {left}")
        wait_until_serving(context, sut, plan)
        check_kept(context, sut, [*keys, *stored], plan)

    @covers("FT-7", "FT-4", levels=Level.FAULTS, needs=["the injector disk or objects"])
    def test_a_store_that_takes_nothing(
        self, context: CaseContext, injector: FaultInjector
    ) -> None:
        """Sets fail for want of room or permission: pages are found, health() tells."""
        sut, keys = serving_storage(context, injector, options=IMPATIENT)
        for fault in REFUSALS[injector.name]:
            plan, refused = FaultPlan(injector.name, (fault,)), 0
            injector.inject(plan)
            readers = [sut]
            if context.shares:
                readers.append(context.storage(sut.identity, options=IMPATIENT))
            for _ in range(2 * IMPATIENT.breaker_threshold):
                refused += not any(sut.set(context.keys(2)))
                for reader in readers:
                    check_hits(reader, keys, found := reader.get(keys), plan)
                    hit = min(len(keys) - found.count(None), reader.exists(keys).kv_hit_pages)
                    check(
                        hit >= len(keys),
                        "FT-7",
                        f"{hit} of {len(keys)} stored pages are found after {refused} sets "
                        f"were refused ({plan})",
                    )
            health = sut.call("health", sut.storage.health)
            check(
                not refused
                or not is_refusal(failure(fault.error))
                or (not health.writable and health.ok),
                "FT-7",
                f"{refused} sets were refused ({plan}), and {health}",
            )
            injector.heal()
            wait_until_serving(context, sut, plan)
            check(
                (health := sut.call("health", sut.storage.health)).writable,
                "FT-7",
                f"a set was done after {plan}, and {health}",
            )

    @covers("FT-6", "SET-5", levels=Level.FAULTS)
    def test_failing_sets_leave_nothing(
        self, context: CaseContext, injector: FaultInjector
    ) -> None:
        """Sets that fail for want of room leave no files or descriptors, and can be repeated."""
        failing = {
            "disk": "full-halfway",
            "objects": "failing-writes",
            "network": "cut-requests",
            "services": "killed",
        }
        plan = FaultPlan(injector.name, NAMED_FAULTS[injector.name][failing[injector.name]])
        sut, _ = serving_storage(context, injector)
        seen, refused = list[tuple[int, int]](), list[str]()
        with under_fault(injector, plan, sut):
            for _ in range(4):
                for _ in range(3):
                    keys = context.keys(4)
                    refused += [key for key, ok in zip(keys, sut.set(keys), strict=True) if not ok]
                seen.append((len(OpenResources.now().descriptors), _files(injector)))
        # The first rounds may fill tables that are kept.
        for what, first, last in zip(("descriptors", "files"), seen[1], seen[3], strict=True):
            check(
                last <= first + 2,
                "FT-6",
                f"6 sets that failed ({plan}) left {last - first} {what} behind",
            )
        wait_until_serving(context, sut, plan)
        again = f"was refused ({plan}), and a set of it when there is room again answers False"
        check_each(refused, sut.set(refused), "SET-5", again)
        sut.expect(refused, rule="SET-5")

    @covers("SET-6", "GET-3", "FT-6", levels=Level.FAULTS)
    def test_one_page_fails(self, context: CaseContext, injector: FaultInjector) -> None:
        """One page of a batch cannot be moved: the others are stored and delivered."""
        sut, keys = serving_storage(context, injector)
        # Drawn, because answers that shift behind a failed page show only where pages follow it.
        number = context.chance("which page").randrange(len(keys))
        plan = FaultPlan(injector.name, _one_of(injector, "write", number, len(keys)))
        new = context.keys(len(keys))
        injector.inject(plan)
        answers = sut.set(new)
        injector.heal()
        stored = [key for key, ok in zip(new, answers, strict=True) if ok]
        check(
            injector.name != "objects" or len(stored) == len(new) - 1,
            "SET-6",
            f"one page of {len(new)} could not be written, and the set answered {answers}",
        )
        check_kept(context, sut, stored, plan)
        plan = FaultPlan(injector.name, _one_of(injector, "read", number, len(keys)))
        injector.inject(plan)
        found = sut.get(keys)
        injector.heal()
        check_hits(sut, keys, found, plan)
        check(
            injector.name != "objects" or found.count(None) == 1,
            "GET-3",
            f"one page of {len(keys)} could not be read, and the get delivered "
            f"{len(keys) - found.count(None)}",
        )

    @covers("FT-4", "FT-1", levels=Level.FAULTS)
    def test_one_fault_beside_calls_that_succeed(
        self, context: CaseContext, injector: FaultInjector
    ) -> None:
        """One request fails while eight calls in other threads are served."""
        sut, keys = serving_storage(context, injector, pages=4, options=StorageOptions())
        # Slow writes let all nine calls overlap. A breaker that counts one failure beside eight
        # successes as an outage opens here.
        slow = Fault(kind=FaultKind.DELAY, operations=_WRITES, seconds=0.05)
        plan = FaultPlan(
            injector.name,
            (slow, *_FAILING_ONCE[injector.name]) if injector.name in _FAILING_ONCE else (),
        )
        clients = context.clients(sut, BESIDE + 1)
        answers = list[list[bool]]()

        def write(client: StorageUnderTest, new: list[str]) -> None:
            answers.append(client.set(new))

        injector.inject(plan)
        together("FT-3", [partial(write, client, context.keys(2)) for client in clients])
        injector.heal()
        served = sum(map(all, answers))
        state = sut.call("get_stats", sut.storage.get_stats).breaker_state
        hit = sut.exists(keys).kv_hit_pages
        check(
            served < BESIDE or (state != "open" and hit >= len(keys)),
            "FT-4",
            f"{served} of {len(clients)} sets in as many threads were served, and one failed "
            f"({plan}); then the circuit breaker is "
            f"{state!r}, and exists finds {hit} of {len(keys)} pages",
        )


def _use(
    context: CaseContext,
    sut: StorageUnderTest,
    keys: Sequence[str],
    plan: FaultPlan,
    rounds: int = ROUNDS,
) -> tuple[list[str], bool, int]:
    """Ask, read and write under a fault.

    Returns:
        Keys that a set has acknowledged, whether a stored page was not delivered or a new one was
        refused, number of calls.
    """
    stored, missed = list[str](), False
    for _ in range(rounds):
        sut.exists(keys)
        sut.present(keys)
        check_hits(sut, keys, found := sut.get(keys), plan)
        new = context.keys(8)
        answers = sut.set(new)
        check_hits(sut, new, sut.get(new), plan)
        missed |= None in found or not all(answers)
        stored += [key for key, ok in zip(new, answers, strict=True) if ok]
    return stored, missed, rounds * 5


def _ask_once(sut: StorageUnderTest, keys: Sequence[str], plan: FaultPlan) -> None:
    """Make sure that a lookup and a read of stored pages that miss under a fault count one each."""
    before = count_faults(sut)
    hit = sut.exists(keys).kv_hit_pages
    _check_counted(sut, "an exists of stored pages was", before, plan, missed=hit < len(keys))
    before = count_faults(sut)
    check_hits(sut, keys, found := sut.get(keys), plan)
    _check_counted(sut, "a get of stored pages was", before, plan, missed=None in found)


def _check_counted(
    sut: StorageUnderTest, what: str, before: int, plan: FaultPlan, *, missed: bool
) -> None:
    check(
        not missed or count_faults(sut) != before,
        "FT-1",
        f"{what} answered with misses because of {plan}, and get_stats() counts no "
        f"fault{_swallowed(sut)}",
    )


def _silent(plan: FaultPlan) -> bool:
    """Return whether pages look as if they had never been there, so that nobody could count them."""
    kinds = {fault.kind for fault in plan.faults}
    unseen = bool(kinds & {FaultKind.PARTIAL, FaultKind.STALE})
    return unseen or (plan.injector == "network" and FaultKind.BIT_FLIP in kinds)


def _one_of(injector: FaultInjector, operation: str, number: int, pages: int) -> tuple[Fault, ...]:
    known = {
        "disk": Fault(
            kind=FaultKind.ERROR, error="EIO", operations=(operation,), first=number, count=1
        ),
        "network": Fault(kind=FaultKind.CUT, operations=("request",), first=number % 2, count=1),
        "objects": Fault(
            kind=FaultKind.PARTIAL, operations=(operation,), place=(number + 0.5) / pages
        ),
    }
    return (known[injector.name],) if injector.name in known else ()


def _files(injector: FaultInjector) -> int:
    return (
        sum(len(files) for _, _, files in os.walk(injector.backing))
        if isinstance(injector, DiskInjector)
        else 0
    )


@contextlib.contextmanager
def _no_more_descriptors() -> Generator[None]:
    """Let this process open nothing meanwhile; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest number that is free: with the limit there, every further open() fails, and
    # descriptors that are open stay usable.
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _no_more_threads() -> contextlib.AbstractContextManager[object]:
    """Let this process start no thread meanwhile but the suite's, as at a limit of its cgroup."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name != CALL_THREAD:
            raise RuntimeError("can't start new thread")
        start(thread)

    return mock.patch.object(threading.Thread, "start", refuse)


_LIMITS: Final = {
    "descriptors": (_no_more_descriptors, "EMFILE"),
    "threads": (_no_more_threads, "EAGAIN"),
}


def _swallowed(sut: StorageUnderTest) -> str:
    """Advice to a driver of the SDK whose faults show nowhere."""
    return (
        ": the driver catches the errors of its store; raise them, and the SDK answers the misses, "
        "counts and logs them"
        if has_steps(sut.storage)
        else ""
    )


DELETIONS: Final = 3
STORE_PAGES: Final = 24
MAX_NAMES: Final = 12
"""Files of the store whose names strangers imitate."""
_NUMBER: Final = re.compile(r"[0-9a-f]+")


class DirectoryCases:
    """FT-4 and SET-1 where others have their hands in the store's directory."""

    @covers("FT-4", "SET-1", levels=Level.FAULTS, needs=[DIRECTORY])
    def test_a_store_that_is_deleted_and_made_again(self, context: CaseContext) -> None:
        """The directory is emptied under an open storage, which sets again."""
        config, home = context.apart()
        sut, keys = open_long_pages(context, config), context.keys(3)
        sut.store(keys)
        for number in range(DELETIONS):
            _empty(home)
            _make_again(context, sut, keys, home, number + 1)
        for reader in (sut, *_shared(context, config, sut.identity)):
            reader.expect(keys)

    @covers("SET-1", "GET-1", "FT-4", levels=Level.FAULTS, needs=[DIRECTORY, "sharing>=process"])
    def test_a_store_that_is_deleted_and_opened_anew(self, context: CaseContext) -> None:
        """The directory is emptied under an open storage, and another starts in it."""
        config, home = context.apart()
        early = open_long_pages(context, config)
        early.store(context.keys(3))
        _empty(home)
        both = early, open_long_pages(context, config, early.identity)
        until, missed = time.monotonic() + context.profile.recovery_seconds, True
        # Until they share a store again; a storage may look only now and then for what it has open.
        while missed and time.monotonic() < until:
            stored, missed = [list[str](), list[str]()], False
            for number in range(2 * BATCH):
                keys = context.keys(BATCH)
                answers = zip(keys, both[number % 2].set(keys), strict=True)
                stored[number % 2] += [key for key, ok in answers if ok]
            for sut, mine, others in zip(both, stored, reversed(stored), strict=True):
                sut.expect(mine)
                check_hits(sut, others, found := sut.get(others), "a directory that was emptied")
                missed |= None in found
            time.sleep(0.02)
        both[1].store(context.keys(BATCH))

    @covers("SET-1", "FT-1", levels=Level.FAULTS, needs=[DIRECTORY])
    def test_strangers_with_names_like_the_store_s_own(self, context: CaseContext) -> None:
        """Empty files whose names are the store's own with other numbers."""
        option = registry().get(context.driver).capacity_option
        config, home = context.apart()
        if option:
            config = {**config, option: f"{capacity_of(STORE_PAGES) // 1024}KiB"}
        early = open_long_pages(context, config)
        keys = context.keys(2 * BATCH)
        for start in range(0, len(keys), BATCH):
            early.store(keys[start : start + BATCH])
        for path in _look_alikes(home):
            # Empty, and with names of the store's own kind. A driver that trusts names takes them
            # for later changes, bundles of others, or pages.
            path.touch()
        # The one that opens later comes first, because it has nothing but the directory to go by.
        for reader in (*_shared(context, config, early.identity), early):
            reader.expect(keys)
            reader.expect_existing(keys, rule="SET-1")
            more = context.keys(BATCH)
            reader.store(more)
            keys += more
        early.expect(keys)


def _empty(home: Path) -> None:
    for entry in home.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _shared(
    context: CaseContext, config: Mapping[str, object], identity: StorageIdentity
) -> list[StorageUnderTest]:
    """A storage that opens later, where it sees what others have set."""
    return [open_long_pages(context, config, identity)] if context.shares else []


def _make_again(
    context: CaseContext, sut: StorageUnderTest, keys: list[str], home: Path, number: int
) -> None:
    """Set pages until they can be in the directory.

    Nobody else opens the store meanwhile, nor reads of it, because that could tell the storage that
    it is gone.
    """
    allowed, answers = context.profile.recovery_seconds, list[bool]()

    def is_stored() -> bool:
        answers[:] = sut.set(keys)
        return all(answers) and any(path.is_file() for path in home.rglob("*"))

    check(
        eventually(is_stored, allowed),
        "FT-4",
        f"{allowed:.0f} s after the store was deleted for the {number}. time, a set answers "
        f"{answers}, and there is no file in its directory",
    )


def _look_alikes(home: Path) -> Iterator[Path]:
    """Paths beside the store's files, each with one number of the name changed."""
    for path in [path for path in sorted(home.rglob("*")) if path.is_file()][:MAX_NAMES]:
        for number in _NUMBER.finditer(path.name):
            width = number.end() - number.start()
            # The largest number of the same width, of 64 bits, the smallest, and one that no 64-bit
            # counter holds.
            for other in ("f" * width, "f" * 16, "0" * width, "9" * 20):
                yield path.with_name(
                    path.name[: number.start()] + other + path.name[number.end() :]
                )
