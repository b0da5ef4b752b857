"""The rules of the contract, loaded from the packaged `rules.toml`, and the capabilities they need."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.spec import Capabilities


class Level(StrEnum):
    """Levels of conformance; in the order of `docs/spec.md`."""

    CORE = "core"
    POOLS = "pools"
    IDENTITY = "identity"
    SHARED = "shared"
    DURABLE = "durable"
    FAULTS = "faults"
    BUDGET = "budget"


LEVEL_NEEDS: Final = {Level.SHARED: "sharing>=processes", Level.DURABLE: "durability>=process"}
"""Capabilities without which a level says nothing about a driver, whatever its rules need by
themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of the contract."""

    id: str
    levels: tuple[Level, ...]
    text: str
    """What it asks."""
    why: str
    """What happened where it was not kept."""
    needs: str = ""
    """Capability that makes the rule binding, as `declares` reads it; empty where it binds every
    driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    spec: str
    rule: tuple[Rule, ...]


@cache
def rules() -> dict[str, Rule]:
    """All rules by id, in the order of the specification."""
    found = dict[str, Rule]()
    for rule in _manifest().rule:
        if rule.id in found:
            raise ValueError(f"rules.toml lists {rule.id} twice")
        found[rule.id] = rule
    return found


def spec_version() -> str:
    """Version of the contract that the rules belong to."""
    return _manifest().spec


def parse_levels(text: str) -> tuple[Level, ...]:
    """Levels of a comma-separated text, in the specification's order.

    `all` and empty text mean every level.

    Raises:
        ValueError: a level is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or "all" in names:
        return tuple(Level)
    unknown = [name for name in names if name not in list(Level)]
    if unknown:
        raise ValueError(f"unknown level {unknown[0]!r}; levels are {', '.join(Level)}, or all")
    # In the order of the enum and not of the text, so that reports of one selection are alike.
    return tuple(level for level in Level if level in names)


def all_needs() -> list[str]:
    """Every capability that some rule or level needs."""
    return sorted({*LEVEL_NEEDS.values(), *(rule.needs for rule in rules().values() if rule.needs)})


@cache
def _manifest() -> _Manifest:
    return msgspec.toml.decode(
        files("hicache_conformance.model").joinpath("rules.toml").read_bytes(), type=_Manifest
    )


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
