"""Generator of random fault plans: the faults of each injector, and a seeded choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from hicache_conformance.model.fault_plan import UNTIMED, Fault, FaultKind, FaultPlan

if TYPE_CHECKING:
    from random import Random

MENU: Final[dict[str, tuple[Fault, ...]]] = {
    "disk": (
        Fault(kind=FaultKind.DELAY),
        Fault(kind=FaultKind.HANG),
        *(Fault(kind=FaultKind.ERROR, error=name) for name in ("EIO", "ESTALE")),
        *(
            Fault(kind=FaultKind.ERROR, error=name, operations=("read",))
            for name in ("EIO", "ESTALE")
        ),
        *(
            Fault(kind=FaultKind.ERROR, error=name, operations=("open", "create", "modify"))
            for name in ("EMFILE", "ENFILE", "EACCES")
        ),
        *(
            Fault(kind=FaultKind.ERROR, error=name, operations=("create", "write", "name"))
            for name in ("ENOSPC", "EROFS", "EDQUOT")
        ),
        *(
            Fault(kind=FaultKind.ERROR, error="EIO", operations=(sort,))
            for sort in ("write", "name", "look", "sync")
        ),
        *(
            Fault(kind=FaultKind.APPLIED, operations=(sort,))
            for sort in ("create", "write", "name", "remove", "sync")
        ),
        Fault(kind=FaultKind.APPLIED, operations=("name",), error="EIO"),
        Fault(kind=FaultKind.SHORT_READ, operations=("read",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("read",)),
        Fault(kind=FaultKind.WRONG_KEY, operations=("read",)),
        Fault(kind=FaultKind.SHORT_WRITE, operations=("write",)),
        Fault(kind=FaultKind.TORN_WRITE, operations=("write",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("write",)),
        *(
            Fault(kind=FaultKind.LOST_DESCRIPTOR, operations=sorts)
            for sorts in (("read",), ("write",), ("read", "write", "sync"))
        ),
    ),
    "network": (
        Fault(kind=FaultKind.DELAY),
        Fault(kind=FaultKind.HANG),
        Fault(kind=FaultKind.HANG, operations=("reply",)),
        Fault(kind=FaultKind.CUT, operations=("request",)),
        Fault(kind=FaultKind.CUT, operations=("reply",)),
        Fault(kind=FaultKind.APPLIED, operations=("reply",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("request",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("reply",)),
        Fault(kind=FaultKind.REFUSE),
    ),
    "services": (
        Fault(kind=FaultKind.KILL),
        Fault(kind=FaultKind.STALE),
        Fault(kind=FaultKind.HANG),
    ),
    "objects": (
        Fault(kind=FaultKind.DELAY),
        Fault(kind=FaultKind.HANG),
        *(Fault(kind=FaultKind.ERROR, error=name) for name in ("EIO", "ECONNRESET", "ETIMEDOUT")),
        Fault(kind=FaultKind.APPLIED, operations=("write",)),
        *(
            Fault(kind=FaultKind.MALFORMED, operations=(sort,))
            for sort in ("exists", "read", "write")
        ),
        *(Fault(kind=FaultKind.PARTIAL, operations=(sort,)) for sort in ("read", "write")),
        *(Fault(kind=FaultKind.DUPLICATE, operations=(sort,)) for sort in ("read", "write")),
        Fault(kind=FaultKind.REORDERED, operations=("read",)),
        Fault(kind=FaultKind.SHORT_READ, operations=("read",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("read",)),
        Fault(kind=FaultKind.WRONG_KEY, operations=("read",)),
        Fault(kind=FaultKind.TORN_WRITE, operations=("write",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("write",)),
    ),
}
"""What can go wrong on each injector. A lookup that lies is not there: no driver could tell, and
nothing it said would hold."""

KILLED_ENGINE: Final = Fault(kind=FaultKind.ENGINE)
"""On every injector, where another process may use the store."""


def generate_plan(
    injector: str, random: Random, *, hangs: bool = True, engines: bool = False, most: int = 4
) -> FaultPlan:
    """A plan of one to `most` faults.

    Args:
        injector: name of the injector.
        random: decides.
        hangs: whether operations may hang.
        engines: whether another engine may be killed.
        most: largest number of faults.
    """
    menu = [fault for fault in MENU[injector] if hangs or fault.kind is not FaultKind.HANG]
    menu += [KILLED_ENGINE] if engines else []
    chosen = [_drawn(injector, random.choice(menu), random) for _ in range(random.randint(1, most))]
    # Faults without a time are states, such as a killed server, and hold once or not at all.
    once = {fault.kind: fault for fault in chosen if fault.kind in UNTIMED}
    return FaultPlan(
        injector,
        tuple([fault for fault in chosen if fault.kind not in UNTIMED] + list(once.values())),
    )


def _drawn(injector: str, fault: Fault, random: Random) -> Fault:
    if fault.kind is FaultKind.ENGINE:
        return structs.replace(fault, place=round(random.random(), 4))
    # What is done to a server has no operations to count.
    if fault.kind in UNTIMED or injector == "services":
        return fault
    return Fault(
        kind=fault.kind,
        operations=fault.operations,
        error=fault.error,
        # Mostly early: short calls make few operations, and a fault on the fortieth is rarely met.
        first=random.choice((0, 0, random.randrange(4), random.randrange(40))),
        # One hit is the common case of a passing fault; 0 stands for all from then on.
        count=random.choice((1, 1, 2, random.randint(2, 20), 0)),
        seconds=round(random.uniform(0.001, 0.02), 4) if fault.kind is FaultKind.DELAY else 0.0,
        place=round(random.random(), 4),
    )
