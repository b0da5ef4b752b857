"""State of this process: open resources, for a leak check, global settings, and what is logged."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from hicache_conformance.harness.concurrency import eventually
from hicache_conformance.model.cause import Cause, cause_of, damage

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import FrameType


@dataclass(frozen=True, slots=True)
class OpenResources:
    """Threads, descriptors and children of this process."""

    threads: dict[int, str]
    """Names by identifier."""
    descriptors: dict[int, str]
    """Targets by number."""
    children: dict[int, str]
    """Names by process id; of those that have ended, and are not reaped, too."""

    @classmethod
    def now(cls) -> Self:
        """Look now, after what is garbage has been collected."""
        gc.collect()
        threads = {
            thread.ident: thread.name
            for thread in threading.enumerate()
            if thread.ident is not None
        }
        descriptors = dict[int, str]()
        for entry in Path("/proc/self/fd").iterdir():
            # The descriptor that lists the directory is there no more.
            with suppress(FileNotFoundError):
                descriptors[int(entry.name)] = str(entry.readlink())
        own = str(os.getpid())
        children = {number: name for number, name, fields in processes() if fields[1] == own}
        return cls(threads, descriptors, children)

    def beyond(self, before: OpenResources) -> str:
        """Describe resources that were not open before; empty if there are none."""
        words = [
            f"thread {name!r}"
            for ident, name in self.threads.items()
            if ident not in before.threads
        ]
        words += [
            f"descriptor {number} ({target.replace(os.getcwd(), '.')})"
            for number, target in self.descriptors.items()
            # The target too: a number that was closed and given out again is another descriptor.
            if before.descriptors.get(number) != target
        ]
        words += [
            f"child process {number} ({name})"
            for number, name in self.children.items()
            if number not in before.children
        ]
        return ", ".join(words)


def left_open(before: OpenResources, seconds: float) -> str:
    """Describe what was not open before, and is after so many seconds; empty if nothing is."""
    eventually(lambda: not OpenResources.now().beyond(before), seconds, 0.05)
    return OpenResources.now().beyond(before)


def processes() -> Iterator[tuple[int, str, list[str]]]:
    """Id and name of each process; its state, parent, group, session and so on."""
    for entry in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile.
        with suppress(OSError):
            yield int(entry.name), *read_stat(entry / "stat")


def read_stat(stat: Path) -> tuple[str, list[str]]:
    """The name of a process or thread, and the fields behind it."""
    # `pid (name) state ppid ...`, where the name may hold blanks and parentheses.
    name, _, fields = stat.read_text("utf-8", "replace").partition(" (")[2].rpartition(") ")
    return name, fields.split()


FATAL: Final = (
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
)
"""Signals that cannot be handled, or not in Python: faulthandler has its own handlers of them."""
SIGNALS: Final = tuple(number for number in signal.Signals if number not in FATAL)
LEVEL: Final = 33


@contextmanager
def unchanged_globals() -> Generator[list[str]]:
    """Give each process-wide setting a value of the suite's own.

    The list names, at the end, those that were changed.

    For the main thread only, because signal handlers are.
    """
    changed = list[str]()
    root = logging.getLogger()
    level, handlers, hooks = root.level, list(root.handlers), (sys.excepthook, threading.excepthook)
    before = {number: signal.signal(number, _ignore) for number in SIGNALS}
    # Without handlers, because logging.basicConfig leaves a root logger alone that has some.
    root.setLevel(LEVEL)
    root.handlers.clear()
    try:
        # Everything is set to values that nobody else uses, so that a driver which sets the usual
        # ones, such as `SIG_DFL` or level INFO, is noticed.
        yield changed
        changed += [
            f"the handler of {number.name}"
            for number in SIGNALS
            if signal.getsignal(number) is not _ignore
        ]
        changed += ["the root logger's level"] * (root.level != LEVEL)
        changed += ["the root logger's handlers"] * bool(root.handlers)
        changed += ["logging.disable"] * bool(root.manager.disable)
        changed += ["the hooks for uncaught exceptions"] * (
            (sys.excepthook, threading.excepthook) != hooks
        )
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler that is nobody else's."""


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
    # More records than a case can log: a full buffer would be emptied.
    listener, root = BufferingHandler(sys.maxsize), logging.getLogger()
    listener.setLevel(logging.DEBUG + 1)
    level = root.level
    root.addHandler(listener)
    # Otherwise whatever is logged at INFO would not get as far as the listener.
    root.setLevel(logging.DEBUG + 1)
    try:
        yield listener.buffer
    finally:
        root.setLevel(level)
        root.removeHandler(listener)
