"""Random plans: which faults a ground knows, and a seeded choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.faults.plan import Fault, FaultKind, FaultPlan

if TYPE_CHECKING:
    from random import Random

MENU: Final[dict[str, tuple[Fault, ...]]] = {
    "disk": (
        Fault(kind=FaultKind.DELAY),
        Fault(kind=FaultKind.HANG),
        *(Fault(kind=FaultKind.ERROR, error=name) for name in ("EIO", "ESTALE")),
        *(Fault(kind=FaultKind.ERROR, error=name, operations=("read",)) for name in ("EIO", "ESTALE")),
        *(Fault(kind=FaultKind.ERROR, error=name, operations=("open", "create")) for name in ("EMFILE", "ENFILE", "EACCES")),
        *(
            Fault(kind=FaultKind.ERROR, error=name, operations=("create", "write", "name"))
            for name in ("ENOSPC", "EROFS", "EDQUOT")
        ),
        *(Fault(kind=FaultKind.ERROR, error="EIO", operations=(sort,)) for sort in ("write", "name", "look", "sync")),
        Fault(kind=FaultKind.SHORT_READ, operations=("read",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("read",)),
        Fault(kind=FaultKind.WRONG_KEY, operations=("read",)),
        Fault(kind=FaultKind.SHORT_WRITE, operations=("write",)),
        Fault(kind=FaultKind.TORN_WRITE, operations=("write",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("write",)),
        Fault(kind=FaultKind.LOST_DESCRIPTOR),
    ),
    "network": (
        Fault(kind=FaultKind.DELAY),
        Fault(kind=FaultKind.HANG),
        Fault(kind=FaultKind.HANG, operations=("reply",)),
        Fault(kind=FaultKind.CUT, operations=("request",)),
        Fault(kind=FaultKind.CUT, operations=("reply",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("request",)),
        Fault(kind=FaultKind.BIT_FLIP, operations=("reply",)),
        Fault(kind=FaultKind.REFUSE),
    ),
    "services": (Fault(kind=FaultKind.KILL), Fault(kind=FaultKind.STALE), Fault(kind=FaultKind.HANG)),
    "objects": (
        Fault(kind=FaultKind.DELAY),
        Fault(kind=FaultKind.HANG),
        *(Fault(kind=FaultKind.ERROR, error=name) for name in ("EIO", "ECONNRESET", "ETIMEDOUT")),
        *(Fault(kind=FaultKind.MALFORMED, operations=(sort,)) for sort in ("exists", "read", "write")),
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
"""What can go wrong on each ground. A lookup that lies is not there: no driver could tell, and nothing it said would hold."""

LONG: Final = (FaultKind.KILL, FaultKind.STALE, FaultKind.REFUSE, FaultKind.LOST_DESCRIPTOR)
"""Kinds that strike at once and last until the ground is healed."""


def drawn_plan(ground: str, random: Random, *, hangs: bool = True, most: int = 4) -> FaultPlan:
    """A plan of one to `most` faults.

    Args:
        ground: name of the ground.
        random: decides.
        hangs: whether operations may hang.
        most: largest number of faults.
    """
    menu = [fault for fault in MENU[ground] if hangs or fault.kind is not FaultKind.HANG]
    chosen = [_drawn(random.choice(menu), random) for _ in range(random.randint(1, most))]
    once = {fault.kind: fault for fault in chosen if fault.kind in LONG}
    return FaultPlan(ground, tuple([fault for fault in chosen if fault.kind not in LONG] + list(once.values())))


def _drawn(fault: Fault, random: Random) -> Fault:
    if fault.kind in LONG:
        return fault
    return Fault(
        kind=fault.kind,
        operations=fault.operations,
        error=fault.error,
        first=random.choice((0, 0, random.randrange(4), random.randrange(40))),
        count=random.choice((1, 1, 2, random.randint(2, 20), 0)),
        seconds=round(random.uniform(0.001, 0.02), 4) if fault.kind is FaultKind.DELAY else 0.0,
        place=round(random.random(), 4),
    )
