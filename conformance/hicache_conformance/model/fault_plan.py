"""Fault plans as data, and the faults of each injector: named ones, and those of random plans."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec


class FaultKind(StrEnum):
    """Kinds of faults."""

    DELAY = "delay"
    """The operation takes `seconds` longer."""
    HANG = "hang"
    """It does not come back before the injector is healed."""
    ERROR = "error"
    """It fails with the error named by `error`."""
    APPLIED = "error after it took effect"
    """It takes effect, and then fails: with the error named by `error`, or as a retransmitted
    request fails on NFS."""
    SHORT_READ = "short read"
    """Half of the bytes arrive."""
    SHORT_WRITE = "short write"
    """Half of the bytes are taken, and the writer is told so."""
    TORN_WRITE = "torn write"
    """Half of the bytes are taken, and the writer is told that all were."""
    BIT_FLIP = "bit flip"
    """One bit of the bytes differs, at the fraction `place` of them."""
    WRONG_KEY = "wrong key"
    """The bytes of another page of the same length arrive."""
    DUPLICATE = "duplicate"
    """The operation is done twice."""
    PARTIAL = "partial batch"
    """One page of a batch, at the fraction `place` of it, is not moved."""
    LOST_DESCRIPTOR = "lost descriptors"
    """Files that are open when the plan begins, and those whose operation is hit, answer ESTALE for
    good. Opened again, they are as they were."""
    CUT = "cut"
    """The connection is reset in the middle of the bytes."""
    HALF_OPEN = "half-open connection"
    """The connection stays open, and never carries a byte again, also after the injector is healed:
    as behind a router that has lost its state. New connections work."""
    REFUSE = "refuse"
    """Connections are refused, and those that are open are reset."""
    KILL = "killed server"
    """The servers are killed, and started again when the injector is healed."""
    STALE = "restart from a stale snapshot"
    """As a killed server, and what it finds on its disk is older than what it has acknowledged."""


UNTIMED = (FaultKind.KILL, FaultKind.STALE, FaultKind.REFUSE)
"""Kinds that act once, when the plan begins, whatever the operations; a server is back when the
injector is healed."""

DESTRUCTIVE = frozenset(
    {
        FaultKind.SHORT_READ,
        FaultKind.BIT_FLIP,
        FaultKind.WRONG_KEY,
        FaultKind.TORN_WRITE,
        FaultKind.STALE,
    }
)
"""Kinds after which a page that was acknowledged may be gone: its bytes were lost, or a right
driver took it for damaged."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that goes wrong."""

    kind: FaultKind
    operations: tuple[str, ...] = ()
    """Sorts of operations that it hits, as the injector names them; empty for all."""
    first: int = 0
    """Number of these operations that pass before it begins."""
    count: int = 0
    """Number of operations that it hits then; 0 for all until the injector is healed."""
    error: str = ""
    """Name of an `errno`."""
    seconds: float = 0.0
    place: float = 0.5
    member: str = ""
    """The one of several stores that it hits, by the name of its port; empty for all servers."""

    def __str__(self) -> str:
        if self.member:
            return f"{self.kind}: {self.member}"
        what = {
            FaultKind.ERROR: self.error,
            FaultKind.APPLIED: f"{self.error or 'an error'} after it took effect",
            FaultKind.DELAY: f"a delay of {self.seconds * 1000:.0f} ms",
        }.get(self.kind, str(self.kind))
        if self.kind in UNTIMED:
            return what
        where = " or ".join(self.operations) or "any operation"
        # In words, because the plan stands in messages of violations, which are read far from the
        # code.
        if not self.count:
            return f"{what} at {where}" + (
                f" from number {self.first + 1} on" if self.first else ""
            )
        return f"{what} at {where} number {self.first + 1}" + (
            f" to {self.first + self.count}" if self.count > 1 else ""
        )


class FaultPlan(msgspec.Struct, frozen=True):
    """Faults below one driver, all of one injector."""

    injector: str
    faults: tuple[Fault, ...]

    @property
    def destroys(self) -> bool:
        """Return whether an acknowledged page may be gone afterwards."""
        return any(fault.kind in DESTRUCTIVE for fault in self.faults)

    @property
    def hangs(self) -> bool:
        """Return whether operations may not come back before the injector is healed."""
        return any(fault.kind is FaultKind.HANG for fault in self.faults)

    def __str__(self) -> str:
        return f"{self.injector}: {'; '.join(map(str, self.faults)) or 'no fault'}"


_FILLING: Final = ("create", "write", "name")
_WRITING: Final = (*_FILLING, "modify")
_OPENING: Final = ("open", "create", "modify")


def _at(kind: FaultKind, *operations: str, **more: Any) -> Fault:
    return Fault(kind=kind, operations=operations, **more)


def _error(name: str, *operations: str, **more: Any) -> Fault:
    return _at(FaultKind.ERROR, *operations, error=name, **more)


NAMED_FAULTS: Final[dict[str, dict[str, tuple[Fault, ...]]]] = {
    "disk": {
        "io-error": (_error("EIO"),),
        "unreadable": (_error("EIO", "read"),),
        "full": (_error("ENOSPC", *_WRITING),),
        "full-halfway": (_error("ENOSPC", "write", first=1),),
        "read-only": (_error("EROFS", *_WRITING),),
        "no-descriptors": (_error("EMFILE", *_OPENING),),
        "lost-descriptors": (_at(FaultKind.LOST_DESCRIPTOR, "read", "write", count=6),),
        "stale": (_error("ESTALE"),),
        "short-read": (_at(FaultKind.SHORT_READ, "read"),),
        "short-write": (_at(FaultKind.SHORT_WRITE, "write"),),
        "torn-write": (_at(FaultKind.TORN_WRITE, "write"),),
        "bit-flip": (_at(FaultKind.BIT_FLIP, "read"),),
        "wrong-key": (_at(FaultKind.WRONG_KEY, "read"),),
    },
    "network": {
        "refused": (_at(FaultKind.REFUSE),),
        "cut-requests": (_at(FaultKind.CUT, "request"),),
        "cut-replies": (_at(FaultKind.CUT, "reply"),),
        "corrupt-requests": (_at(FaultKind.BIT_FLIP, "request", place=0.7),),
        "corrupt-replies": (_at(FaultKind.BIT_FLIP, "reply", place=0.7),),
    },
    "services": {"killed": (_at(FaultKind.KILL),), "restored": (_at(FaultKind.STALE),)},
    "objects": {
        "io-error": (_error("EIO"),),
        "failing-reads": (_error("EIO", "read"),),
        "failing-writes": (_error("ENOSPC", "write"),),
        "duplicate": (_at(FaultKind.DUPLICATE),),
        "partial": (_at(FaultKind.PARTIAL, "read", "write"),),
        "torn-write": (_at(FaultKind.TORN_WRITE, "write"),),
        "flipped-write": (_at(FaultKind.BIT_FLIP, "write"),),
    },
}

UNAVAILABLE: Final = {
    injector: next(iter(faults.values())) for injector, faults in NAMED_FAULTS.items()
}
"""Nothing works: the first named fault of each injector."""

REFUSALS: Final[dict[str, tuple[Fault, ...]]] = {
    "disk": (
        _error("ENOSPC", *_FILLING),
        # Without inodes, files that are there can be written.
        _error("ENOSPC", "create", "name"),
        _error("EDQUOT", *_FILLING),
        _error("EROFS", *_WRITING, "remove"),
        _error("EXDEV", "name"),
        _error("ENAMETOOLONG", "create", "name"),
    ),
    "objects": tuple(_error(name, "write") for name in ("ENOSPC", "EDQUOT", "EROFS")),
}
"""Nothing more can be written, and what is there can be read."""

_UNNAMED: Final[dict[str, tuple[Fault, ...]]] = {
    "disk": (
        *(_error(name, *_OPENING) for name in ("ENFILE", "EACCES")),
        *(_error("EIO", sort) for sort in ("write", "name", "look", "sync")),
        *(_at(FaultKind.APPLIED, sort) for sort in ("create", "write", "name", "remove", "sync")),
        _at(FaultKind.APPLIED, "name", error="EIO"),
        _error("EDQUOT", *_FILLING),
        _error("ESTALE", "read"),
        _at(FaultKind.BIT_FLIP, "write"),
        _at(FaultKind.LOST_DESCRIPTOR, "read", "write", "sync"),
    ),
    "network": (_at(FaultKind.HANG, "reply"), _at(FaultKind.APPLIED, "reply")),
    "objects": (*map(_error, ("ECONNRESET", "ETIMEDOUT")), _at(FaultKind.APPLIED, "write")),
}
MENU: Final[dict[str, tuple[Fault, ...]]] = {
    injector: (
        _at(FaultKind.HANG),
        *([_at(FaultKind.DELAY)] if injector in _UNNAMED else []),
        *(fault for named in faults.values() for fault in named),
        *_UNNAMED.get(injector, ()),
    )
    for injector, faults in NAMED_FAULTS.items()
}
"""What can go wrong on each injector. A lookup that lies is not there: no driver could tell, and
nothing it said would hold."""
