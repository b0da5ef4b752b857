"""From the three phases of a case to its outcome, on its way to a report."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import msgspec
import pytest

from hicache_conformance.fixtures.target import RECORD, CaseRecord
from hicache_conformance.model import OUTCOME_PROPERTY
from hicache_conformance.model.cause import Cause, cause_of
from hicache_conformance.model.outcomes import DETAIL_LIMIT, CaseOutcome, EndedCase, Outcome
from hicache_conformance.model.pytest_keys import CASE_MARK
from hicache_conformance.model.violation import NotPromised, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_conformance.harness.log_records import CauseLog

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


FINDINGS: Final = pytest.StashKey[list[CaseOutcome]]()
"""What each phase of a case came to so far."""


def take_phase(
    item: pytest.Item, error: BaseException | None, report: pytest.TestReport, *, owner: str
) -> None:
    """Note what a phase of a case came to; its last report carries the outcome."""
    record = item.stash.get(RECORD, CaseRecord())
    if isinstance(error, NotPromised):
        record.gate = str(error)
    mark = item.get_closest_marker(CASE_MARK)
    assert mark is not None
    injects = record.injects or bool(mark.kwargs.get("corrupts"))
    found = item.stash.setdefault(FINDINGS, [])
    found.append(_finding(report, error, record, injects=injects))
    # A fixture that fails at the end decides as much as the call.
    if report.when == "teardown":
        ended = EndedCase(
            owner=owner, context=record.context, outcome=_outcome(item.name, mark, found, record)
        )
        # A property and not an attribute, because reports are serialized on their way from
        # pytest-xdist's workers to the controller.
        report.user_properties.append((OUTCOME_PROPERTY, msgspec.json.encode(ended).decode()))


def violation_finding(
    error: BaseException, log: CauseLog | None = None, *, injects: bool = False
) -> CaseOutcome | None:
    """Describe a violation; None if `error` is, and holds, none.

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
    detail = "\n\n".join(filter(None, [f"{message}\n{more}".rstrip(), *sections]))
    return CaseOutcome(
        outcome=Outcome.FAIL,
        reason=message,
        detail=detail[:DETAIL_LIMIT],
        broken_rule=violation.rule,
        log="\n".join(log.lines) if log else "",
        causes=tuple(causes),
    )


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


def _finding(
    report: pytest.TestReport, error: BaseException | None, record: CaseRecord, *, injects: bool
) -> CaseOutcome:
    is_undeclared = hasattr(report, "wasxfail") or (report.skipped and bool(record.gate))
    if is_undeclared:
        return CaseOutcome(
            outcome=Outcome.NOT_DECLARED,
            reason=record.gate,
            seconds=report.duration,
            passes_undeclared=report.passed,
        )
    if report.skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = _SKIP_PREFIX.sub("", text)
        return CaseOutcome(outcome=Outcome.UNTESTED, reason=reason, seconds=report.duration)
    if report.passed:
        return CaseOutcome(outcome=Outcome.PASS, seconds=report.duration)
    found = violation_finding(error, record.log, injects=injects) if error is not None else None
    if found is not None:
        return replace(found, seconds=report.duration)
    text = report.longreprtext
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return CaseOutcome(
        outcome=Outcome.ERROR,
        reason=f"the suite itself broke during {report.when}: {last}",
        detail=text[-DETAIL_LIMIT:],
        seconds=report.duration,
    )


def _outcome(
    name: str, mark: pytest.Mark, findings: list[CaseOutcome], record: CaseRecord
) -> CaseOutcome:
    worst = min(findings, key=lambda finding: _WORST_FIRST.index(finding.outcome))
    rules: tuple[str, ...] = tuple(mark.kwargs["rules"])
    judged = {*record.checks, *([worst.broken_rule] if worst.outcome is Outcome.FAIL else [])}
    checked = tuple(rule for rule in rules if rule in judged or "" in judged)
    if worst.outcome is Outcome.PASS and not checked:
        reason = "the case ended and has checked none of its rules"
        worst = CaseOutcome(outcome=Outcome.UNTESTED, reason=reason)
    return replace(
        worst,
        case=name,
        rules=rules,
        levels=tuple(map(str, mark.kwargs["levels"])),
        checked=checked,
        seconds=round(sum(finding.seconds for finding in findings), 4),
        plans=tuple(record.plans),
        passes_undeclared=any(finding.passes_undeclared for finding in findings),
    )
