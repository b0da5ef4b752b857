"""Waiting for other threads and processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
PATIENCE_SECONDS = 60.0


def eventually(
    condition: Callable[[], T],
    complaint: str = "nothing happened",
    *,
    seconds: float = PATIENCE_SECONDS,
) -> T:
    """Ask again and again until a condition holds, and return what it answered then."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, complaint
        time.sleep(0.005)
    return answer
