"""Fork safety: locks and counters that a forked child must replace (rule LC-5)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from typing import Final


class ForkAware(Protocol):
    """State that threads share.

    A fork may happen while a thread holds its lock, and that thread is not in the child.
    """

    def begin_in_child(self) -> None:
        """Replace locks, and forget calls in flight. Runs first in a forked child."""
        ...


# Weak references: a storage that is dropped without being closed is not kept for the next fork.
_aware: Final[WeakSet[ForkAware]] = WeakSet()


def begin_in_children(state: ForkAware) -> None:
    """Call `state.begin_in_child()` in each process that is forked from now on.

    It is called as long as `state` is referenced.
    """
    _aware.add(state)


def _begin() -> None:
    for state in list(_aware):
        state.begin_in_child()


# One hook for all objects, since Python has no way to unregister one.
os.register_at_fork(after_in_child=_begin)
