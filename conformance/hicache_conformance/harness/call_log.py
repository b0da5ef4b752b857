"""The last calls of a case, for the replay of a failure."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

from hicache_conformance.harness.page_patterns import short
from hicache_storage.spec import PoolTransferResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CALLS: Final = 40
"""How many lines are kept: what a failure follows from stands near its end."""
KEYS: Final = 2
"""How many keys of a transfer are shown."""
TEXT_LIMIT: Final = 200


class CallLog:
    """A bounded list of calls, each a line; several threads may use it at once."""

    def __init__(self) -> None:
        self._lines = deque[str](maxlen=CALLS)

    def add(self, name: str, about: Sequence[tuple[str, Sequence[str]]], answer: object) -> None:
        """Add a call that has returned or raised.

        Args:
            name: of the method.
            about: pools and keys that it was called with.
            answer: what it returned or raised.
        """
        # As text, because keys and answers that are kept would count as memory of the driver.
        pages = "; ".join(_pages(pool, keys) for pool, keys in about)
        self._lines.append(f"{name}({pages}) -> {_answer(answer)}")

    def note(self, text: str) -> None:
        """Add lines that are no call."""
        self._lines.extend(text.splitlines())

    def restore(self, text: str) -> None:
        """Put the lines of an earlier time in the place of those that have come since."""
        self._lines.clear()
        self.note(text)

    def __str__(self) -> str:
        return "\n".join(self._lines)


def _pages(pool: str, keys: Sequence[str]) -> str:
    shown = ", ".join(map(short, islice(keys, KEYS)))
    more = ", ..." if len(keys) > KEYS else ""
    number = "1 key" if len(keys) == 1 else f"{len(keys)} keys"
    return f"{pool}: {number} {shown}{more}" if len(keys) else pool


def _answer(answer: object) -> str:
    if isinstance(answer, dict):
        answers = cast("Mapping[object, object]", answer)
        return "; ".join(f"{pool}: {_answer(found)}" for pool, found in answers.items()) or "{}"
    if isinstance(answer, list):
        listed = cast("list[object]", answer)
        if len(listed) > KEYS and all(isinstance(one, bool) for one in listed):
            held = sum(map(bool, listed))
            where = f", the first False at {listed.index(False)}" if held < len(listed) else ""
            return f"{held} of {len(listed)} True{where}"
    if isinstance(answer, PoolTransferResult):
        pools = {str(pool): hit for pool, hit in answer.extra_pool_hit_pages.items()}
        return f"{answer.kv_hit_pages} pages; by pool {pools}"
    if isinstance(answer, BaseException):
        return f"raised {type(answer).__name__}: {str(answer)[:TEXT_LIMIT]}"
    return repr(answer)[:TEXT_LIMIT]  # pyright: ignore[reportUnknownArgumentType] - any object
