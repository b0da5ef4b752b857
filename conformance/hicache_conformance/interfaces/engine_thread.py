"""A thread of an engine that calls its driver without waiting for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hicache_conformance.interfaces.interface import PATIENCE_SECONDS
from hicache_conformance.model.case import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

AnswerT = TypeVar("AnswerT")

START_SECONDS: Final = 60.0
"""How long one may take to be constructed, while an engine loads its model."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the suite, made in steps."""

    steps: Generator[str, None, Any]
    answer: Future[Any]
    patience: float
    deadline: float


class EngineThread:
    """A loop that makes all calls of a driver in one thread, as an engine's scheduler does.

    A call of the suite is a generator. It is resumed once in each turn of the loop until it returns,
    and yields what it waits for; so calls of several threads of the suite are under way at a time,
    and none of them waits inside the driver.

    Args:
        end_turn: called behind each turn, in the thread; may wait a little for the driver.
    """

    def __init__(self, name: str, end_turn: Callable[[], None] = lambda: None) -> None:
        self._end_turn = end_turn
        # Guards `_fresh` and `_closed`.
        self._changed = threading.Condition()
        self._fresh = list[_Call]()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(
        self, steps: Generator[str, None, AnswerT], *, patience: float = PATIENCE_SECONDS
    ) -> AnswerT:
        """Make a call and wait for its answer.

        Args:
            patience: seconds that it may take.

        Raises:
            Violation: FT-3, the driver has not answered in time.
        """
        call = _Call(steps, Future(), patience, time.monotonic() + patience)
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine has ended")
            self._fresh.append(call)
            self._changed.notify()
        try:
            # Longer than the deadline, which the thread itself looks at in each turn.
            answer: AnswerT = call.answer.result(patience + 1)
        except TimeoutError:
            raise Violation(
                "FT-3",
                f"a call of the driver keeps the engine's thread for more than "
                f"{patience:g} s; nothing else is served meanwhile",
            ) from None
        return answer

    def do(self, call: Callable[[], AnswerT], *, patience: float = PATIENCE_SECONDS) -> AnswerT:
        """Call a function in the thread."""

        return self.run(_at_once(call), patience=patience)

    def close(self) -> None:
        """End the thread; one that the driver keeps is left to itself."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(PATIENCE_SECONDS)

    def _loop(self) -> None:
        calls = list[_Call]()
        while True:
            with self._changed:
                if not calls:
                    self._changed.wait_for(lambda: self._fresh or self._closed)
                calls += self._fresh
                self._fresh.clear()
                if self._closed and not calls:
                    return
            calls = [call for call in calls if not _resumed(call)]
            try:
                if calls:
                    self._end_turn()
            except Exception as error:  # noqa: BLE001 - whatever a driver raises here ends the engine, and each call that waits
                for call in calls:
                    call.answer.set_exception(error)
                calls = []


def _resumed(call: _Call) -> bool:
    """Resume a call; return whether it has ended."""
    try:
        waits_for = next(call.steps)
        if time.monotonic() > call.deadline:
            raise Violation(
                "FT-3",
                f"{waits_for} for {call.patience:g} s; the engine has no limit, and waits for ever",
            )
    except StopIteration as end:
        call.answer.set_result(end.value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again in the thread of the suite
        call.answer.set_exception(error)
    else:
        return False
    return True


def _at_once(call: Callable[[], AnswerT]) -> Generator[str, None, AnswerT]:
    """A call that waits for nothing."""
    yield from ()
    return call()
