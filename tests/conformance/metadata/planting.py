"""Facts about a server with a planted fault, and their registry.

The modules `faulty_*.py` register theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.reference import LIMITS, Reference
from tests.conformance.metadata.reference_server import Handler, Handlers
from tests.conformance.metadata.reference_state import Scope

TOKENS = {"all": p.Token.ADMIN, "look": p.Token.READ, "write": p.Token.WRITE}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A server that is wrong in one way."""

    breaks: tuple[str, ...]
    field_fault: str = ""
    """The fault of a shipped server that it repeats."""
    scope: type[Scope] = Scope
    reference: type[Reference] = Reference
    handlers: type[Handlers] = Handlers
    handler: type[Handler] = Handler
    limits: p.Limits = LIMITS
    tokens: dict[str, p.Token] = field(default_factory=dict)
    restarts: bool = False
    """Shows only after a restart."""
    only: tuple[str, ...] = ()
    """Cases to try it with; empty for all of the rules that it breaks."""


FAULTS: dict[str, Fault] = {}


def plant(*breaks: str, field_fault: str = "", **options: Any):
    """Register a class as a fault, by what it inherits.

    Of the scope, the operations, the handlers or HTTP.
    """

    def register(made: type) -> type:
        kinds = {Scope: "scope", Reference: "reference", Handlers: "handlers", Handler: "handler"}
        part = next(part for base, part in kinds.items() if issubclass(made, base))
        FAULTS[made.__name__] = Fault(
            breaks=breaks, field_fault=field_fault, **{part: made}, **options
        )
        return made

    return register
