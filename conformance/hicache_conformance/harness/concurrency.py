"""Calls in threads: one that may hang, or several that begin at the same time."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from hicache_conformance.model.case import Violation, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

AnswerT_co = TypeVar("AnswerT_co", covariant=True)

CALL_THREAD: Final = "suite-call"
HANG_SECONDS: Final = 120.0
"""Limit for a thread of `together`; no time that a working driver takes comes near it."""


class Pending(Generic[AnswerT_co]):
    """Begins at once.

    A call that never comes back leaves its thread behind, which keeps no process alive.
    """

    def __init__(self, ask: Callable[[], AnswerT_co]) -> None:
        self._ask = ask
        self._answers: list[AnswerT_co] = []
        self._error: BaseException | None = None
        # Before the thread starts: a caller counts its deadline from when it asked.
        self._began = time.monotonic()
        self.seconds: float | None = None
        """How long it took; None while it runs."""
        self._thread = threading.Thread(target=self._run, name=CALL_THREAD, daemon=True)
        self._thread.start()

    def ended(self, within: float) -> bool:
        """Return whether it has ended `within` seconds of its beginning; waits for that."""
        self._thread.join(max(0.0, self._began + within - time.monotonic()))
        # By the call's own clock, because the join may return late.
        return self.seconds is not None and self.seconds <= within

    def comes_back(self, within: float | None) -> bool:
        """Return whether it ends within so many seconds from now; None for no limit."""
        self._thread.join(within)
        return self.seconds is not None

    def answer(self) -> AnswerT_co:
        """Return or raise the result of a call that has ended."""
        if self._error is not None:
            raise self._error
        return self._answers[0]

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is asked for
            self._error = error
        self.seconds = time.monotonic() - self._began


def eventually(look: Callable[[], object], seconds: float, pause: float = 0.02) -> bool:
    """Return whether `look` comes true within so many seconds."""
    until = time.monotonic() + seconds
    while not look():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True


def together(
    rule: str, functions: Sequence[Callable[[], object]], seconds: float | None = HANG_SECONDS
) -> None:
    """Run functions in a thread each, begun at the same time, and wait for all of them.

    Raises:
        Violation: `rule`, if one hangs for so long; otherwise what the first that failed has raised.
    """
    checked(rule)
    errors = list[BaseException]()
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        try:
            # Threads that merely start one after the other have often ended before the next begins.
            start.wait()
            function()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    for call in [Pending(partial(run, function)) for function in functions]:
        if not call.comes_back(seconds):
            raise Violation(rule, f"a call has not come back after {seconds:.0f} s")
    if errors:
        raise errors[0]
