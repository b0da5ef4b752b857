"""Sets of errno values, errors that are stored before they are reported, and results with them."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from hicache_storage.objects import ObjectRead, ObjectWrite

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The file system takes no more bytes."""

NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
"""The process, or the machine, has too many files open."""

GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""The file does not exist, or no longer."""


def raise_if_cancelled(active: bool) -> None:
    """Abort a read whose call is cancelled; used within `Call.shield()`, which returns `active`.

    Raises:
        OSError: the call is cancelled; the buffers are the caller's again.
    """
    if not active:
        raise OSError(errno.ETIMEDOUT, "nobody waits for the answer any more")


def detached(error: OSError) -> OSError:
    """Remove the traceback and the causes of an error that is stored.

    Its frames would keep their buffers and descriptors for as long as the error is referenced.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


@dataclass(slots=True, eq=False)
class ReadOutcome:
    """Result of a batch of reads."""

    arrived: set[ObjectRead] = field(default_factory=set[ObjectRead])
    faults: list[Exception] = field(default_factory=list[Exception])


@dataclass(slots=True, eq=False)
class WriteOutcome:
    """Result of a batch of writes."""

    stored: set[ObjectWrite] = field(default_factory=set[ObjectWrite])
    faults: list[Exception] = field(default_factory=list[Exception])
