"""From what fails to the least of it that still fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ItemT = TypeVar("ItemT")


def least(items: Sequence[ItemT], fails: Callable[[list[ItemT]], bool], *, tries: int = 60) -> list[ItemT]:
    """Leave out pieces, large ones first, as long as what is left fails (delta debugging).

    Args:
        items: fail together.
        fails: whether some of them, in their order, still fail.
        tries: most calls of `fails`; what has been reached by then is the answer.

    Returns:
        Items that fail; each is needed, unless the tries came to an end before.
    """
    kept, pieces = list(items), 2
    while kept and tries > 0:
        size = max(1, len(kept) // pieces)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            tries -= 1
            if fails(rest):
                kept, pieces = rest, max(2, pieces - 1)
                break
            if tries <= 0:
                break
        else:
            if size == 1:
                break
            pieces = min(len(kept), pieces * 2)
    return kept
