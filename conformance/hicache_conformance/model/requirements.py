"""Capability requirements of rules and cases, written as text: `"clears"`, `"sharing>=process"`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.spec import Capabilities

_PROMISES: Final = (
    "sharing",
    "durability",
    "deletes",
    "clears",
    "evicts",
    "device_memory",
    "max_page_bytes",
    "max_key_bytes",
)
"""What a driver chooses. Whether calls leave the machine, may hang, or need buffers depends on
where the store lies."""


def declares(capabilities: Capabilities, need: str) -> bool:
    """Return whether a driver declares `need`; the empty text is declared by all.

    Raises:
        ValueError: there is no such capability, or no such value of it.
    """
    if not need:
        return True
    # Text and not a function, so that needs can stand in `rules.toml` and be printed in reports.
    name, _, least = need.partition(">=")
    value = getattr(capabilities, name, None)
    if isinstance(value, StrEnum) and least:
        # The members stand in ascending order in their declaration.
        order = list(type(value))
        return order.index(value) >= order.index(type(value)(least))
    if isinstance(value, bool) and not least:
        return value
    # A limit is something that a case can be about only if there is one.
    if name == "max_page_bytes" and not least:
        return value is not None
    raise ValueError(f"{need!r} names no capability; write a flag, or name>=value")


def undeclared(capabilities: Capabilities, needs: Iterable[str]) -> list[str]:
    """Those of `needs` that a driver does not declare."""
    return [need for need in needs if not declares(capabilities, need)]


def beyond(declared: Capabilities, promised: Capabilities) -> list[str]:
    """The promises in `declared` that `promised` does not have, as `name=value`."""
    return [
        f"{name}={getattr(declared, name)}"
        for name in _PROMISES
        if _rank(getattr(declared, name)) > _rank(getattr(promised, name))
    ]


def _rank(value: object) -> float:
    if isinstance(value, StrEnum):
        return list(type(value)).index(value)
    if isinstance(value, int):
        return value
    # No limit promises more than any limit.
    assert value is None, value
    return float("inf")
