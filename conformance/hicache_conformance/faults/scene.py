"""What cases of faults have in common: a store that works, calls under a fault, and the store after it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_conformance.faults.plan import Fault, FaultKind, FaultPlan
from hicache_conformance.faults.troubles import HUNG
from hicache_conformance.needs import declares
from hicache_conformance.pages import short
from hicache_conformance.pending import Pending
from hicache_conformance.violation import Untestable, Violation
from hicache_storage.layers import StorageOptions
from hicache_storage.spec import HiCacheStorageExtraInfo, HungReads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.grounds.ground import Ground
    from hicache_conformance.lab import Lab
    from hicache_conformance.subject import Subject
    from hicache_storage.spec import StorageStats

AnswerT = TypeVar("AnswerT")

DEADLINE_SECONDS: Final = 0.4
"""Of calls under a fault that clients may wait for. A working store is given more, because the machine may be busy."""
AT_ONCE_SECONDS: Final = 5.0
"""Of calls under a fault that is told at once. On a busy machine a shorter deadline would be a second fault, with lines of its own."""
SLACK_SECONDS: Final = 1.0
"""What FT-3 allows beyond the deadline."""
PATIENCE_SECONDS: Final = 10.0
"""How long a call may take that nothing holds up."""

UNGUARDED: Final = StorageOptions(breaker_threshold=0)
"""Without a circuit breaker, so that every call reaches the driver."""


def working(lab: Lab, ground: Ground, *, pages: int = 12, options: StorageOptions = UNGUARDED) -> tuple[Subject, list[str]]:
    """A storage on the ground without faults, and keys of pages that it stores.

    Raises:
        Untestable: the driver does not even work there without faults.
    """
    subject, keys = lab.storage(options=options), lab.keys(pages)
    # Several rounds, because the first call of a driver may find its connection dead, or the machine may be busy.
    stored = list[bool]()
    for _ in range(5):
        stored = subject.set(keys)
        if all(stored) and None not in subject.get(keys):
            return subject, keys
    raise Untestable(f"the driver does not serve on the ground {ground.name!r} even without faults: a set answered {stored}")


def hung(ground: Ground, subject: Subject, *operations: str) -> FaultPlan:
    """Everything hangs, or some sorts of operations do; where the driver says of its own methods that they cannot, they are slow."""
    known = {"disk": ("read", "write", "create", "name", "sync"), "network": ("request", "reply"), "objects": ("read", "write")}
    sorts = tuple(sort for sort in operations if sort in known.get(ground.name, ()))
    if ground.name == "objects" and not subject.storage.capabilities.may_hang:
        return FaultPlan(ground.name, (Fault(kind=FaultKind.DELAY, operations=sorts, seconds=DEADLINE_SECONDS / 10),))
    return FaultPlan(ground.name, tuple(Fault(kind=fault.kind, operations=sorts) for fault in HUNG))


def may_wait(subject: Subject) -> bool:
    """Whether a get of this driver may wait for as long as a read below it hangs."""
    return subject.storage.capabilities.hung_reads is HungReads.WAIT


def deadline_on(ground: Ground) -> float:
    """Seconds for calls under a fault of this ground; disks and seams answer at once, unless the fault is that they do not."""
    return AT_ONCE_SECONDS if ground.name in ("disk", "objects") else DEADLINE_SECONDS


def hurry(subject: Subject, seconds: float | None = DEADLINE_SECONDS) -> None:
    """Give every further call a deadline; None takes it away."""
    subject.info = None if seconds is None else HiCacheStorageExtraInfo(deadline_seconds=seconds)


def bounded(ground: Ground, plan: FaultPlan, name: str, ask: Callable[[], AnswerT]) -> AnswerT:
    """Ask under a fault that does not hang; a driver that does so all the same must not take the suite with it.

    Raises:
        Violation: FT-3, the call has not come back.
    """
    call = Pending(ask)
    if not call.comes_back(PATIENCE_SECONDS):
        ground.heal()
        raise Violation("FT-3", f"{name} has not come back for {PATIENCE_SECONDS:.0f} s; {plan}")
    return call.answer()


def check_hits(subject: Subject, keys: Sequence[str], found: Sequence[bytes | None], plan: object) -> None:
    """Make sure that what was delivered is right.

    Raises:
        Violation: GET-1.
    """
    for index, (key, content) in enumerate(zip(keys, found, strict=True)):
        wrong = subject.explain(key, content) if content is not None else ""
        if wrong:
            raise Violation("GET-1", f"page {index} key {short(key)} {wrong}; below the driver: {plan}")


def wait_until_serving(lab: Lab, subject: Subject, plan: object) -> None:
    """Wait until a storage stores and reads again, without anybody opening it anew.

    Raises:
        Violation: FT-4, it does not.
    """
    allowed, tries = lab.profile.recovery_seconds, 0
    until = time.monotonic() + allowed
    while True:
        key, tries = lab.keys(1), tries + 1
        if subject.set(key) == [True]:
            found = subject.get(key)
            check_hits(subject, key, found, plan)
            if found[0] is not None and subject.has(key[0]):
                return
        if time.monotonic() > until:
            raise Violation(
                "FT-4",
                f"{allowed:.0f} s and {tries} tries after the fault was gone ({plan}), a new page cannot be stored and read",
            )
        time.sleep(0.02)


def check_kept(lab: Lab, subject: Subject, keys: Sequence[str], plan: FaultPlan) -> None:
    """After a fault: pages that were acknowledged are there, where the fault cannot have destroyed them; no page is wrong; and
    what is gone can be stored again.

    Raises:
        Violation: GET-1, SET-1 or SET-3.
    """
    batches = [keys[start : start + 48] for start in range(0, len(keys), 48)]
    for batch in batches:
        found = subject.get(batch)
        check_hits(subject, batch, found, plan)
        if not loses_pages(lab, plan):
            subject.compare(batch, found)
        for index, (key, ok) in enumerate(zip(batch, subject.set(batch), strict=True)):
            if not ok:
                raise Violation("SET-3", f"page {index} key {short(key)} cannot be stored again after the fault ({plan})")
        subject.expect(batch, rule="SET-3")


def loses_pages(lab: Lab, plan: FaultPlan) -> bool:
    """Whether an acknowledged page may be gone after these faults, with a driver of these capabilities."""
    killed = any(fault.kind == "killed server" for fault in plan.faults)
    return plan.destroys or (killed and not declares(lab.capabilities, "durability>=process"))


def counted(subject: Subject) -> int:
    """Everything that a storage counts where it answers a miss because of a fault."""
    stats: StorageStats = subject.call("get_stats", subject.storage.get_stats)
    pages = sum(pool.pages_damaged + pool.pages_refused for pool in stats.pools.values())
    return stats.faults + stats.deadlines_missed + stats.breaker_refusals + pages
