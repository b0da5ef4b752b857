"""`index.html`: a self-contained page, verdict first."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, StrictUndefined

from hicache_conformance.model.outcomes import Outcome
from hicache_conformance.model.rules import Level
from hicache_conformance.report.results import reproduction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Template

    from hicache_conformance.model.case import Case
    from hicache_conformance.model.outcomes import Header
    from hicache_conformance.model.verdict import Judgement

LEVEL_SUMMARIES: Final = {
    Level.CORE: "One pool: right bytes or none, from open to close",
    Level.POOLS: "Several pools and hit policies",
    Level.IDENTITY: "Whose pages are whose",
    Level.SHARED: "Several processes on one store",
    Level.DURABLE: "kill -9 and restart",
    Level.FAULTS: "Full disks, lost servers, hung mounts",
    Level.STREAM: "Device copies and their order",
    Level.BUDGET: "Round trips, copies and counters",
}


def page(header: Header, judgement: Judgement, cases: Mapping[str, Case]) -> str:
    """The text of the file."""
    return _template().render(
        header=header,
        judgement=judgement,
        levels=[_level(level, header, judgement) for level in Level],
        outcomes=list(Outcome),
        groups=_groups(header, judgement),
        summaries={case.name: case.summary for case in cases.values()},
    )


@cache
def _template() -> Template:
    environment = Environment(
        # Reasons quote keys and bytes that a driver has answered, and undefined names must not
        # become empty cells.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["css"] = lambda outcome: str(outcome).replace(" ", "-")
    return environment.from_string(
        files("hicache_conformance.report").joinpath("index.html.j2").read_text("utf-8")
    )


def _groups(header: Header, judgement: Judgement) -> list[dict[str, object]]:
    """The cases that failed or broke, by the rule that each is about, in the order of the rules."""
    groups = list[dict[str, object]]()
    for result in judgement.rules:
        mine = [
            case
            for case in judgement.failures()
            if (case.broken_rule or case.rules[0]) == result.rule.id
        ]
        for outcome in (Outcome.FAIL, Outcome.ERROR):
            cases = [
                (case, reproduction(header, case.case), [str(plan) for plan in case.plans])
                for case in mine
                if case.outcome is outcome
            ]
            if cases:
                groups.append({"rule": result.rule, "outcome": outcome, "cases": cases})
    return groups


def _level(level: Level, header: Header, judgement: Judgement) -> dict[str, object]:
    counts = {outcome: judgement.count(outcome, level) for outcome in Outcome}
    return {
        "name": str(level),
        "summary": LEVEL_SUMMARIES[level],
        "selected": level in header.levels,
        "counts": {outcome: count for outcome, count in counts.items() if count},
        "total": sum(counts.values()),
        "passed": counts[Outcome.PASS],
    }
