"""Waiting for what other threads do."""

from __future__ import annotations

import time

STUCK_SECONDS = 60


def until(condition):
    """Ask again and again until it holds; what it answered."""
    end = time.monotonic() + STUCK_SECONDS
    while not (answer := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)
    return answer


def finished(stack, operation):
    """The result of a prefetch once it is done."""
    until(lambda: operation.poll() and operation.done)
    return stack.controller.terminate_prefetch(operation)
