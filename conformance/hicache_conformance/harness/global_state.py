"""A guard on process-global state: set to marked values, and compared afterwards."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

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
