"""Capture of a driver's log records, and of the exceptions that they report."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hicache_conformance.model.cause import Cause, cause_of, damage

if TYPE_CHECKING:
    from collections.abc import Generator

MAX_CAUSES: Final = 20
"""Distinct exceptions that are kept of one case."""
MAX_LINES: Final = 20
"""Log lines that are kept of one case, the last ones."""
_LOGGERS: Final = ("hicache_storage.objects", "hicache_conformance.interfaces")
"""Loggers of the modules that answer exceptions as misses; they report each at debug level."""


class CauseLog(logging.Handler):
    """Exceptions and warnings that a driver, the SDK and the adapters have logged in one case."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._causes: dict[str, Cause] = {}
        self._taken = 0
        self.lines = deque[str](maxlen=MAX_LINES)
        """The last warnings and errors."""

    @property
    def causes(self) -> list[Cause]:
        """The exceptions, each once, in the order of their first occurrence."""
        return list(self._causes.values())

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's exception as text, because its frames hold the pages of the call."""
        if record.levelno >= logging.WARNING:
            self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")
        defect = getattr(record, "defect", "")
        if defect:
            self.note([damage(defect)])
        error = _exception(record)
        # By type and message first: to format a traceback costs more than most calls do.
        if error is not None and len(self._causes) < MAX_CAUSES:
            name = f"{type(error).__name__}: {error}"
            if name not in self._causes:
                self._causes[name] = cause_of(error)

    def take(self) -> list[Cause]:
        """Return the exceptions that were not taken before."""
        fresh = self.causes[self._taken :]
        self._taken += len(fresh)
        return fresh

    def note(self, causes: list[Cause]) -> None:
        """Add the exceptions of another process."""
        for cause in causes[: MAX_CAUSES - len(self._causes)]:
            self._causes.setdefault(cause.error, cause)


@contextmanager
def cause_log() -> Generator[CauseLog]:
    """Collect what is logged meanwhile, in all threads: exceptions, and the last warnings."""
    log, root = CauseLog(), logging.getLogger()
    levels = {logger: logger.level for logger in (*map(logging.getLogger, _LOGGERS), root)}
    root.addHandler(log)
    for logger in levels:
        logger.setLevel(logging.DEBUG if logger is not root else min(logging.WARNING, root.level))
    try:
        yield log
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)
        root.removeHandler(log)


def _exception(record: logging.LogRecord) -> BaseException | None:
    if record.exc_info and record.exc_info[1] is not None:
        return record.exc_info[1]
    # A store that is down is logged without its traceback, and the exception is an argument.
    arguments = record.args if isinstance(record.args, tuple) else ()
    return next((each for each in arguments if isinstance(each, BaseException)), None)


@contextmanager
def records_above_debug() -> Generator[list[logging.LogRecord]]:
    """The records above debug level that reach the root logger meanwhile, from any thread."""
    records = list[logging.LogRecord]()

    class _Capture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    listener, root = _Capture(logging.DEBUG + 1), logging.getLogger()
    level = root.level
    root.addHandler(listener)
    # Otherwise whatever is logged at INFO would not get as far as the listener.
    root.setLevel(logging.DEBUG + 1)
    try:
        yield records
    finally:
        root.setLevel(level)
        root.removeHandler(listener)
