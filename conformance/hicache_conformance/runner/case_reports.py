"""Conversion of pytest's reports of a case's three phases into its outcome."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from hicache_conformance.model.cause import Cause, cause_of
from hicache_conformance.model.fault_plan import FaultPlan
from hicache_conformance.model.outcomes import DETAIL_LIMIT, CaseOutcome, Header, Outcome, Replay
from hicache_conformance.model.pytest_keys import (
    CALLS_PROPERTY,
    CASE_PROPERTY,
    CHECKS_PROPERTY,
    CONTEXT_PROPERTY,
    GATE_PROPERTY,
    PLANS_PROPERTY,
    VIOLATION_PROPERTY,
)
from hicache_conformance.model.violation import Violation
from hicache_conformance.report.header import blank_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from hicache_conformance.harness.log_records import CauseLog
    from hicache_conformance.model.settings import Settings

MAX_CAUSES: Final = 3
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


def describe_violation(
    error: BaseException, log: CauseLog | None = None, *, injects: bool = False
) -> dict[str, Any] | None:
    """Return the report's record of a violation; None if `error` is, and holds, none.

    Args:
        error: raised by a case.
        log: of the case.
        injects: the case makes the store fail or damages pages, so that faults of the store
            explain nothing.
    """
    violation = next((found for found in _unwrapped(error) if isinstance(found, Violation)), None)
    if violation is None:
        return None
    # An exception group may carry the notes in the place of the violation in it.
    notes = getattr(violation, "__notes__", []) or getattr(error, "__notes__", [])
    message, _, more = str(violation).partition("\n")
    causes = _causes(violation, log, injects=injects)
    sections = [
        *notes,
        *(f"Cause: {cause}\n{cause.traceback}" for cause in causes if cause.traceback),
    ]
    if causes:
        # The exception that a call has raised is quoted by the message itself.
        is_quoted = violation.__cause__ is not None or causes[0].error in message
        if not is_quoted:
            message += f"; answered as a miss: {causes[0]}"
        elif causes[0].place:
            message += f" ({causes[0].place})"
    return {
        "rule": violation.rule,
        "message": message,
        "detail": "\n\n".join(filter(None, [f"{message}\n{more}".rstrip(), *sections]))[
            :DETAIL_LIMIT
        ],
        "log": "\n".join(log.lines) if log else "",
        "causes": [asdict(cause) for cause in causes],
    }


def header_of(context: dict[str, Any] | None, settings: Settings) -> Header:
    """The header of a run in the author's own pytest."""
    if context is None:
        return blank_header("unknown", settings)
    header = blank_header(
        context["driver"],
        settings,
        capabilities=context["capabilities"],
        options=context["options"],
    )
    header.replay = Replay(
        run=settings.run,
        options=context["options"],
        services=context["services"],
        test_class=context["test_class"],
    )
    return header


def _causes(violation: Violation, log: CauseLog | None, *, injects: bool) -> list[Cause]:
    """Return the exceptions that explain a violation, the first one first."""
    if violation.__cause__ is not None:
        return [cause_of(violation.__cause__)]
    return [
        cause
        for cause in (log.causes if log else ())
        if not cause.injected and not (injects and cause.expected)
    ][:MAX_CAUSES]


def _unwrapped(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for inner in group.exceptions:
            yield from _unwrapped(inner)


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
