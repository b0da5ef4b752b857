"""`badge.json`: what shields.io asks of an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.model.rules import Level
from hicache_conformance.model.verdict import Verdict

if TYPE_CHECKING:
    from hicache_conformance.model.outcomes import Header
    from hicache_conformance.model.verdict import Judgement

COLOURS: Final = {
    Verdict.CONFORMANT: "brightgreen",
    Verdict.NON_CONFORMANT: "red",
    Verdict.INCOMPLETE: "orange",
}


def badge(header: Header, judgement: Judgement) -> dict[str, Any]:
    """A verdict and its levels; never a percentage, because a driver does not conform by 97%."""
    levels, failed = header.levels, judgement.count(Outcome.FAIL)
    named = "all levels" if len(levels) == len(Level) else ", ".join(levels)
    # What is broken is told in the place of the levels; shields.io shows one line.
    detail = f"{failed} rules broken" if failed else named
    return {
        "schemaVersion": 1,
        "label": f"HiCacheStorage v{header.spec_version}",
        "message": f"{judgement.verdict} ({detail})",
        "color": COLOURS[judgement.verdict],
    }
