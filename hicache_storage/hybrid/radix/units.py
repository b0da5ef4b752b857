"""What a page is made of: tokens, or for EAGLE pairs of neighbours (bigrams)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

Bigram: TypeAlias = tuple[int, int]
Units: TypeAlias = "tuple[int, ...] | tuple[Bigram, ...]"
"""One for each row of KV. A draft model's row of a token depends on the token after it, so that both are its key."""


def units_of(tokens: Sequence[int], *, bigram: bool) -> Units:
    """The units of a sequence; n tokens are n - 1 pairs."""
    return tuple(pairwise(tokens)) if bigram else tuple(tokens)


def tokens_of(units: Units, *, bigram: bool) -> tuple[int, ...]:
    """The reverse of `units_of`, as page keys are made of."""
    if not bigram or not units:
        return cast("tuple[int, ...]", units)
    pairs = cast("tuple[Bigram, ...]", units)
    return (*(first for first, _ in pairs), pairs[-1][1])
