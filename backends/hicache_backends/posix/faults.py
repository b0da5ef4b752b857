"""Errors that are kept for a while before they are told."""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The file, or the file system, takes no more bytes."""

NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
"""The process, or the machine, has too many files open."""

GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""There is no such file, or not any more."""


def stop_unless(active: bool) -> None:
    """End a read within `Call.shield()` whose call is cancelled.

    Raises:
        OSError: the call is cancelled; the buffers are the caller's again.
    """
    if not active:
        raise OSError(errno.ETIMEDOUT, "nobody waits for the answer any more")


def kept(error: OSError) -> OSError:
    """An error without the frames it came from, which would keep their buffers and descriptors as long as it lives."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
