"""The rules of the metadata protocol."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from hicache_conformance.model.rules import Level, Rule, by_id, parse_names

if TYPE_CHECKING:
    from collections.abc import Collection

LEVELS = (Level.CORE, Level.SHARED, Level.DURABLE, Level.FAULTS, Level.BUDGET)
"""Those of the contract that say something about a metadata server."""


class Part(StrEnum):
    """Of the protocol."""

    COMPATIBLE = "compatible"
    """What an unchanged engine of SGLang 0.5.23 speaks."""
    NATIVE = "native"
    """What stands under `/v2`."""


class Need(StrEnum):
    """Requirements of rules; `server_info` determines whether the server meets them."""

    NATIVE = "native"
    """It answers under /v2."""
    LEASES = "leases"
    """Reservations end by themselves: the native part says when, or `--lease-seconds` does."""
    DURABLE = "durable"
    """Acknowledged changes survive kill -9: the native part says so, or a `--start-server` that
    keeps something in {tmp}."""
    TOKENS = "tokens"
    """It asks for a token: one was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolRule(Rule):
    """A rule of the protocol."""

    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    protocol: str
    rule: tuple[ProtocolRule, ...]


@cache
def protocol_rules() -> dict[str, ProtocolRule]:
    """All rules by id, in the order of the document."""
    return by_id(_manifest().rule, "protocol/rules.toml")


def rules_of(parts: Collection[str]) -> dict[str, Rule]:
    """The rules of some parts."""
    return {rule.id: rule for rule in protocol_rules().values() if rule.part in parts}


def protocol_version() -> str:
    """Version of the protocol that the rules belong to."""
    return _manifest().protocol


def parse_parts(text: str) -> tuple[Part, ...]:
    """Parts of a comma-separated text; `all` and empty text mean every part.

    Raises:
        ValueError: a part is unknown.
    """
    return parse_names(Part, text)


@cache
def _manifest() -> _Manifest:
    content = files("hicache_conformance.protocol").joinpath("rules.toml").read_bytes()
    return msgspec.toml.decode(content, type=_Manifest)
