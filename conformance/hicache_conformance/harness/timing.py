"""Relative timing of calls on machines that are busy."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS: Final = 15
REPEAT: Final = 20
REPEATED_SECONDS: Final = 0.02
"""Calls are repeated in a round until they take this long, at most `REPEAT` times: a call that waits
for a slow server is measured well enough by one."""


def min_cpu_seconds(*questions: Callable[[], object]) -> list[float]:
    """CPU time of one call of each, all threads of the process together.

    The least of several interleaved rounds.
    """
    taken = max(_wall(question) for question in questions)
    repeat = max(1, min(REPEAT, int(REPEATED_SECONDS / taken)))
    rounds = [[_cpu(question, repeat) for question in questions] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def seconds(*questions: Callable[[], object]) -> list[list[float]]:
    """Times of one call of each question, in interleaved rounds whose order alternates."""
    rounds = list[list[float]]()
    for number in range(ROUNDS):
        # Alternating, so that warmth of caches and a machine that gets slower favour no question.
        order = range(len(questions)) if number % 2 else reversed(range(len(questions)))
        taken = {index: _wall(questions[index]) for index in order}
        rounds.append([taken[index] for index in range(len(questions))])
    return [list(times) for times in zip(*rounds, strict=True)]


def significantly_slower(slow: list[float], fast: list[float]) -> float:
    """The factor by which one is slower, in the judgement that favours it.

    The least of the ratios of minima and medians.
    """
    return min(min(slow) / min(fast), median(slow) / median(fast))


def _cpu(question: Callable[[], object], repeat: int) -> float:
    started = time.process_time()
    for _ in range(repeat):
        question()
    return (time.process_time() - started) / repeat


def _wall(question: Callable[[], object]) -> float:
    started = time.perf_counter()
    question()
    return time.perf_counter() - started
