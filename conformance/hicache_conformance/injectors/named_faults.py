"""The faults of each injector: named ones, tried one by one, and those of random plans."""

from __future__ import annotations

from typing import Any, Final

from hicache_conformance.model.fault_plan import Fault, FaultKind

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
