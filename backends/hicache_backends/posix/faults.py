"""Errors that are kept for a while before they are told."""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The file, or the file system, takes no more bytes."""

NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
"""The process, or the machine, has too many files open."""

GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""There is no such file, or not any more."""


def raise_if_cancelled(waits: bool) -> None:
    """End a read within `Call.caller`, which says whether anybody waits.

    Raises:
        OSError: nobody does; the buffers are the caller's again.
    """
    if not waits:
        raise OSError(errno.ETIMEDOUT, "nobody waits for the answer any more")


def detached(error: OSError) -> OSError:
    """An error without the frames it came from, which would keep their buffers and descriptors as long as it lives."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
