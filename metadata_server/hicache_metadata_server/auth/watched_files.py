"""Files that are reloaded when they change, and on SIGHUP.

By polling: inotify does not report changes that another client of a network file system makes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hicache_metadata_server.auth.audit_log import AuditLog

POLL_SECONDS: Final = 1.0
"""Interval of the checks."""

_log = structlog.get_logger()
_Signature = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Files that are loaded together.

    If loading fails, the last good content stays in use.

    Args:
        name: in logs and metrics.
        files: reloaded together when any of them changes.
        load: reads them; raises ValueError or OSError, and then has changed nothing.
    """

    def __init__(self, name: str, files: Sequence[Path], load: Callable[[], None]) -> None:
        self.name = name
        self._files = files
        self._load = load
        self._loaded = self._signature()
        self.loads = 0
        self.problem = ""
        """Error of the last attempt, or ""."""

    def load(self) -> None:
        """Load the files for the first time.

        Raises:
            ValueError: the content is invalid.
            OSError: a file cannot be read.
        """
        self._loaded = self._signature()
        self._load()
        self.loads += 1

    def reload(self, *, force: bool) -> bool:
        """Load the files again if they changed or `force` is set; True if it tried."""
        # Before loading: a file that changes meanwhile has another signature at the next poll.
        found = self._signature()
        if found == self._loaded and not force:
            return False
        # Also if loading fails: the same bad file is not an error line every second.
        self._loaded = found
        try:
            self._load()
        except (ValueError, OSError) as error:
            self.problem = str(error)
            _log.error("reload_failed", what=self.name, reason=self.problem)
        else:
            self.problem = ""
            self.loads += 1
            _log.info("reloaded", what=self.name)
        return True

    def _signature(self) -> _Signature:
        return tuple(map(_signature_of, self._files))


class FileWatcher:
    """All watched files of a server; polled from its event loop."""

    def __init__(
        self,
        watched: Sequence[WatchedFiles],
        audit: AuditLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watched = watched
        self._audit = audit
        self._clock = clock
        self._next = clock() + POLL_SECONDS
        self._forced = False

    def request_reload(self) -> None:
        """Reload everything at the next poll.

        Safe to call in a signal handler.
        """
        # Only a flag: the handler may interrupt any line of the event loop.
        self._forced = True

    def poll(self) -> None:
        """Reload changed files, once in `POLL_SECONDS`."""
        now = self._clock()
        if not self._forced and now < self._next:
            return
        force = self._forced
        # Before the work, so that a signal that arrives meanwhile is not lost.
        self._forced = False
        self._next = now + POLL_SECONDS
        for one in self.watched:
            if one.reload(force=force):
                self._audit.write(
                    "reload",
                    what=one.name,
                    result="failed" if one.problem else "done",
                    reason=one.problem,
                )


def _signature_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    # A missing file is a state like others: it may be replaced in two steps.
    except OSError:
        return None
    # The inode as well: a file moved into place may have the time and size of the old one.
    return found.st_mtime_ns, found.st_size, found.st_ino
