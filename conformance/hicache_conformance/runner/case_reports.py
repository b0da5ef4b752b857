"""Conversion of pytest's reports of a case's three phases into its outcome."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_conformance.model.cause import Cause
from hicache_conformance.model.fault_plan import FaultPlan
from hicache_conformance.model.outcomes import DETAIL_LIMIT, CaseOutcome, Outcome
from hicache_conformance.model.pytest_keys import (
    CALLS_PROPERTY,
    CASE_PROPERTY,
    CHECKS_PROPERTY,
    CONTEXT_PROPERTY,
    GATE_PROPERTY,
    PLANS_PROPERTY,
    VIOLATION_PROPERTY,
)

if TYPE_CHECKING:
    import pytest

_SKIP_PREFIX: Final = re.compile(r"^([\w.]*(Skipped|Inconclusive): )?(untested: )?")

# A case ends as the first of these that any of its phases ended as.
_WORST_FIRST: Final = (
    Outcome.FAIL,
    Outcome.ERROR,
    Outcome.UNTESTED,
    Outcome.NOT_DECLARED,
    Outcome.PASS,
)


class CaseReports:
    """Gathers the reports of cases; knows what the contexts said about their drivers."""

    def __init__(self) -> None:
        self._phases: dict[str, list[pytest.TestReport]] = {}
        self.contexts = dict[str, dict[str, Any]]()
        """By class: driver, capabilities and options, from the first case that came as far as
        that."""

    def add(self, report: pytest.TestReport) -> tuple[str, CaseOutcome] | None:
        """Take a report; the class and the outcome of its case where it was the last one."""
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append(report)
        # Three reports a case; a fixture that fails at the end decides as much as the call.
        if report.when != "teardown":
            return None
        del self._phases[report.nodeid]
        properties = dict(report.user_properties)
        case: dict[str, Any] = json.loads(str(properties[CASE_PROPERTY]))
        if CONTEXT_PROPERTY in properties:
            self.contexts.setdefault(case["owner"], json.loads(str(properties[CONTEXT_PROPERTY])))
        return case["owner"], _outcome(report.nodeid.rpartition("::")[2], case, phases, properties)


def _outcome(
    name: str, case: dict[str, Any], phases: list[pytest.TestReport], properties: dict[str, object]
) -> CaseOutcome:
    found = [_phase(report, properties) for report in phases]
    outcome = next(worst for worst in _WORST_FIRST if any(worst is phase for phase, _, _ in found))
    reason, detail = next((reason, detail) for phase, reason, detail in found if phase is outcome)
    broken, log, causes = "", "", tuple[Cause, ...]()
    if outcome is Outcome.FAIL:
        violation = json.loads(str(properties[VIOLATION_PROPERTY]))
        broken, log = violation["rule"], violation["log"]
        causes = msgspec.convert(violation["causes"], tuple[Cause, ...])
    rules: tuple[str, ...] = tuple(case["rules"])
    judged: list[str] = json.loads(str(properties.get(CHECKS_PROPERTY, "[]")))
    if outcome is Outcome.FAIL:
        judged.append(broken)
    checked = tuple(rule for rule in rules if rule in judged or "" in judged)
    if outcome is Outcome.PASS and not checked:
        outcome, reason = Outcome.UNTESTED, "the case ended and has checked none of its rules"
    return CaseOutcome(
        case=name,
        rules=rules,
        levels=tuple(case["levels"]),
        checked=checked,
        outcome=outcome,
        reason=reason,
        detail=detail,
        calls=str(properties.get(CALLS_PROPERTY, "")) if detail else "",
        log=log,
        broken_rule=broken,
        seconds=round(sum(report.duration for report in phases), 4),
        plans=msgspec.json.decode(
            str(properties.get(PLANS_PROPERTY, "[]")), type=tuple[FaultPlan, ...]
        ),
        causes=causes,
        passes_undeclared=any(report.passed and hasattr(report, "wasxfail") for report in phases),
    )


def _phase(report: pytest.TestReport, properties: dict[str, object]) -> tuple[Outcome, str, str]:
    """Outcome, reason and detail of a phase."""
    gate = str(properties.get(GATE_PROPERTY, ""))
    if hasattr(report, "wasxfail") or (report.skipped and gate):
        return Outcome.NOT_DECLARED, gate, ""
    if report.skipped:
        return Outcome.UNTESTED, _skip_reason(report), ""
    if report.passed:
        return Outcome.PASS, "", ""
    if VIOLATION_PROPERTY in properties:
        violation: dict[str, Any] = json.loads(str(properties[VIOLATION_PROPERTY]))
        return Outcome.FAIL, violation["message"], violation["detail"]
    text = report.longreprtext
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return (
        Outcome.ERROR,
        f"the suite itself broke during {report.when}: {last}",
        text[-DETAIL_LIMIT:],
    )


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return _SKIP_PREFIX.sub("", text)
