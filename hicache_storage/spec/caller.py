"""Whoever waits for a call, and when they stop waiting (rules GET-9 and SET-8)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Caller:
    """Stands for the caller of one call, who leaves when the deadline has passed and no answer has come.

    Thread-safe. `with caller as waits:` keeps the caller from leaving while its memory is written, if it has not left
    already; the block must not wait for anything that may hang.
    """

    __slots__ = ("_changed", "_gone", "_held")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = 0
        self._gone = False

    @property
    def gone(self) -> bool:
        """Whether the caller has left: its memory belongs to somebody else, and nothing of it may be published."""
        return self._gone

    def leave(self) -> None:
        """Stop waiting, as soon as nobody writes to the caller's memory any more."""
        with self._changed:
            self._gone = True
            self._changed.wait_for(lambda: not self._held)

    def __enter__(self) -> bool:
        with self._changed:
            self._held += 1
            return not self._gone

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._changed:
            self._held -= 1
            if not self._held:
                self._changed.notify_all()
