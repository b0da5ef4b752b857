"""The faults of each injector: named ones, tried one by one, and those of random plans."""

from __future__ import annotations

from typing import Final

from hicache_conformance.model.fault_plan import Fault, FaultKind

_FILLING: Final = ("create", "write", "name")
_WRITING: Final = (*_FILLING, "modify")

NAMED_FAULTS: Final[dict[str, dict[str, tuple[Fault, ...]]]] = {
    "disk": {
        "io-error": (Fault(kind=FaultKind.ERROR, error="EIO"),),
        "unreadable": (Fault(kind=FaultKind.ERROR, error="EIO", operations=("read",)),),
        "full": (Fault(kind=FaultKind.ERROR, error="ENOSPC", operations=_WRITING),),
        "full-halfway": (
            Fault(kind=FaultKind.ERROR, error="ENOSPC", operations=("write",), first=1),
        ),
        "read-only": (Fault(kind=FaultKind.ERROR, error="EROFS", operations=_WRITING),),
        "no-descriptors": (
            Fault(kind=FaultKind.ERROR, error="EMFILE", operations=("open", "create", "modify")),
        ),
        "lost-descriptors": (
            Fault(kind=FaultKind.LOST_DESCRIPTOR, operations=("read", "write"), count=6),
        ),
        "stale": (Fault(kind=FaultKind.ERROR, error="ESTALE"),),
        "short-read": (Fault(kind=FaultKind.SHORT_READ, operations=("read",)),),
        "short-write": (Fault(kind=FaultKind.SHORT_WRITE, operations=("write",)),),
        "torn-write": (Fault(kind=FaultKind.TORN_WRITE, operations=("write",)),),
        "bit-flip": (Fault(kind=FaultKind.BIT_FLIP, operations=("read",)),),
        "wrong-key": (Fault(kind=FaultKind.WRONG_KEY, operations=("read",)),),
    },
    "network": {
        "refused": (Fault(kind=FaultKind.REFUSE),),
        "cut-requests": (Fault(kind=FaultKind.CUT, operations=("request",)),),
        "cut-replies": (Fault(kind=FaultKind.CUT, operations=("reply",)),),
        "corrupt-requests": (Fault(kind=FaultKind.BIT_FLIP, operations=("request",), place=0.7),),
        "corrupt-replies": (Fault(kind=FaultKind.BIT_FLIP, operations=("reply",), place=0.7),),
    },
    "services": {
        "killed": (Fault(kind=FaultKind.KILL),),
        "restored": (Fault(kind=FaultKind.STALE),),
    },
    "objects": {
        "io-error": (Fault(kind=FaultKind.ERROR, error="EIO"),),
        "failing-reads": (Fault(kind=FaultKind.ERROR, error="EIO", operations=("read",)),),
        "failing-writes": (Fault(kind=FaultKind.ERROR, error="ENOSPC", operations=("write",)),),
        "duplicate": (Fault(kind=FaultKind.DUPLICATE),),
        "partial": (Fault(kind=FaultKind.PARTIAL, operations=("read", "write")),),
        "short-read": (Fault(kind=FaultKind.SHORT_READ, operations=("read",)),),
        "bit-flip": (Fault(kind=FaultKind.BIT_FLIP, operations=("read",)),),
        "wrong-key": (Fault(kind=FaultKind.WRONG_KEY, operations=("read",)),),
        "torn-write": (Fault(kind=FaultKind.TORN_WRITE, operations=("write",)),),
    },
}

UNAVAILABLE: Final[dict[str, tuple[Fault, ...]]] = {
    "disk": (Fault(kind=FaultKind.ERROR, error="EIO"),),
    "network": (Fault(kind=FaultKind.REFUSE),),
    "services": (Fault(kind=FaultKind.KILL),),
    "objects": (Fault(kind=FaultKind.ERROR, error="EIO"),),
}
"""Nothing works."""

REFUSALS: Final[dict[str, tuple[Fault, ...]]] = {
    "disk": tuple(
        Fault(kind=FaultKind.ERROR, error=error, operations=operations)
        for error, operations in (
            ("ENOSPC", _FILLING),
            # Without inodes, files that are there can be written.
            ("ENOSPC", ("create", "name")),
            ("EDQUOT", _FILLING),
            ("EROFS", (*_WRITING, "remove")),
            ("EXDEV", ("name",)),
            ("ENAMETOOLONG", ("create", "name")),
        )
    ),
    "objects": tuple(
        Fault(kind=FaultKind.ERROR, error=error, operations=("write",))
        for error in ("ENOSPC", "EDQUOT", "EROFS")
    ),
}
"""Nothing more can be written, and what is there can be read."""

HUNG: Final = (Fault(kind=FaultKind.HANG),)
"""Nothing answers."""

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
        *(Fault(kind=FaultKind.PARTIAL, operations=(sort,)) for sort in ("read", "write")),
        *(Fault(kind=FaultKind.DUPLICATE, operations=(sort,)) for sort in ("read", "write")),
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
