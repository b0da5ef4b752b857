"""Sets of errno values, and errors that are stored before they are reported."""

from __future__ import annotations

import errno

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
