"""Which capabilities a rule or a case asks for, written as text: `"clears"`, `"sharing>=process"`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.spec import Capabilities


def declares(capabilities: Capabilities, need: str) -> bool:
    """Whether a driver declares what `need` says; the empty text is declared by all.

    Raises:
        ValueError: there is no such capability, or no such value of it.
    """
    if not need:
        return True
    name, _, least = need.partition(">=")
    value = getattr(capabilities, name, None)
    if isinstance(value, StrEnum) and least:
        # The members stand in ascending order in their declaration.
        order = list(type(value))
        return order.index(value) >= order.index(type(value)(least))
    if isinstance(value, bool) and not least:
        return value
    raise ValueError(f"{need!r} names no capability; write a flag, or name>=value")


def undeclared(capabilities: Capabilities, needs: Iterable[str]) -> list[str]:
    """Those of `needs` that a driver does not declare."""
    return [need for need in needs if not declares(capabilities, need)]
