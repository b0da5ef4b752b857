"""`index.html`: a self-contained page, verdict first."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, StrictUndefined, Template

from hicache_conformance.model.outcomes import Case, Header, Outcome
from hicache_conformance.model.rules import Level
from hicache_conformance.report.results import reproduction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.model.verdict import Judgement

LEVEL_SUMMARIES: Final = {
    Level.CORE: "One pool: right bytes or none, from open to close",
    Level.POOLS: "Several pools and hit policies",
    Level.IDENTITY: "Whose pages are whose",
    Level.SHARED: "Several processes on one store",
    Level.DURABLE: "kill -9 and restart",
    Level.FAULTS: "Full disks, lost servers, hung mounts",
    Level.BUDGET: "Round trips, copies and counters",
}


def page(header: Header, judgement: Judgement, cases: Mapping[str, Case]) -> str:
    """The text of the file."""
    return template("index.html.j2").render(
        header=header,
        judgement=judgement,
        levels=[_level(level, header, judgement) for level in Level],
        outcomes=list(Outcome),
        groups=_groups(header, judgement),
        summaries={case.name: case.summary for case in cases.values()},
    )


@cache
def template(name: str) -> Template:
    """Return a template of this package; what goes into a page of HTML is escaped."""
    environment = Environment(
        # Reasons quote keys and bytes that a driver has answered, and undefined names must not
        # become empty cells.
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["css"] = lambda outcome: str(outcome).replace(" ", "-")
    # A text as Python has it, with the quotation marks that formatters prefer.
    environment.filters["literal"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment.from_string(
        files("hicache_conformance.report").joinpath(name).read_text("utf-8")
    )


def _groups(header: Header, judgement: Judgement) -> list[dict[str, object]]:
    """The rules that are broken, as the table has them, each with the cases that say so.

    Cases of a broken rule in which the suite itself broke come last.
    """
    groups = list[dict[str, object]]()
    for result in judgement.rules:
        if result.selected and result.outcome in (Outcome.FAIL, Outcome.ERROR):
            failing = result.failing()
            failing += [
                case
                for case in result.cases
                if case.outcome is Outcome.ERROR and case not in failing
            ]
            cases = [
                (case, reproduction(header, case.case), [str(plan) for plan in case.plans])
                for case in failing
            ]
            groups.append({"rule": result.rule, "outcome": result.outcome, "cases": cases})
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
