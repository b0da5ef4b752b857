"""Faults below a driver: misses that are counted and told once, and a store that is whole again afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.fault_calls import (
    UNGUARDED,
    bounded,
    check_hits,
    check_kept,
    counted,
    deadline_on,
    hurry,
    wait_until_serving,
    working,
)
from hicache_conformance.harness.concurrency import together
from hicache_conformance.harness.leak_check import Residue
from hicache_conformance.harness.log_records import records_above_debug
from hicache_conformance.injectors.disk import DiskGround
from hicache_conformance.injectors.driver_methods import ObjectsGround
from hicache_conformance.injectors.named_faults import AWAY, TROUBLES
from hicache_conformance.model.case import covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_storage.layers import StorageOptions
from hicache_storage.spec import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject
    from hicache_conformance.injectors.injector import Ground

FAULTS: Final = (Level.FAULTS,)

ROUNDS: Final = 3
LINES: Final = 5
"""Most lines of one episode: lookups, reads and writes may each have one, and so may the connection and the breaker."""

SILENT: Final = frozenset({FaultKind.PARTIAL, FaultKind.REORDERED, FaultKind.STALE})
"""Kinds that make a page look as if it had never been there, so that nobody could count them as faults."""


BESIDE: Final = 8
_WRITES: Final = ("write", "request")
_FAILING_ONCE: Final = {
    "disk": (Fault(kind=FaultKind.ERROR, error="EIO", operations=("write",), count=1),),
    "objects": (Fault(kind=FaultKind.ERROR, error="EIO", operations=("write",), count=1),),
    "network": (Fault(kind=FaultKind.CUT, operations=("request",), count=1),),
}


class FaultCases:
    """FT-1, FT-4, FT-6, and SET-6 where one page of a batch fails."""

    @covers("FT-1", "FT-6", "FT-4", "GET-1", "SET-1", "SET-3", levels=FAULTS)
    def test_a_trouble_is_a_miss(self, lab: Lab, ground: Ground, trouble: str) -> None:
        """Under each kind of fault: no call raises, no wrong page, misses are counted, no line for each page; afterwards all is well."""
        plan = FaultPlan(ground.name, TROUBLES[ground.name][trouble])
        subject, keys = working(lab, ground)
        before = counted(subject)
        hurry(subject, deadline_on(ground))
        with records_above_debug() as records:
            ground.strike(plan)
            stored, missed, calls = _use(lab, ground, subject, keys, plan)
        ground.heal()
        hurry(subject, None)
        if missed and ground.struck() and not _silent(plan) and counted(subject) == before:
            raise Violation("FT-1", f"calls were answered with misses because of {plan}, and get_stats() counts no fault")
        _check_lines(records, calls if plan.destroys else LINES, plan)
        wait_until_serving(lab, subject, plan)
        check_kept(lab, subject, [*keys, *stored], plan)

    @covers("FT-1", levels=FAULTS)
    def test_an_outage_is_told_once(self, lab: Lab, ground: Ground) -> None:
        """While nothing works every call is a miss; that is counted, and logged in a few lines, not in one for each call."""
        plan = FaultPlan(ground.name, AWAY[ground.name])
        subject, keys = working(lab, ground)
        before = counted(subject)
        hurry(subject, deadline_on(ground))
        ground.strike(plan)
        with records_above_debug() as records:
            _, missed, calls = _use(lab, ground, subject, keys, plan, rounds=2 * ROUNDS)
        ground.heal()
        hurry(subject, None)
        if missed and counted(subject) == before:
            raise Violation("FT-1", f"calls were answered with misses because of {plan}, and get_stats() counts no fault")
        if missed and not records:
            raise Violation("FT-1", f"{calls} calls were answered with misses because of {plan}, and nothing was logged")
        _check_lines(records, LINES, plan)

    @covers("FT-1", "FT-4", "LC-1", levels=FAULTS)
    def test_a_store_that_is_away(self, lab: Lab, ground: Ground) -> None:
        """Opened while nothing works: open() says so with a HiCacheError, calls are misses, and when the store comes it serves."""
        plan = FaultPlan(ground.name, AWAY[ground.name])
        working(lab, ground, pages=1)
        subject, keys = lab.unopened(options=UNGUARDED), lab.keys(3)
        hurry(subject, deadline_on(ground))
        ground.strike(plan)
        with contextlib.suppress(HiCacheError):
            bounded(ground, plan, "open", subject.storage.open)
        _use(lab, ground, subject, keys, plan)
        ground.heal()
        hurry(subject, None)
        wait_until_serving(lab, subject, plan)

    @covers("FT-4", levels=FAULTS)
    def test_the_same_storage_recovers(self, lab: Lab, ground: Ground) -> None:
        """Several outages in a row, behind a circuit breaker: after each, the same storage serves again and the breaker is closed."""
        plan = FaultPlan(ground.name, AWAY[ground.name])
        subject, keys = working(lab, ground, options=StorageOptions(breaker_threshold=3, breaker_cooldown_seconds=0.1))
        for _ in range(2):
            hurry(subject, deadline_on(ground))
            ground.strike(plan)
            _use(lab, ground, subject, keys, plan)
            ground.heal()
            hurry(subject, None)
            wait_until_serving(lab, subject, plan)
            state = subject.call("get_stats", subject.storage.get_stats).breaker_state
            if state != "closed":
                raise Violation("FT-4", f"the store answers again after {plan}, and the circuit breaker is {state}")
        check_kept(lab, subject, keys, plan)

    @covers("FT-6", "FT-4", levels=FAULTS)
    def test_no_descriptor_is_left(self, lab: Lab) -> None:
        """While the process may open nothing more: misses, and afterwards the same storage serves."""
        subject, keys, here = lab.storage(options=UNGUARDED), lab.keys(6), ObjectsGround()
        plan = FaultPlan("process", (Fault(kind=FaultKind.ERROR, error="EMFILE", operations=("open",)),))
        subject.store(keys)
        _use(lab, here, subject, keys, plan)
        hurry(subject, deadline_on(here))
        with _no_more_descriptors():
            stored, _, _ = _use(lab, here, subject, keys, plan)
        hurry(subject, None)
        wait_until_serving(lab, subject, plan)
        check_kept(lab, subject, [*keys, *stored], plan)

    @covers("FT-6", "SET-5", levels=FAULTS)
    def test_failing_sets_leave_nothing(self, lab: Lab, ground: Ground) -> None:
        """Sets that fail for want of room, again and again, leave no files and no descriptors behind."""
        failing = {"disk": "full-halfway", "objects": "failing-writes", "network": "cut-requests", "services": "killed"}
        plan = FaultPlan(ground.name, TROUBLES[ground.name][failing[ground.name]])
        subject, _ = working(lab, ground)
        hurry(subject, deadline_on(ground))
        ground.strike(plan)
        seen = list[tuple[int, int]]()
        for _ in range(4):
            for _ in range(3):
                subject.set(lab.keys(4))
            seen.append((len(Residue.now().descriptors), _files(ground)))
        ground.heal()
        # The first rounds may fill tables that are kept.
        for what, first, last in zip(("descriptors", "files"), seen[1], seen[3], strict=True):
            if last > first + 2:
                raise Violation("FT-6", f"6 sets that failed ({plan}) left {last - first} {what} behind")
        hurry(subject, None)
        wait_until_serving(lab, subject, plan)

    @covers("SET-6", "GET-3", "FT-6", levels=FAULTS)
    def test_one_page_fails(self, lab: Lab, ground: Ground) -> None:
        """One page of a batch cannot be moved: the others are stored and delivered, each answer at its own place."""
        subject, keys = working(lab, ground)
        number = lab.chance("which page").randrange(len(keys))
        plan = FaultPlan(ground.name, _one_of(ground, "write", number, len(keys)))
        new = lab.keys(len(keys))
        ground.strike(plan)
        answers = subject.set(new)
        ground.heal()
        stored = [key for key, ok in zip(new, answers, strict=True) if ok]
        if ground.name == "objects" and len(stored) != len(new) - 1:
            raise Violation("SET-6", f"one page of {len(new)} could not be written, and the set answered {answers}")
        check_kept(lab, subject, stored, plan)
        plan = FaultPlan(ground.name, _one_of(ground, "read", number, len(keys)))
        ground.strike(plan)
        found = subject.get(keys)
        ground.heal()
        check_hits(subject, keys, found, plan)
        if ground.name == "objects" and found.count(None) != 1:
            raise Violation(
                "GET-3", f"one page of {len(keys)} could not be read, and the get delivered {len(keys) - found.count(None)}"
            )

    @covers("FT-4", "FT-1", levels=FAULTS)
    def test_one_fault_beside_calls_that_succeed(self, lab: Lab, ground: Ground) -> None:
        """One request fails while eight calls in other threads are served: one fault, after which the storage serves on."""
        subject, keys = working(lab, ground, pages=4, options=StorageOptions())
        slow = Fault(kind=FaultKind.DELAY, operations=_WRITES, seconds=0.05)
        plan = FaultPlan(ground.name, (slow, *_FAILING_ONCE[ground.name]) if ground.name in _FAILING_ONCE else ())
        lanes = [subject.lane(number, BESIDE + 1, lab.chance(f"lane {number}")) for number in range(BESIDE + 1)]
        answers = list[list[bool]]()
        ground.strike(plan)
        together("FT-3", [partial(_note, answers, lane, lab.keys(2)) for lane in lanes])
        ground.heal()
        served = sum(map(all, answers))
        state = subject.call("get_stats", subject.storage.get_stats).breaker_state
        hit = subject.exists(keys).kv_hit_pages
        if served >= BESIDE and (state == "open" or hit < len(keys)):
            raise Violation(
                "FT-4",
                f"{served} of {len(lanes)} sets in as many threads were served, and one failed ({plan}); then the circuit breaker is "
                f"{state!r}, and exists finds {hit} of {len(keys)} pages",
            )


def _note(answers: list[list[bool]], subject: Subject, keys: Sequence[str]) -> None:
    answers.append(subject.set(keys))


def _use(
    lab: Lab, ground: Ground, subject: Subject, keys: Sequence[str], plan: FaultPlan, *, rounds: int = ROUNDS
) -> tuple[list[str], bool, int]:
    """Ask, read and write under a fault.

    Returns:
        Keys that a set has acknowledged, whether a stored page was not delivered or a new one was refused, number of calls.
    """
    stored, missed = list[str](), False
    for _ in range(rounds):
        bounded(ground, plan, "batch_exists_v2", partial(subject.exists, keys))
        found = bounded(ground, plan, "batch_get_v2", partial(subject.get, keys))
        check_hits(subject, keys, found, plan)
        new = lab.keys(8)
        answers = bounded(ground, plan, "batch_set_v2", partial(subject.set, new))
        check_hits(subject, new, bounded(ground, plan, "batch_get_v2", partial(subject.get, new)), plan)
        missed |= None in found or not all(answers)
        stored += [key for key, ok in zip(new, answers, strict=True) if ok]
    return stored, missed, rounds * 4


def _silent(plan: FaultPlan) -> bool:
    corrupt = plan.ground == "network" and any(fault.kind is FaultKind.BIT_FLIP for fault in plan.faults)
    return corrupt or any(fault.kind in SILENT for fault in plan.faults)


def _check_lines(records: Sequence[logging.LogRecord], most: int, plan: FaultPlan) -> None:
    lines = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    if len(lines) > most:
        raise Violation(
            "FT-1", f"one episode ({plan}) was logged in {len(lines)} lines, of which {most} are enough; first {lines[0]!r:.200}"
        )


def _one_of(ground: Ground, operation: str, number: int, pages: int) -> tuple[Fault, ...]:
    match ground.name:
        case "objects":
            return (Fault(kind=FaultKind.PARTIAL, operations=(operation,), place=(number + 0.5) / pages),)
        case "network":
            return (Fault(kind=FaultKind.CUT, operations=("request",), first=number % 2, count=1),)
        case "services":
            return ()
        case _:
            return (Fault(kind=FaultKind.ERROR, error="EIO", operations=(operation,), first=number, count=1),)


def _files(ground: Ground) -> int:
    return sum(len(files) for _, _, files in os.walk(ground.backing)) if isinstance(ground, DiskGround) else 0


@contextlib.contextmanager
def _no_more_descriptors() -> Generator[None]:
    """Let this process open nothing meanwhile; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
