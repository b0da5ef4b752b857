"""Locks and counts that a forked child must not inherit from calls that ran in its parent (rule LC-5)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from typing import Final


class ForkAware(Protocol):
    """State that threads share: a fork may happen while one of them holds its lock, and that thread is not in the child."""

    def begin_in_child(self) -> None:
        """Have new locks, and forget the calls in flight. Runs in a child that was just forked, before anything else does."""
        ...


_aware: Final[WeakSet[ForkAware]] = WeakSet()


def begin_in_children(state: ForkAware) -> None:
    """Have `state.begin_in_child()` called in each process that is forked from now on, for as long as `state` lives."""
    _aware.add(state)


def _begin() -> None:
    for state in list(_aware):
        state.begin_in_child()


os.register_at_fork(after_in_child=_begin)
