"""State of this process: open resources, for a leak check, and global settings."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from hicache_conformance.harness.concurrency import eventually

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
