"""Files that are read again when they change, or when SIGHUP asks for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hicache_metadata_server.auth.audit_log import Audit

LOOK_SECONDS: Final = 1.0
"""How often files are looked at."""

_log = structlog.get_logger()
_Signature = tuple[tuple[int, int, int] | None, ...]


class Watched:
    """Files that belong together. What is in them is taken as a whole, or, if it is bad, stays what
    it was.

    Args:
        name: of what is in them, for logs and metrics.
        files: any of which may change.
        take: reads them; raises ValueError or OSError, and then has changed nothing.
    """

    def __init__(self, name: str, files: Sequence[Path], take: Callable[[], None]) -> None:
        self.name, self._files, self._take = name, files, take
        self._seen = self._signature()
        self.loads = 0
        self.problem = ""
        """Why the last attempt failed; empty if it did not."""

    def load(self) -> None:
        """Read them for the first time.

        Raises:
            ValueError: what is in them is bad.
            OSError: they cannot be read.
        """
        self._seen = self._signature()
        self._take()
        self.loads += 1

    def look(self, *, asked: bool) -> bool:
        """Read them again if they have changed, or if somebody asks; returns whether it was
        tried."""
        # What changes while it is read is read once more.
        found = self._signature()
        if found == self._seen and not asked:
            return False
        self._seen = found
        try:
            self._take()
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


class Reloads:
    """All watched files of a server; looked at from its event loop."""

    def __init__(
        self,
        watched: Sequence[Watched],
        audit: Audit,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watched, self._audit, self._clock = watched, audit, clock
        self._next = clock() + LOOK_SECONDS
        self._asked = False

    def ask(self) -> None:
        """Read everything again at the next look, and begin the audit file anew. May be called from
        a signal handler."""
        self._asked = True

    def look(self) -> None:
        """See to it, if it is time."""
        now = self._clock()
        if not self._asked and now < self._next:
            return
        asked, self._asked = self._asked, False
        self._next = now + LOOK_SECONDS
        if asked:
            self._audit.reopen()
        for one in self.watched:
            if one.look(asked=asked):
                self._audit.write(
                    "reload",
                    what=one.name,
                    result="failed" if one.problem else "done",
                    reason=one.problem,
                )


def _signature_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
